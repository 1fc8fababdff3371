"""Replicas that rest and return while a run goes on, as a user has it: lengths grow, and shrink again."""

import json

import numpy as np
import pytest
import whole_run
from growing_loop import STAYED, tokens
from test_stream import BATCH, SAMPLES, SMALL
from whole_run import ROOT, SLOW

from verl_rhyme.observability import events

pytestmark = [SLOW, pytest.mark.timeout(1500), pytest.mark.whole_run, pytest.mark.alone]
PROMPTS = 96
RHYME = "actor_rollout_ref.rollout.custom.rhyme"
#: Milliseconds that a decoding step takes at least, by replica; those that training a sample does.
FLOORS, TRAIN = "60,90", "400"


def test_the_rule_fires_and_reverses(tmp_path):
    agent = "actor_rollout_ref.rollout.agent"
    overrides = (
        *SMALL,
        f"{agent}.agent_loop_config_path={ROOT / 'tests' / 'e2e' / 'growing_loop.yaml'}",
        f"{agent}.default_agent_loop=growing",
        "data.shuffle=false",
        f"{RHYME}.drafting.enable=false",
        f"{RHYME}.streaming.elastic.min_replicas=1",
    )
    settings = {"RHYME": "stream", "REPLICAS": "2", "PROMPTS": str(PROMPTS)}
    settings |= whole_run.steady(FLOORS, STEADY_TRAIN_MS=TRAIN)
    whole_run.finish(whole_run.start(tmp_path, *overrides, epochs=1, **settings), tmp_path, timeout=1200)
    check(tmp_path)


def check(run_dir):
    steps = [metrics for _, metrics in whole_run.steps_of(run_dir)]
    assert len(steps) == PROMPTS // BATCH
    for step, metrics in enumerate(steps, 1):  # for who reads the test's output
        told = {name.rpartition("/")[2]: metrics.get(f"training/stream/{name}", 0.0) for name in TOLD}
        print(step, {**told, "step_s": metrics["timing_s/step"], "tokens": metrics["response_length/mean"]})

    serving = [int(metrics["training/stream/replicas"]) for metrics in steps]
    rested = serving.index(1)
    fired = serving.index(2, rested)  # after that step
    reversed_ = serving.index(1, fired)
    ones, twos = [1] * (fired - rested), [2] * (reversed_ - fired)
    assert serving[rested:] == ones + twos + [1] * (len(serving) - reversed_), "once each way"
    assert 16 // BATCH < fired <= STAYED // BATCH < reversed_, "as lengths had grown, and as they were short again"
    assert all(metrics["training/rollout_actor_probs_pearson_corr"] > 0.95 for metrics in steps)

    requests = events.to_numpy(events.read_requests(run_dir / "checkpoints" / "events"))
    trained = requests["trained"]
    late = requests["step"][trained] - 1 - requests["policy_version_start"][trained]
    assert late.min() >= 0
    assert late.max() <= 1
    lengths = dict[tuple, int]()
    for uid, sample, count in zip(*(requests[name] for name in ("uid", "sample", "response_tokens")), strict=True):
        lengths[uid, sample] = lengths.get((uid, sample), 0) + count
    assert len(lengths) == PROMPTS * SAMPLES, "each sample is trained once"
    wanted = sorted(tokens(index, sample) for index in range(PROMPTS) for sample in range(SAMPLES))
    assert sorted(lengths.values()) == wanted, "what is moved keeps its tokens"
    assert len({(requests["uid"][row], requests["sample"][row]) for row in np.flatnonzero(trained)}) == len(lengths)

    first, last = (requests["policy_version_start"][requests["replica"] == rank] for rank in (0, 1))
    resting = (rested < last) & (last < fired) | (last > reversed_)
    assert not resting.any(), "the last one rests, gets no requests, and returned with the current weights"
    assert first.max() >= reversed_
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["staleness_max"] <= 1


TOLD = ("replicas", "elastic", "behind_s", "ahead_s", "moved", "change_s")
