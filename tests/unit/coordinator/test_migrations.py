"""Moves of samples between replicas."""

import asyncio
from types import SimpleNamespace

from verl_rhyme.coordinator import migrations as module
from verl_rhyme.coordinator.migrations import Migrations
from verl_rhyme.placement import Move
from verl_rhyme.scheduling.attempts import Attempt

W, X, Y, Z = (Attempt(uid, 0, 1) for uid in "0123")


def server(answer):
    async def progress(names):
        if isinstance(answer, Exception):
            raise answer
        return dict.fromkeys(names, answer)

    return SimpleNamespace(progress=SimpleNamespace(remote=progress))


async def test_samples_move_by_the_progress_on_living_replicas():
    moves, ordered, met = [Move(X, "c", "saves 3 s of 9 s")], [], []
    dispatch = SimpleNamespace(moves=lambda emitted: met.append(emitted) or moves)
    migrations = Migrations(dispatch, None, ordered.append, dict, lambda: True)
    migrations._servers = {"a": server(7), "b": server(RuntimeError("dead"))}
    await migrations._move({"a": [W, X], "b": [Y], "gone": [Z]})
    assert met == [{W: 7, X: 7}]
    assert ordered == [moves]


async def test_samples_of_a_resting_replica_move_where_the_router_decides(monkeypatch):
    monkeypatch.setattr(module, "_STRAY_S", 0.0)
    answers, ordered = [{X: "a", Y: "b"}, {X: "a", Z: "a", Y: "b"}, asyncio.TimeoutError()], []

    async def locate():
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    migrations = Migrations(SimpleNamespace(placement=None), None, ordered.extend, locate, lambda: True)
    assert await migrations.drain("a") == 2
    assert [move[:2] for move in ordered] == [(X, ""), (Z, "")], "the first is between two requests"
    answers.append({Y: "b"})
    assert await migrations.drain("a") == 0
