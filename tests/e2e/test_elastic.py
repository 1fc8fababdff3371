"""Replicas that rest and return during a run, as a user has it: lengths grow, and shrink again."""

import pytest
import whole_run
from growing_loop import STAYED, tokens
from test_stream import BATCH, SAMPLES, SMALL
from whole_run import RHYME, ROOT

from tests.conftest import ONLY_SLOW

pytestmark = [ONLY_SLOW, pytest.mark.timeout(1500), pytest.mark.whole_run, pytest.mark.alone]
PROMPTS = 96
#: Milliseconds that a decoding step takes at least, by replica; those that training a sample does.
FLOORS, TRAIN = "60,90", "400"
SHOWN = ("behind_s", "ahead_s", *(f"replicas/{name}" for name in ("serving", "advice", "moved_samples", "change_s")))


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
    steps = [metrics for _, metrics in whole_run.steps_of(tmp_path)]
    assert len(steps) == PROMPTS // BATCH
    for step, metrics in enumerate(steps, 1):  # for who reads the test's output
        print(step, metrics["timing_s/step"], {name: metrics.get(f"rollout/{name}", 0.0) for name in SHOWN})

    serving = [int(metrics["rollout/replicas/serving"]) for metrics in steps]
    rested = serving.index(1)
    fired = serving.index(2, rested)  # after that step
    reversed_ = serving.index(1, fired)
    ones, twos = [1] * (fired - rested), [2] * (reversed_ - fired)
    assert serving[rested:] == ones + twos + [1] * (len(serving) - reversed_), "once each way"
    assert 16 // BATCH < fired <= STAYED // BATCH < reversed_, "as lengths had grown, and as they were short again"
    assert all(metrics["training/rollout_actor_probs_pearson_corr"] > 0.95 for metrics in steps)

    requests = whole_run.requests_of(tmp_path)
    trained = requests["trained"]
    late = requests["step"][trained] - 1 - requests["policy_version_start"][trained]
    assert 0 <= late.min() <= late.max() <= 1
    wanted = sorted(tokens(index, sample) for index in range(PROMPTS) for sample in range(SAMPLES))
    lengths = whole_run.lengths_of(requests)
    assert sorted(lengths.values()) == wanted, "each sample is trained once, and one that moves keeps its tokens"
    assert len({*zip(requests["uid"][trained], requests["sample"][trained], strict=True)}) == len(lengths)

    first, last = (requests["policy_version_start"][requests["replica"] == rank] for rank in (0, 1))
    resting = (rested < last) & (last < fired) | (last > reversed_)
    assert not resting.any(), "the last one rests, gets no requests, and returned with the current weights"
    assert first.max() >= reversed_
