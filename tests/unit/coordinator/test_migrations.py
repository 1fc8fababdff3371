"""Searches for samples to move between replicas: their moves and log lines."""

import asyncio
import logging

from verl_rhyme.coordinator import migrations as module
from verl_rhyme.coordinator.migrations import Migrations
from verl_rhyme.placement import Move


class _Remote:
    def __init__(self, answer):
        self._answer = answer

    async def remote(self, names):
        if isinstance(self._answer, Exception):
            raise self._answer
        return dict.fromkeys(names, self._answer)


class _Server:
    def __init__(self, answer):
        self.progress = _Remote(answer)


class _Dispatch:
    placement = None

    def __init__(self, moves):
        self._moves, self.progress = moves, {}

    def moves(self, emitted):
        self.progress = emitted
        return self._moves


def _look(moves):
    dispatch, ordered = _Dispatch(moves), []
    moving = Migrations(dispatch, None, ordered.append, dict, lambda: True)
    moving._servers = {"a": _Server(7), "b": _Server(RuntimeError("dead"))}
    asyncio.run(moving._move({"a": ["0_0_1", "0_1_1"], "b": ["1_0_1"], "gone": ["2_0_1"]}))
    assert dispatch.progress == {"0_0_1": 7, "0_1_1": 7}, "who is dead or gone says nothing"
    assert ordered == [moves]


def test_moves_are_one_info_line_and_one_debug_line_each(caplog):
    caplog.set_level(logging.DEBUG, "verl_rhyme.coordinator.migrations")
    _look([Move("0_0_1", "c", "saves 3 s of 9 s"), Move("0_1_1", "d", "saves 2 s of 6 s")])
    info = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert info == ["2 samples continue on another replica; the first, 0_0_1 on c: saves 3 s of 9 s"]
    debug = [record.getMessage() for record in caplog.records if record.levelno == logging.DEBUG]
    assert debug == ["0_0_1 continues on c: saves 3 s of 9 s", "0_1_1 continues on d: saves 2 s of 6 s"]
    caplog.clear()
    _look([])
    assert not caplog.records


def _vacate(looks):
    """Return the moves ordered for these answers about where attempts run."""
    dispatch, ordered, seen = _Dispatch([]), [], []

    async def where():
        seen.append(1)
        if isinstance(found := looks[min(len(seen), len(looks)) - 1], Exception):
            raise found
        return found

    moving = Migrations(dispatch, None, ordered.extend, where, lambda: True)
    return asyncio.run(moving.drain("a")), [move[:2] for move in ordered]


def test_samples_of_a_resting_replica_move_where_the_router_decides(monkeypatch):
    monkeypatch.setattr(module, "_STRAY_S", 0.0)
    looks = [{"0_0_1": "a", "1_0_1": "b"}, {"0_0_1": "a", "2_0_1": "a", "1_0_1": "b"}, {"0_0_1": "a", "2_0_1": "b"}]
    moved = [("0_0_1", ""), ("2_0_1", "")]  # the first is between two requests: it stays there until its next
    assert _vacate(looks) == (2, moved)
    assert _vacate([{"1_0_1": "b"}]) == (0, [])
    assert _vacate([{"0_0_1": "a"}, asyncio.TimeoutError()]) == (1, [("0_0_1", "")])
