"""Samples from their first turn to their last: sessions, the client of the engines, reports to the coordinator.

Process: verl's agent loop workers. Engines: verl, ray.
"""
