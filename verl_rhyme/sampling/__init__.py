"""Noise of draws, and which sampling options a continued response keeps.

Process: vLLM's worker and server, agent loop workers. Engines: none.
"""
