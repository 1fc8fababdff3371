"""How many GPUs generate and how many train: cost profiles, times, the planner, replicas that rest.

Process: the command's and the trainer. Engines: none.
"""
