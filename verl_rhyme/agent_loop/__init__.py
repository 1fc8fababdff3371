"""Agent loops: sessions of samples, the client of the engines, reports to the coordinator.

Process: verl's agent loop workers. Engines: verl, ray.
"""
