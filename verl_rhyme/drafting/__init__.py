"""Draft policies: draft tokens from text.

Process: vLLM's worker. Engines: none.
"""
