"""Replicas that replace dead ones."""

import asyncio
import threading
from types import SimpleNamespace
from unittest.mock import Mock

from verl_rhyme.trainer import replicas
from verl_rhyme.trainer.replicas import SpareReplicas


def test_slow_replica_does_not_delay_publication(monkeypatch):
    """Deaths are found at the end of a later step; a trainer that waits anyway waits for the answers."""
    one, other = (Mock(replica_rank=rank, nnodes=1, servers=[], workers=[None]) for rank in range(2))
    servers = SimpleNamespace(rollout_replicas=[one, other], global_load_balancer=Mock())
    spares = SpareReplicas(servers, SimpleNamespace(config=SimpleNamespace(backend="relay"), replicas=[]), 9.0)
    answers, looks = threading.Event(), []

    def slow(replicas, hung_s):
        looks.append(list(replicas))
        assert answers.wait(10)
        return {other: "its process is gone"} if other in replicas else {}

    monkeypatch.setattr(replicas, "dead", slow)
    monkeypatch.setattr(replicas, "readmit", lambda servers: None)
    monkeypatch.setattr(replicas, "kill_replica", lambda replica: None)
    monkeypatch.setattr(replicas, "ray", Mock())
    monkeypatch.setattr(SpareReplicas, "_fill", lambda self, version: None)
    assert [spares.replace_dead(version, waits=False) for version in (1, 2)] == [0, 0]
    assert servers.rollout_replicas == [one, other]
    answers.set()
    spares._looking.result(10)
    assert spares.replace_dead(3, waits=False) == 1
    assert (servers.rollout_replicas, spares.missing) == ([one], 1)
    spares._looking.result(10)
    assert spares.replace_dead(4, waits=False) == 0, "a dead replica was replaced twice"
    assert looks[0] == [one, other]
    assert looks[-1] == [one]


def test_a_start_that_hangs_is_given_up_and_another_begins(monkeypatch):
    now, over, killed = [0.0], threading.Event(), []

    async def hang():
        while not over.is_set():
            await asyncio.sleep(0.01)

    started = [Mock(replica_rank=rank, init_standalone=hang) for rank in (1, 2)]
    serving = Mock(replica_rank=0, nnodes=1)
    servers = SimpleNamespace(
        rollout_replicas=[serving],
        rollout_replica_class=Mock(side_effect=started),
        rollout_config=Mock(),
        model_config=0,
    )
    monkeypatch.setattr(replicas, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(replicas, "kill_replica", killed.append)
    spares = SpareReplicas(servers, None, 9.0)
    spares.missing = 1
    try:
        for now[0], ended, begun in (
            (0.0, 0, 1),
            (replicas._NONE_LEFT_S - 1, 0, 1),
            (replicas._NONE_LEFT_S, 1, 1),
            (replicas._NONE_LEFT_S + replicas._PAUSE_S, 1, 2),
        ):
            spares._fill(1)
            assert killed == started[:ended]
            assert servers.rollout_replica_class.call_count == begun
    finally:
        over.set()
