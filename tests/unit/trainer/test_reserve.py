"""Replicas that rest while others start."""

import time
from types import SimpleNamespace

import pytest

from verl_rhyme.config import ConfigError, ElasticConfig
from verl_rhyme.coordinator import replicas
from verl_rhyme.coordinator.replicas import SpareReplicas
from verl_rhyme.trainer.reserve import Reserve


def test_starting_replicas_count_towards_the_maximum():
    """A starting replica serves only minutes later; until then its place looked free."""
    made = [SimpleNamespace(replica_rank=rank, workers=[None]) for rank in range(4)]
    serving, woken = list(made), [made[2]]
    spares = SimpleNamespace(resting=made[2:], missing=1, vacant=0, wake_up=lambda *_: woken.pop())
    engine = SimpleNamespace(backend="relay", engine_kwargs={})
    config = ElasticConfig(min_replicas=1, max_replicas=3)
    reserve = Reserve(None, config, SimpleNamespace(get_replicas=lambda: serving), engine, spares)
    reserve._driver = SimpleNamespace(serve=lambda share, leaves: 0)
    del serving[2:]
    reserve.observe()
    assert "training/stream/change_s" not in reserve.act(1, 7)
    assert woken
    spares.missing = 0
    assert "training/stream/change_s" in reserve.act(1, 8)
    assert not woken


def test_last_replica_rests_and_limits_hold():
    serving, rested = [SimpleNamespace(replica_rank=rank, workers=[None]) for rank in range(4)], []
    engine, servers = SimpleNamespace(backend="relay", engine_kwargs={}), SimpleNamespace(get_replicas=lambda: serving)

    def suspend(replica, drain):
        rested.append(replica.replica_rank)
        serving.remove(replica)
        return drain("address")

    spares = SimpleNamespace(missing=0, suspend=suspend, wake_up=lambda version: pytest.fail("as many serve as may"))
    reserve = Reserve(None, ElasticConfig(2, 3), servers, engine, spares)
    reserve.begin(SimpleNamespace(serve=lambda share, leaves: 5))
    assert rested == [3]
    assert reserve.act(1, 1) == {"training/stream/replicas": 3}
    assert reserve.act(-1, 2)["training/stream/moved"] == 5
    assert rested == [3, 2]
    assert reserve.act(-1, 3) == reserve.act(0, 3) == {"training/stream/replicas": 2}
    with pytest.raises(ConfigError, match=r"elastic.min_replicas=3: the run has only 2; lower it"):
        Reserve(None, ElasticConfig(3), servers, engine, spares)


def test_pause_between_tries_grows_to_its_limit():
    spares = object.__new__(SpareReplicas)
    spares.missing, spares._failures = 1, 2000  # weeks of failures
    spares._put_off(ValueError("no devices"), alone=False)
    assert spares._retry_at <= time.monotonic() + replicas._LONGEST_PAUSE_S
