"""Placement: which replica serves which request. Pure: events come in as calls, the answer is a replica's name."""

from verl_rhyme.scheduling.placement.fleet import Fleet
from verl_rhyme.scheduling.placement.least_loaded import LeastLoaded
from verl_rhyme.scheduling.placement.placement import POLICIES, NoReplica, Placement
from verl_rhyme.scheduling.placement.policy import PlacementPolicy, Request
from verl_rhyme.scheduling.placement.sticky_group import StickyGroup

__all__ = ["POLICIES", "Fleet", "LeastLoaded", "NoReplica", "Placement", "PlacementPolicy", "Request", "StickyGroup"]
