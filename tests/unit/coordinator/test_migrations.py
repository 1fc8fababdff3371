"""Moves of samples between replicas."""

import asyncio

from verl_rhyme.coordinator import migrations as module
from verl_rhyme.coordinator.migrations import Migrations
from verl_rhyme.placement import Move
from verl_rhyme.scheduling.attempts import Attempt

X, Y, Z = (Attempt(uid, 0, 1) for uid in "012")


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


def test_samples_move_by_the_progress_on_living_replicas():
    moves, ordered = [Move(X, "c", "saves 3 s of 9 s")], []
    dispatch = _Dispatch(moves)
    migrations = Migrations(dispatch, None, ordered.append, dict, lambda: True)
    migrations._servers = {"a": _Server(7), "b": _Server(RuntimeError("dead"))}
    asyncio.run(migrations._move({"a": [X, Attempt("0", 1)], "b": [Y], "gone": [Z]}))
    assert dispatch.progress == {X: 7, Attempt("0", 1): 7}
    assert ordered == [moves]


def _drain(answers):
    """Return the moves ordered for these answers about where attempts run."""
    dispatch, ordered, seen = _Dispatch([]), [], []

    async def where():
        seen.append(1)
        if isinstance(found := answers[min(len(seen), len(answers)) - 1], Exception):
            raise found
        return found

    migrations = Migrations(dispatch, None, ordered.extend, where, lambda: True)
    return asyncio.run(migrations.drain("a")), [move[:2] for move in ordered]


def test_samples_of_a_resting_replica_move_where_the_router_decides(monkeypatch):
    monkeypatch.setattr(module, "_STRAY_S", 0.0)
    answers = [{X: "a", Y: "b"}, {X: "a", Z: "a", Y: "b"}, {X: "a", Z: "b"}]
    moved = [(X, ""), (Z, "")]  # the first is between two requests: it stays there until its next
    assert _drain(answers) == (2, moved)
    assert _drain([{Y: "b"}]) == (0, [])
    assert _drain([{X: "a"}, asyncio.TimeoutError()]) == (1, [(X, "")])
