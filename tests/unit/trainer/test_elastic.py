"""The number of replicas: advice from the times of a step, and replicas that rest while others start."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from verl_rhyme.config import ConfigError, ElasticConfig
from verl_rhyme.observability import metrics as names
from verl_rhyme.observability.batches import batch_metrics
from verl_rhyme.processes.messages import Handover, Part, Reply
from verl_rhyme.scheduling.batch import Batch, Collected, StepCounts
from verl_rhyme.trainer import elastic as module
from verl_rhyme.trainer.elastic import MARGIN, SETTLING, WINDOW, ElasticReplicas, advise
from verl_rhyme.trainer.observers import Step


def step(replicas, generated, trained, last=False):
    """A step whose trainer waited for its batch, or whose batch was ready before."""
    seconds = max(generated, trained) + 1.0
    values = {names.AHEAD_S: seconds - generated}
    nothing = Handover({}, {}, Part([], []), [])
    return Step(1, seconds, seconds, last, replicas, seconds - trained, Reply([], [], values, {}, 0, nothing))


def followed(elastic, replicas, times, steps):
    """Return the replicas by step where advice is followed."""
    found = []
    for number in range(steps):
        replicas += round(elastic.on_step(step(replicas, *times(replicas, number)))[names.REPLICA_ADVICE])
        found.append(replicas)
    return found


def test_as_published_a_replica_is_added_when_generation_stays_behind(monkeypatch):
    """Four replicas take 30 s, five 24 s, three 40 s."""
    monkeypatch.setattr(module, "MARGIN", 0)
    assert [advise(30, trained, 4) for trained in (24, 24.1, 30, 39.9, 40)] == [1, 0, 0, 0, -1]
    assert advise(1, 100, 1) == 0


@settings(max_examples=200)
@given(st.floats(1, 1000), st.floats(1, 200), st.integers(1, 32))
@example(59.0, 1.09375, 4)  # it settles in the last steps
def test_the_rule_settles_on_one_number_of_replicas(work, trained, replicas):
    """It changes in one direction, to where one more or less would cross over."""
    seen = followed(ElasticReplicas(), replicas, lambda k, _: (work / k, trained), 300)
    changes = np.diff([replicas, *seen])
    assert not ((changes > 0).any() and (changes < 0).any())
    assert len(set(seen[-20:])) == 1 or abs(changes).sum() > 280 / (WINDOW + SETTLING) - 2, "it needs more steps"
    if len(set(seen[-20:])) == 1:
        margin = MARGIN * max(trained, work / seen[-1])
        assert work / (seen[-1] + 1) < trained + margin
        assert seen[-1] == 1 or work / (seen[-1] - 1) > trained - margin


@settings(max_examples=50)
@given(st.integers(0, 10_000), st.integers(2, 20))
def test_noise_of_a_few_percent_moves_no_replica(seed, replicas):
    rng = np.random.default_rng(seed)

    def times(count, _):
        noise = 1 + 0.2 / replicas * (2 * rng.random(2) - 1)
        return noise[0] * 100 / count, noise[1] * 100 / replicas

    assert set(followed(ElasticReplicas(), replicas, times, 60)) == {replicas}


def test_one_odd_step_changes_nothing_pairs_count_as_their_mean_and_steps_after_a_change_do_not_count():
    odd = [(60 if number % 4 == 2 else 25, 24) for number in range(12)]
    assert followed(ElasticReplicas(), 4, lambda _, number: odd[number], 12) == [4] * 12
    elastic = ElasticReplicas()
    pairs = [elastic.on_step(step(4, 60 if number % 2 else 20, 24)) for number in range(6)]
    assert [found[names.REPLICA_ADVICE] for found in pairs] == [0, 0, 0, 1, 1, 1]
    assert pairs[-1][names.BEHIND_S] == 16
    seen = followed(ElasticReplicas(), 4, lambda *_: (60, 20), 2 * WINDOW + SETTLING)
    assert seen == [4] * (WINDOW - 1) + [5] * (WINDOW + SETTLING) + [6]


def test_no_advice_without_overlap():
    standing = step(4, 20.0, 8.0).reply
    standing.metrics.clear()
    assert ElasticReplicas().on_step(Step(1, 21.0, 21.0, replicas=4, wait_s=13.0, reply=standing)) == {}
    assert ElasticReplicas().on_step(Step(1, 21.0, 21.0)) == {}


def test_seconds_a_batch_was_ready_before_it_was_taken():
    record = {"policy_version_end": 0, "response_tokens": 5, "started_at": 100.0, "finished_at": 110.0}
    later = {**record, "finished_at": 114.0}
    collected = Collected(samples=[("a", 0)], lengths=[5], waited=[0], staleness=[0])
    batch = Batch(collected, ["a_0"], 0, [record, later], [], [], StepCounts(), 0, 0, {})
    assert batch_metrics(batch, 4, taken=120.0)[names.AHEAD_S] == 6.0
    assert batch_metrics(batch, 4, taken=113.0)[names.AHEAD_S] == 0.0  # clocks of two machines differ
    assert names.AHEAD_S not in batch_metrics(batch, 4)


class Spares:
    """The serving replicas of a run, and those that rest."""

    def __init__(self, count, waking=()):
        self.serving = [SimpleNamespace(replica_rank=rank, workers=[None]) for rank in range(count)]
        self.rested, self.reported, self.waking, self.missing = [], [], list(waking), 0

    def serve(self, share, leaves):
        self.reported.append(share)
        return 5

    def elastic(self, *limits):
        engine = SimpleNamespace(backend="relay", engine_kwargs={})
        servers = SimpleNamespace(get_replicas=lambda: self.serving)
        elastic = ElasticReplicas(ElasticConfig(*limits), servers, engine, self)
        elastic.on_train_begin(self)
        return elastic

    def suspend(self, replica, drain):
        self.rested.append(replica.replica_rank)
        self.serving.remove(replica)
        return drain("address")

    def wake_up(self, version):
        self.serving.append(self.waking.pop())
        return self.serving[-1]


def test_advice_is_carried_out_within_the_limits_but_not_after_the_last_step():
    spares = Spares(4)
    elastic = spares.elastic(2, 3)
    assert spares.rested == [3]
    for _ in range(WINDOW - 1):
        elastic.on_step(step(3, 8.0, 20.0))
    assert names.REPLICA_MOVES not in elastic.on_step(step(3, 8.0, 20.0, last=True))
    assert elastic.on_step(step(3, 8.0, 20.0))[names.REPLICA_MOVES] == 5
    assert spares.rested == [3, 2]
    for times in ((1, 100), (100, 1)):
        advice = [elastic.on_step(step(2 + (times[0] > 1), *times))[names.REPLICA_ADVICE] for _ in range(8)]
        assert advice == [0] * 8, "beyond a limit"
    assert elastic.scale(-1, 3) == elastic.scale(0, 3) == {names.REPLICAS_SERVING: 2}
    with pytest.raises(ConfigError, match=r"elastic.min_replicas=3: the run has only 2; lower it"):
        spares.elastic(3)


def test_replicas_that_die_or_start_are_reported_and_count():
    """A starting replica serves only minutes later; until then its place looked free."""
    spares = Spares(4, waking=[SimpleNamespace(replica_rank=7)])
    elastic = spares.elastic(1, 3)
    elastic.scale(0, 6)
    del spares.serving[2:]
    spares.missing = 1
    assert names.REPLICA_CHANGE_S not in elastic.scale(1, 7)
    spares.missing = 0
    assert names.REPLICA_CHANGE_S in elastic.scale(1, 8)
    assert not spares.waking
    assert spares.reported == [0.75, 0.5, 0.75]
