"""verl's request router, which follows the coordinator's placement.

Process: an actor of its own, which the trainer's process makes from the router file. Engines: verl.
"""
