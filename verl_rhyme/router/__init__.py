"""verl's request router, which follows the coordinator's placement.

Process: verl's agent loop workers. Engines: verl.
"""
