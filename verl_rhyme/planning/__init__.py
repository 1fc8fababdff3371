"""Costs of replicas and training by arithmetic, step times, and the planner of GPUs.

Process: the command's and the trainer. Engines: none.
"""
