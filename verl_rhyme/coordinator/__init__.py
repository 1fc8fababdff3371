"""Rollout control: starts, interruptions, migrations; the length ranker's process.

Process: the coordinator's and the ranker's actors. Engines: verl, ray, torch, transformers.
"""
