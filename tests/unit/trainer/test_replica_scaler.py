"""Replicas that rest while others start."""

from types import SimpleNamespace

import pytest

from verl_rhyme.config import ConfigError, ElasticConfig
from verl_rhyme.trainer.replica_scaler import ReplicaScaler


class Spares:
    """The serving replicas of a run, and those that rest."""

    def __init__(self, count, waking=()):
        self.serving = [SimpleNamespace(replica_rank=rank, workers=[None]) for rank in range(count)]
        self.rested, self.waking, self.missing = [], list(waking), 0

    def scaler(self, *limits):
        engine = SimpleNamespace(backend="relay", engine_kwargs={})
        servers = SimpleNamespace(get_replicas=lambda: self.serving)
        return ReplicaScaler(None, ElasticConfig(*limits), servers, engine, self, lambda: 8)

    def rest(self, replica, vacate):
        self.rested.append(replica.replica_rank)
        self.serving.remove(replica)
        return vacate("address")

    def wake(self, version):
        return self.waking.pop()


def test_starting_replicas_count_towards_the_maximum():
    """A starting replica serves only minutes later; until then its place looked free."""
    spares = Spares(4, waking=[SimpleNamespace(replica_rank=7)])
    scaler = spares.scaler(1, 3)
    scaler._driver = SimpleNamespace(serve=lambda serving, leaves: 0)
    del spares.serving[2:]
    spares.missing = 1
    assert "training/stream/change_s" not in scaler.scale(1, 7)
    spares.missing = 0
    assert "training/stream/change_s" in scaler.scale(1, 8)
    assert not spares.waking


def test_last_replica_rests_and_limits_hold():
    spares = Spares(4)
    scaler = spares.scaler(2, 3)
    scaler.begin(SimpleNamespace(serve=lambda serving, leaves: 5))
    assert spares.rested == [3]
    assert scaler.scale(1, 1) == {"training/stream/replicas": 3}
    assert scaler.scale(-1, 2)["training/stream/moved"] == 5
    assert spares.rested == [3, 2]
    assert scaler.scale(-1, 3) == scaler.scale(0, 3) == {"training/stream/replicas": 2}
    with pytest.raises(ConfigError, match=r"elastic.min_replicas=3: the run has only 2; lower it"):
        spares.scaler(3)


def test_changed_number_of_replicas_is_reported():
    spares, reported = Spares(4), []
    scaler = spares.scaler(1)
    scaler.begin(SimpleNamespace(serve=lambda serving, leaves: reported.append(serving.share)))
    scaler.report_changes()
    del spares.serving[3:]
    scaler.report_changes()
    scaler.report_changes()
    assert reported == [0.75]
