"""Draft policies: draft tokens from text and from a draft head.

Process: vLLM's worker. Engines: none.
"""
