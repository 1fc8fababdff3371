"""Replicas that replace dead ones."""

import threading
from types import SimpleNamespace
from unittest.mock import Mock

from verl_rhyme.trainer import replicas
from verl_rhyme.trainer.replicas import SpareReplicas


def test_slow_replica_does_not_delay_publication(monkeypatch):
    """Deaths are found at the end of a later step; a trainer that waits anyway waits for the answers."""
    one, other = (Mock(replica_rank=rank, nnodes=1, servers=[], workers=[None]) for rank in range(2))
    servers = SimpleNamespace(rollout_replicas=[one, other], global_load_balancer=Mock())
    spares = SpareReplicas(servers, SimpleNamespace(config=SimpleNamespace(backend="relay"), replicas=[]))
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
