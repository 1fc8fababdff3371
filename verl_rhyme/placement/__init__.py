"""Placement: the replica that serves each request. Events are method calls, the answer is a replica's name.

Process: the coordinator. Engines: none.
"""

from verl_rhyme.placement.fleet import Fleet
from verl_rhyme.placement.placement import POLICIES, NoReplica, Placement
from verl_rhyme.placement.policy import LeastLoaded, Load, Move, PlacementPolicy, Progress, Request

__all__ = [
    "POLICIES",
    "Fleet",
    "LeastLoaded",
    "Load",
    "Move",
    "NoReplica",
    "Placement",
    "PlacementPolicy",
    "Progress",
    "Request",
]
