"""Event log, metrics, live progress line and final report of a training run.

Process: the trainer and the command's. Engines: none.
"""
