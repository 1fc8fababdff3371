"""The pipeline's rules as state machines: which samples start, are interrupted, trained and dropped.

Process: the coordinator and the simulator. Engines: none.
"""
