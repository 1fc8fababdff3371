"""Modules that the processes of a run share: messages, deadlines, deaths, request metadata, TransferQueue rows.

Process: all of a run. Engines: ray.
"""
