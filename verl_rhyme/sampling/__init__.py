"""Sampling noise, and the sampling options of continued responses.

Process: vLLM's worker and server, agent loop workers. Engines: none.
"""
