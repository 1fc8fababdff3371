"""Checks before a run: doctor, start-up, preflight, combinations of options.

Process: the command's, and verl's driver at its start. Engines: verl, vllm.
"""
