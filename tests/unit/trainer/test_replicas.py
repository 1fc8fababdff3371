"""Replicas that replace dead ones."""

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from ray.exceptions import ActorUnavailableError

from verl_rhyme.processes.deaths import ReplicaDied
from verl_rhyme.trainer import replicas
from verl_rhyme.trainer.replicas import SpareReplicas, single_transfer_obstacle
from verl_rhyme.weights.manager import RelayManager


def test_backends_that_cannot_send_to_a_single_replica():
    for backend, workers, stopped in (("nixl", 1, True), ("nixl", 2, False), ("kimi_ckpt_engine", 8, True)):
        assert bool(single_transfer_obstacle(SimpleNamespace(backend=backend, engine_kwargs={}), workers)) is stopped
    for backend in ("mooncake", "nccl"):
        assert not single_transfer_obstacle(SimpleNamespace(backend=backend, engine_kwargs={}), 1)


@pytest.mark.parametrize(("relayed", "expected"), [(True, ActorUnavailableError), (False, ReplicaDied)])
def test_with_the_relay_another_replica_starts_after_a_failed_send(monkeypatch, relayed, expected):
    """With other backends the actor may still be sending."""

    def fail(*_):
        raise ActorUnavailableError("it died", None)

    weights = Mock(config=None, actor_wg=None)
    if relayed:
        weights = object.__new__(RelayManager)
        monkeypatch.setattr(weights, "deliver", fail)
    monkeypatch.setattr(replicas, "watched", lambda _: nullcontext())
    monkeypatch.setattr(replicas, "CheckpointEngineManager", fail)
    spares = SpareReplicas(SimpleNamespace(rollout_replicas=[Mock(replica_rank=0)]), weights)
    with pytest.raises(expected):
        spares._send(Mock(replica_rank=1), 1)


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
