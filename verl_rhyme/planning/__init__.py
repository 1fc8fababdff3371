"""Numbers of GPUs for generation and training: cost profiles, step times, the planner, the elastic rule.

Process: the command's and the trainer. Engines: none.
"""
