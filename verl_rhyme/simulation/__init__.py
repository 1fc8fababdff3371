"""A cluster in virtual time, driven by the same policies as training.

Process: the command's. Engines: none.
"""
