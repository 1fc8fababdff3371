"""What processes of a run share: messages, deadlines, deaths, request metadata, rows of TransferQueue.

Process: all of a run. Engines: ray.
"""
