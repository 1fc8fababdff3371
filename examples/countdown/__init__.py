"""Number game, a small task for held-out traces: make a number from three others."""
