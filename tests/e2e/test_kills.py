"""Processes of a run are killed, again and again: each sample is trained once all the same."""

import contextlib
import random
import time

import numpy as np
import pytest
import whole_run
from test_sorted import BATCH, PROMPTS, SAMPLES, start
from whole_run import KINDS, REOPENED, processes, requests_of

from tests.conftest import ONLY_SLOW

# Of the runs whose engines have processes of their own one at a time: two want 24 GiB. Every day test_sorted kills.
pytestmark = [ONLY_SLOW, pytest.mark.timeout(3600), pytest.mark.whole_run, pytest.mark.xdist_group("sorted-separate")]
EPOCHS = 4


def kill_now_and_then(process, run_dir, kinds, rng, kills, most):
    """One after the other, until the run ends or there were enough. Some come shortly after one another."""
    while process.poll() is None and sum(kills.values()) < most:
        deadline = time.monotonic() + rng.choice([0.3, 2.0, 5.0])
        while time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.1)
        kind = min(rng.sample(kinds, len(kinds)), key=lambda kind: kills[kind])
        victims = processes(run_dir, kind)
        if victims:
            rng.choice(victims).kill()
            kills[kind] += 1


def check_each_sample_once(run_dir):
    requests = requests_of(run_dir)
    trained = requests["trained"]
    steps = np.unique(requests["step"][trained])
    assert steps.tolist() == list(range(1, EPOCHS * PROMPTS // BATCH + 1))
    samples = set(zip(requests["uid"][trained], requests["sample"][trained], strict=True))
    assert len(samples) == EPOCHS * PROMPTS * SAMPLES, "one is lost, or trained twice"
    # What is put off, or runs on, at the end of an epoch is trained in the next.
    of_prompt = np.unique(requests["prompt_key"][trained], return_counts=True)[1]
    assert len(of_prompt) == PROMPTS
    assert of_prompt.min() >= EPOCHS * SAMPLES
    last = {}
    for uid, sample, step in zip(*(requests[name][trained] for name in ("uid", "sample", "step")), strict=True):
        assert last.setdefault((uid, sample), step) == step, "trained in two steps"


@pytest.mark.parametrize(
    ("bound", "topology", "kinds", "whole"),
    [
        pytest.param(2, "separate_async", [*KINDS], 2, id="separate-partial"),
        pytest.param(0, "separate_async", [*KINDS], 2, id="separate-on-policy"),
        pytest.param(0, "sync", ["coordinator", "agent loop worker"], 3, id="colocated-on-policy"),
        pytest.param(2, "sync", ["coordinator", "agent loop worker"], 3, id="colocated-partial"),
        pytest.param(0, "sync", ["replica"], 3, id="colocated-replica"),
    ],
)
def test_each_sample_is_trained_once_whatever_dies(tmp_path, bound, topology, kinds, whole):
    """``whole``: the run is killed as often as well, and, as after an end of its own with an error, started again."""
    rng = random.Random(f"{bound} {topology}")
    kills = dict.fromkeys(kinds, 0)
    for attempt in range(12):
        known = len(whole_run.steps_of(tmp_path))
        process = start(tmp_path, epochs=EPOCHS, STALENESS=str(bound), MODE=topology)
        with contextlib.suppress(AssertionError):  # a replica's death ended it
            whole_run.wait_for_step(process, tmp_path, 1, known=known)
        kill_now_and_then(process, tmp_path, kinds, rng, kills, most=8 * (attempt + 1))
        if whole and process.poll() is None:
            whole -= 1
            whole_run.kill_all(process)
            continue
        process.communicate(timeout=900)
        if process.returncode == 0:
            break
        assert "replica" in kinds, (tmp_path / "train.log").read_text(errors="replace")[-4000:]
    assert process.returncode == 0
    assert not whole, "the run was over before it was killed so often"
    assert min(kills.values()) > 0, kills
    print(f"killed: {kills}")
    if "coordinator" in kinds:
        assert REOPENED in (tmp_path / "train.log").read_text(errors="replace")
    check_each_sample_once(tmp_path)
    for _, metrics in whole_run.steps_of(tmp_path):
        assert metrics["training/off_policy/trajectory_staleness_worst/max"] <= bound
