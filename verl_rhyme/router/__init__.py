"""verl's request router, which asks placement.

Process: verl's agent loop workers. Engines: verl.
"""
