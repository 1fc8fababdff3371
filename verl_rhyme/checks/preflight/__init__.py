"""Preflight of a run: its composed config, its estimated memory, and problems that would stop it."""
