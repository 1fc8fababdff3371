"""Weights on their way from the actor to the replicas: once to each node, from there by each replica for itself.

Process: a relay on each node, training workers, vLLM's workers. Engines: verl, ray, torch.
"""

#: verl's name for it, ``rollout.checkpoint_engine.backend``.
BACKEND = "relay"
