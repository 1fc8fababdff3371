"""Tiny world with real input: Knights and Knaves puzzles, and two small models that solve some of them."""
