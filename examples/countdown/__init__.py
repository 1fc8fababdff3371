"""A third small task, of another kind and for held-out traces as well: make a number from three others."""
