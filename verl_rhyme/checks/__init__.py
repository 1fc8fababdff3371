"""Checks before a run: doctor, start-up, preflight, combinations of options.

Process: the command's, verl's driver at its start, the trainer. Engines: verl, vllm.
"""
