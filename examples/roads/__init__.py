"""Road maps, a small task for traces that no drafter was tuned on: find a way from one town to another."""
