"""Imported by verl in every process of a run (``VERL_USE_EXTERNAL_MODULES``): each sample moves once.

Whether one gains by it depends on how fast the machine is; that a moved one is whole must not.
"""

from collections.abc import Iterator, Mapping

from verl_rhyme.coordinator import migrations
from verl_rhyme.placement import Move, Progress
from verl_rhyme.placement.histopipe import HistoPipe

migrations._MOVE_S = 0.2  # responses of the tiny world take a second or two
_gaining = HistoPipe.moves


def _each_once(self: HistoPipe, progress: Mapping[str, Progress]) -> Iterator[Move]:
    yield from _gaining(self, progress)
    for group in self._last():
        for name, (_, replica) in list(group.running.items()):
            if name in progress and name not in group.moved and len(self._fleet) > 1:
                group.moved.add(name)
                other = next(there for there in self._fleet.names if there != replica)
                yield Move(name, other, "each moves once")


HistoPipe.moves = _each_once
