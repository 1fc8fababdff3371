"""HistoPipe as published (RhymeRL, arXiv:2508.18588, section 5): length groups with separate replicas, in alternating
order.

The prompts of a training step are ranked by expected length and cut into groups of equal size. Each group gets separate
replicas, more of them where it takes longer: the numbers that make the slowest group fastest (tier 2; the paper finds
them by a binary search over the step's cost). The groups lie along the replicas from shortest to longest in one step
and in reverse in the next, so a replica with long responses gets short ones next (tier 1). An outlier moves to the
replica with the fewest expected tokens. It is one of the last running responses of its group, and longer than its
history predicts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from verl_rhyme.placement.fleet import Fleet, Pool
from verl_rhyme.placement.policy import Load, Move, PlacementPolicy, Progress, Request, expected_tokens
from verl_rhyme.planning.cost import Floats


@dataclass(eq=False)
class _Group:
    """Prompts of similar length, in one training step."""

    unfinished: dict[str, int]  # number of samples by prompt
    samples: int
    pool: Pool
    running: dict[str, tuple[Request, str]] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    moved: set[str] = field(default_factory=set)


class HistoPipe(PlacementPolicy):
    """HistoPipe; see the module. ``groups`` is at most the number of replicas; ``tail`` is the share of a group that
    counts as its last responses, of which outliers ``migrate``. Without ``two_tier`` all groups get the same number of
    replicas.
    """

    def __init__(
        self, fleet: Fleet, groups: int = 4, two_tier: bool = True, migrate: bool = True, tail: float = 0.1
    ) -> None:
        if groups < 1 or not 0 < tail <= 1:
            raise ValueError(
                f"histopipe: placement.options.groups={groups} must be at least 1, tail={tail} above 0 and at most 1"
            )
        super().__init__(fleet)
        self._most, self._two_tier, self._migrate, self._tail = groups, two_tier, migrate, tail
        self._groups: list[_Group] = []  # groups with present prompts
        self._of: dict[str, _Group] = {}  # by key

    def plan(self, step: int, loads: Sequence[Load]) -> None:
        if not loads:
            return
        tokens = expected_tokens(loads)
        count = min(self._most, len(self._fleet), len(loads))
        ranked = np.array_split(np.argsort(tokens, kind="stable"), count)
        widths = self._widths([[loads[i] for i in group] for group in ranked], [tokens[group] for group in ranked])
        names = self._fleet.names[:: -1 if step % 2 else 1]
        shares = np.split(np.array(names), np.cumsum(widths)[:-1])
        for rank, (members, own) in enumerate(zip(ranked, shares, strict=True), 1):
            unfinished = {loads[i].key: loads[i].samples for i in members}
            pool = Pool(f"length group {rank} of {count} in step {step}", own.tolist())
            group = _Group(unfinished, sum(unfinished.values()), pool)
            self._groups.append(group)
            self._of.update((loads[i].key, group) for i in members)

    def pool(self, key: str) -> Pool | None:
        group = self._of.get(key)
        return None if group is None else group.pool

    def started(self, request: Request, replica: str) -> None:
        if (group := self._of.get(request.key)) is not None:
            group.running[request.id] = request, replica

    def released(self, request: Request, replica: str, tokens: int | None) -> None:
        group = self._of.get(request.key)
        if group is None or group.running.pop(request.id, None) is None or tokens is None:
            return
        if request.id not in group.ended:
            group.ended.add(request.id)
            group.unfinished[request.key] -= 1

    def forget_prompts(self, keys: Sequence[str]) -> None:
        for key in keys:
            if (group := self._of.pop(key, None)) is not None:
                group.samples -= group.unfinished.pop(key)  # failed or no longer needed
                if not group.unfinished:
                    self._groups.remove(group)

    def watched(self) -> list[str]:
        return [name for group in self._last() for name in group.running if name not in group.moved]

    def moves(self, progress: Mapping[str, Progress]) -> Iterator[Move]:
        fleet, step = self._fleet, self._fleet.cost.step
        full = step.weights(fleet.cost.slots) / fleet.cost.slots + step.row
        prefill = fleet.cost.prefill / max(full, 1e-9)  # in tokens of full steps
        for group in self._last():
            for name, (request, replica) in list(group.running.items()):
                p90, now = request.p90_tokens, progress.get(name)
                if name in group.moved or now is None or p90 is None or now.made <= p90:
                    continue
                target = fleet.least_tokens()
                load, least = (fleet.tokens[fleet.index[each]] for each in (replica, target))
                again = prefill * (request.prompt_tokens + now.made)  # its cache is recomputed
                if least + request.tokens + again < load:
                    group.moved.add(name)
                    yield Move(name, target, f"{now.made} tokens, more than {p90} by its history")

    # ---- within ----

    def _last(self) -> list[_Group]:
        if not self._migrate or len(self._fleet) < 2:
            return []
        return [g for g in self._groups if g.running and len(g.ended) >= (1 - self._tail) * g.samples]

    def _widths(self, groups: Sequence[Sequence[Load]], tokens: Sequence[Floats]) -> list[int]:
        """Return the number of replicas of each group, at least one, that add up to the fleet."""
        total, count = len(self._fleet), len(groups)
        if not self._two_tier:
            return [total // count + (rank < total % count) for rank in range(count)]
        work = []  # of each group: its longest response, and all tokens and cached tokens
        for group, each in zip(groups, tokens, strict=True):
            samples, prompt = np.array([(load.samples, load.prompt_tokens) for load in group]).T
            work.append((each.max(), samples @ each, samples @ (each * (prompt + each / 2))))
        longest, whole, held = np.array(work).T[:, :, None]
        number, room = np.arange(1, total + 1), float(np.min(self._fleet.capacity))
        seconds = self._fleet.cost.together(longest, whole / number, held / number, room)
        # They fall with the replicas: giving one after another to the slowest group meets the largest of all first.
        met = np.argsort(-seconds, axis=None, kind="stable")[: total - count]
        return (1 + np.bincount(met // total, minlength=count)).tolist()
