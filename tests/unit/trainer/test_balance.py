"""Advice on the number of replicas from the times of a step."""

import pytest

from verl_rhyme.observability import metrics as names
from verl_rhyme.observability.batches import batch_metrics
from verl_rhyme.planning.cost import ReplicaCost, StepCost
from verl_rhyme.planning.elastic import Limits
from verl_rhyme.processes.messages import Reply, RunSettings
from verl_rhyme.scheduling.ledger import Collected, StepCounts
from verl_rhyme.scheduling.remembered import Batch
from verl_rhyme.scheduling.rules import Rules
from verl_rhyme.trainer import balance as module
from verl_rhyme.trainer.balance import Balance
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
    return Step(1, seconds, seconds, replicas=replicas, waited=waited, reply=reply)


def test_waiting_trainer_is_advised_one_more_replica(monkeypatch):
    balance, logged = Balance(setting()), []
    monkeypatch.setattr(module.logger, "info", lambda line, *values: logged.append(line % values))
    seen = [balance.on_step(step(4, 20.0, 12.0, reply(0.0))) for _ in range(5)]
    assert [found[names.STREAM_ELASTIC] for found in seen] == [0, 0, 0, 1, 1]
    assert seen[-1][names.STREAM_BEHIND] == pytest.approx(12.0)
    assert len(logged) == 1
    assert logged[0].startswith("4 replicas: one more would be better (generation +12.0 s against training")


def test_batch_ready_early_means_one_replica_less():
    balance = Balance(setting())
    seen = [balance.on_step(step(4, 20.0, 0.0, reply(14.0))) for _ in range(4)]
    assert seen[-1] == {names.STREAM_BEHIND: pytest.approx(-14.0), names.STREAM_ELASTIC: -1}


def test_changed_number_of_replicas_restarts_the_average():
    balance = Balance(setting())
    for _ in range(4):
        values = balance.on_step(step(4, 20.0, 12.0, reply(0.0)))
    assert values[names.STREAM_ELASTIC] == 1
    assert balance.on_step(step(5, 18.0, 10.0, reply(0.0)))[names.STREAM_ELASTIC] == 0


def test_no_advice_without_overlap_and_errors_stop_nothing():
    balance = Balance(setting())
    assert balance.on_step(step(4, 20.0, 12.0, reply(None))) == {}
    broken = reply(0.0)
    broken.tags = [{}]
    assert balance.on_step(step(4, 20.0, 12.0, broken)) == {}
    assert balance.on_step(step(4, 20.0, 12.0, broken)) == {}


def test_seconds_a_batch_was_ready_before_it_was_taken():
    record = {"policy_version_end": 0, "response_tokens": 5, "started_at": 100.0, "finished_at": 110.0}
    later = {**record, "finished_at": 114.0}
    collected = Collected(samples=[("a", 0)], lengths=[5], waited=[0], staleness=[0])
    batch = Batch(collected, ["a_0"], 0, [record, later], [], [], StepCounts(), 0, 0, {})
    assert batch_metrics(batch, 4, taken=120.0)[names.STREAM_AHEAD] == 6.0
    assert batch_metrics(batch, 4, taken=113.0)[names.STREAM_AHEAD] == 0.0  # clocks of two machines differ
    assert names.STREAM_AHEAD not in batch_metrics(batch, 4)


def test_advice_keeps_the_upper_limit():
    balance = Balance(setting(), Limits(1, 4, window=1))
    assert balance.on_step(step(4, 20.0, 12.0, reply(0.0)))[names.STREAM_ELASTIC] == balance.advice == 0
