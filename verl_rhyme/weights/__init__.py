"""Weights on their way from the actor to the replicas: once to each node, from there by each replica for itself."""

#: verl's name for it, ``rollout.checkpoint_engine.backend``.
BACKEND = "relay"
