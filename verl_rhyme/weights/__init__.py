"""Weight transfer from the actor to the replicas: one copy per node, which each replica of the node loads by itself.

Process: a relay on each node, training workers, vLLM's workers. Engines: verl, ray, torch.
"""

#: Value of ``rollout.checkpoint_engine.backend`` that selects the relay.
BACKEND = "relay"

#: Seconds without an answer after which a node is given up: network failures of minutes pass.
PATIENCE_S = 600.0
