"""Advice on the number of replicas from the times of a step, and replicas that rest while others start."""

from types import SimpleNamespace

import pytest

from verl_rhyme.config import ConfigError, ElasticConfig
from verl_rhyme.observability import metrics as names
from verl_rhyme.observability.batches import batch_metrics
from verl_rhyme.planning.cost import ReplicaCost, StepCost
from verl_rhyme.planning.elastic import Limits
from verl_rhyme.processes.messages import Reply, RunSettings
from verl_rhyme.scheduling.batch import Batch, Collected, StepCounts
from verl_rhyme.scheduling.rules import Rules
from verl_rhyme.trainer import elastic as module
from verl_rhyme.trainer.elastic import ReplicaAdvisor, ReplicaScaler
from verl_rhyme.trainer.observers import Step

RULES = Rules(8, 64, max_staleness=1, separate=True)


def setting():
    cost = ReplicaCost(StepCost(base=1e-3, row=1e-3), slots=64)
    return RunSettings(rules=RULES, filters=None, limit=128, min_starts=1, slots=128, lost_after=60.0, cost=cost)


def reply(ahead, tokens=400):
    tags = [{"response_len": tokens, "seq_len": tokens + 50}] * 64
    tags += [{"response_len": 1, "seq_len": 2, "is_padding": True}]
    values = {} if ahead is None else {names.STREAM_AHEAD: ahead}
    return Reply([], tags, values, {}, 0, [], {})


def step(replicas, seconds, waited, reply):
    return Step(1, seconds, seconds, replicas=replicas, wait_s=waited, reply=reply)


def test_waiting_trainer_is_advised_one_more_replica(monkeypatch):
    advisor, logged = ReplicaAdvisor(setting()), []
    monkeypatch.setattr(module.logger, "info", lambda line, *values: logged.append(line % values))
    seen = [advisor.on_step(step(4, 20.0, 12.0, reply(0.0))) for _ in range(5)]
    assert [found[names.STREAM_ELASTIC] for found in seen] == [0, 0, 0, 1, 1]
    assert seen[-1][names.STREAM_BEHIND] == pytest.approx(12.0)
    assert len(logged) == 1
    assert logged[0].startswith("4 replicas: one more would be better (generation +12.0 s against training")


def test_batch_ready_early_means_one_replica_less():
    advisor = ReplicaAdvisor(setting())
    seen = [advisor.on_step(step(4, 20.0, 0.0, reply(14.0))) for _ in range(4)]
    assert seen[-1] == {names.STREAM_BEHIND: pytest.approx(-14.0), names.STREAM_ELASTIC: -1}


def test_changed_number_of_replicas_restarts_the_average():
    advisor = ReplicaAdvisor(setting())
    for _ in range(4):
        values = advisor.on_step(step(4, 20.0, 12.0, reply(0.0)))
    assert values[names.STREAM_ELASTIC] == 1
    assert advisor.on_step(step(5, 18.0, 10.0, reply(0.0)))[names.STREAM_ELASTIC] == 0


def test_no_advice_without_overlap_and_errors_stop_nothing():
    advisor = ReplicaAdvisor(setting())
    assert advisor.on_step(step(4, 20.0, 12.0, reply(None))) == {}
    broken = reply(0.0)
    broken.tags = [{}]
    assert advisor.on_step(step(4, 20.0, 12.0, broken)) == {}
    assert advisor.on_step(step(4, 20.0, 12.0, broken)) == {}


def test_seconds_a_batch_was_ready_before_it_was_taken():
    record = {"policy_version_end": 0, "response_tokens": 5, "started_at": 100.0, "finished_at": 110.0}
    later = {**record, "finished_at": 114.0}
    collected = Collected(samples=[("a", 0)], lengths=[5], waited=[0], staleness=[0])
    batch = Batch(collected, ["a_0"], 0, [record, later], [], [], StepCounts(), 0, 0, {})
    assert batch_metrics(batch, 4, taken=120.0)[names.STREAM_AHEAD] == 6.0
    assert batch_metrics(batch, 4, taken=113.0)[names.STREAM_AHEAD] == 0.0  # clocks of two machines differ
    assert names.STREAM_AHEAD not in batch_metrics(batch, 4)


def test_advice_keeps_the_upper_limit():
    advisor = ReplicaAdvisor(setting(), Limits(1, 4, window=1))
    assert advisor.on_step(step(4, 20.0, 12.0, reply(0.0)))[names.STREAM_ELASTIC] == advisor.advice == 0


class Spares:
    """The serving replicas of a run, and those that rest."""

    def __init__(self, count, waking=()):
        self.serving = [SimpleNamespace(replica_rank=rank, workers=[None]) for rank in range(count)]
        self.rested, self.waking, self.missing = [], list(waking), 0

    def scaler(self, *limits):
        engine = SimpleNamespace(backend="relay", engine_kwargs={})
        servers = SimpleNamespace(get_replicas=lambda: self.serving)
        return ReplicaScaler(None, ElasticConfig(*limits), servers, engine, self)

    def suspend(self, replica, drain):
        self.rested.append(replica.replica_rank)
        self.serving.remove(replica)
        return drain("address")

    def wake_up(self, version):
        return self.waking.pop()


def test_starting_replicas_count_towards_the_maximum():
    """A starting replica serves only minutes later; until then its place looked free."""
    spares = Spares(4, waking=[SimpleNamespace(replica_rank=7)])
    scaler = spares.scaler(1, 3)
    scaler._driver = SimpleNamespace(serve=lambda share, leaves: 0)
    del spares.serving[2:]
    spares.missing = 1
    assert "training/stream/change_s" not in scaler.scale(1, 7)
    spares.missing = 0
    assert "training/stream/change_s" in scaler.scale(1, 8)
    assert not spares.waking


def test_last_replica_rests_and_limits_hold():
    spares = Spares(4)
    scaler = spares.scaler(2, 3)
    scaler.on_train_begin(SimpleNamespace(serve=lambda share, leaves: 5))
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
    scaler.on_train_begin(SimpleNamespace(serve=lambda share, leaves: reported.append(share)))
    scaler.report_changes()
    del spares.serving[3:]
    scaler.report_changes()
    scaler.report_changes()
    assert reported == [0.75]
