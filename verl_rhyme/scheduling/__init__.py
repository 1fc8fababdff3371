"""Which samples start, are interrupted, trained and dropped: the pipeline's rules as state machines.

Process: the coordinator and the simulator. Engines: none.
"""
