"""Ray actors of the history: the writer on the trainer's node, the fetchers on other nodes.

Process: the history actor of each node. Engines: ray.
"""
