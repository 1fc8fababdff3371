"""Rollout control: starts, interruptions, replicas; the length ranker's process.

Process: the coordinator's and the ranker's actors. Engines: verl, ray, torch, transformers.
"""
