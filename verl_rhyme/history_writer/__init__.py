"""The history of a node: who writes it, who brings it from another node.

Process: the writer's actor of each node. Engines: ray.
"""
