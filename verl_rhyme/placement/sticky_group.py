"""A prompt's samples, turns and history on one replica, under bounded load.

Each prompt has an order over the replicas of its own, by rendezvous (highest random weight) hashing: Thaler and
Ravishankar, "Using name-based mappings to increase hit rates", IEEE/ACM ToN 1998; weights as in Schindelhauer and
Schomaker, SPAA 2005. A replica that comes or goes moves a fair share of the prompts and no others. A request goes where
its conversation, else where its siblings are, else to the first of that order, as long as the load there stays within
``factor`` times the mean (Mirrokni, Thorup, Zadimoghaddam, "Consistent hashing with bounded loads", arXiv:1608.01350);
what does not fit goes on to the next, and its siblings with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from verl_rhyme.placement.fleet import REQUESTS, TOKENS, Fleet
from verl_rhyme.placement.policy import PlacementPolicy, Request

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

#: Shifts and factors of the finalizer in "Fast splittable pseudorandom number generators", OOPSLA 2014.
_SPLITMIX64 = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)
#: Keeps a product that should be whole from being rounded up to the next number.
_ROUNDING = 1e-9


@dataclass(slots=True)
class _Group:
    """Requests of one prompt: how many run and came, where new ones go, and the room kept for them there."""

    replica: str = ""
    running: int = 0
    arrived: int = 0
    reserved: int = 0
    reserved_tokens: int = 0


_NOBODY = _Group()


class StickyGroup(PlacementPolicy):
    """See the module. What it remembers of a prompt goes with the prompt's last running request.

    The mean is of what runs and of what is known to come: the rest of the groups (``Request.group``), for which room is
    kept, and what was announced (``Placement.expect``). Where a request's tokens are known, they are bounded too; where
    not both bounds can be held, tokens count, and where one request alone breaks the bound, it goes where fewest tokens
    are. A replica without KV room is avoided while another has some.

    Args:
        fleet: Where the loads stand.
        factor: No replica is given more than so many times its fair share, rounded up to a whole request.

    Raises:
        ValueError: ``factor`` is not above 1.
    """

    def __init__(self, fleet: Fleet, factor: float = 1.25) -> None:
        if not factor > 1:
            raise ValueError(f"sticky_group: factor={factor}; a bound must be above 1 to be held, the default is 1.25")
        self._fleet = fleet
        self._factor = factor
        self._groups: dict[str, _Group] = {}
        self._hashed = -1  # the fleet's version
        self._hashes: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._weights: Floats | None = None

    def __len__(self) -> int:
        """Prompts of which something runs."""
        return len(self._groups)

    def choose(self, request: Request) -> str:
        group = self._groups.get(request.key, _NOBODY)
        more = max(0, request.group - group.arrived - 1) if request.new else 0
        requests, tokens = self._limits(1 + more, request.tokens, group)
        for preferred in (request.last, group.replica):
            if preferred and self._fits(preferred, request.tokens, requests, tokens, group):
                return preferred
        return self._search(request, more, requests, tokens, group)

    def started(self, request: Request, replica: str) -> None:
        if not request.key:
            return
        group = self._groups.get(request.key)
        if group is None:
            group = self._groups[request.key] = _Group()
        group.running += 1
        if not request.new:
            group.replica = group.replica or replica
            return
        group.arrived += 1
        self._unreserve(group)
        group.replica = replica
        if more := max(0, request.group - group.arrived):
            self._reserve(group, more, request.tokens)

    def released(self, request: Request, replica: str, tokens: int | None) -> None:
        group = self._groups.get(request.key)
        if group is None:
            return
        group.running -= 1
        if group.running <= 0:
            self._unreserve(group)
            del self._groups[request.key]

    def removed(self, replica: str) -> None:
        for group in self._groups.values():
            if group.replica == replica:
                self._unreserve(group)

    def forget(self) -> None:
        for group in self._groups.values():
            self._unreserve(group)
            group.replica = ""

    def _limits(self, coming: int, tokens: int, group: _Group) -> tuple[float, float]:
        """``factor`` times all requests and all tokens, of which each replica may have its share.

        Args:
            coming: Requests of the group that are known to come.
            tokens: Of one of them, 0 when unknown: then the second bound is infinite.
            group: Theirs; room that is kept for it stands for the same requests.
        """
        fleet = self._fleet
        come = fleet.reserved_totals[REQUESTS] - group.reserved + coming
        expected = max(come, fleet.expected)
        requests = self._factor * (fleet.totals[REQUESTS] + expected)
        if not tokens:
            return requests, math.inf
        filled = fleet.totals[TOKENS] + fleet.reserved_totals[TOKENS] - group.reserved_tokens + coming * tokens
        return requests, self._factor * filled * (1 + (expected - come) / (fleet.totals[REQUESTS] + come))

    def _fits(self, replica: str, tokens: int, request_limit: float, token_limit: float, group: _Group) -> bool:
        """Whether one request does, in place of one that room is kept for."""
        fleet = self._fleet
        i = fleet.index.get(replica)
        if i is None:
            return False
        own, own_tokens = (group.reserved, group.reserved_tokens) if replica == group.replica else (0, 0)
        share = fleet.share.item(i)
        requests = fleet.running.item(REQUESTS, i) + fleet.reserved.item(REQUESTS, i) - own + 1
        filled = fleet.running.item(TOKENS, i) + fleet.reserved.item(TOKENS, i) - own_tokens + tokens
        return (
            requests <= math.ceil(share * request_limit - _ROUNDING)
            and filled <= share * token_limit
            and filled <= fleet.capacity.item(i)
        )

    def _search(self, request: Request, more: int, request_limit: float, token_limit: float, group: _Group) -> str:
        """The best of all replicas: of those that hold most of what is asked, the first in the prompt's order."""
        fleet, tokens = self._fleet, request.tokens
        load = fleet.running + fleet.reserved
        if group.reserved and group.replica in fleet:
            load[:, fleet.index[group.replica]] -= (group.reserved, group.reserved_tokens)
        most_requests = np.ceil(fleet.share * request_limit - _ROUNDING)
        most_tokens = fleet.share * token_limit if tokens else np.full(len(fleet), np.inf)
        best = self._order(request.key) if request.key else -load[TOKENS if tokens else REQUESTS] / fleet.share

        def holding(count: int) -> tuple[Mask, Mask, Mask]:
            filled = load[TOKENS] + count * tokens
            return load[REQUESTS] + count <= most_requests, filled <= most_tokens, filled <= fleet.capacity

        few, short, room = holding(1)
        candidates = [few & short & room, few & short, short if tokens else few]
        if more:
            whole_few, whole_short, whole_room = holding(1 + more)
            candidates.insert(0, whole_few & whole_short & whole_room)
        for fitting in candidates:
            if fitting.any():
                for preferred in (request.last, group.replica):
                    if preferred in fleet and fitting[fleet.index[preferred]]:
                        return preferred
                return fleet.names[int(np.where(fitting, best, -np.inf).argmax())]
        filled = load[TOKENS if tokens else REQUESTS] / fleet.share
        return fleet.names[int(np.where(filled == filled.min(), best, -np.inf).argmax())]

    def _order(self, key: str) -> Floats:
        """float64[replicas], the greatest first: a prompt's preference among them."""
        if self._hashed != self._fleet.version:
            self._hash()
        mixed = self._hashes ^ np.uint64(_hash64(key))
        for shift, factor in _SPLITMIX64:
            mixed ^= mixed >> shift
            mixed *= factor
        mixed ^= mixed >> np.uint64(31)
        uniform = ((mixed >> np.uint64(11)) + 0.5) * 2.0**-53
        return uniform if self._weights is None else self._weights / -np.log(uniform)

    def _hash(self) -> None:
        share = self._fleet.share
        self._hashes = np.array([_hash64(name) for name in self._fleet.names], np.uint64)
        self._weights = None if np.ptp(share) < _ROUNDING else share
        self._hashed = self._fleet.version

    def _reserve(self, group: _Group, more: int, tokens: int) -> None:
        """Keep room for the rest of a group, for as many as there is."""
        fleet = self._fleet
        i = fleet.index[group.replica]
        requests, filled = self._limits(more, tokens, group)
        room = math.ceil(fleet.share.item(i) * requests - _ROUNDING)
        more = min(more, room - fleet.running.item(REQUESTS, i) - fleet.reserved.item(REQUESTS, i))
        if tokens:
            left = min(fleet.share.item(i) * filled, fleet.capacity.item(i))
            more = min(more, int((left - fleet.running.item(TOKENS, i) - fleet.reserved.item(TOKENS, i)) // tokens))
        if more > 0:
            group.reserved, group.reserved_tokens = more, more * tokens
            fleet.reserve(group.replica, more, more * tokens)

    def _unreserve(self, group: _Group) -> None:
        if group.reserved and group.replica in self._fleet:
            self._fleet.reserve(group.replica, -group.reserved, -group.reserved_tokens)
        group.reserved = group.reserved_tokens = 0


def _hash64(name: str) -> int:
    """The same in every process, as ``hash`` is not."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
