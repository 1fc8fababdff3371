"""Simulation of a cluster in virtual time, with the scheduling and placement policies of training.

Process: the command's. Engines: none.
"""
