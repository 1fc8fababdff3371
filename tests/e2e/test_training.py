"""The one command, as a user runs it: real verl, Ray, vLLM."""

import json
import shutil
import subprocess
from itertools import pairwise

import numpy as np
import pytest
import whole_run
from whole_run import MOSTLY, finish, kill_all, requests_of, steps_of, wait_for_step

from tests.conftest import ONLY_SLOW
from verl_rhyme.observability import events
from verl_rhyme.observability.run import read

pytestmark = [pytest.mark.timeout(1200), pytest.mark.whole_run]
#: 16 prompts x 4 samples, two steps an epoch.
SMALL = (
    "data.train_batch_size=8",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",  # separate_async wants it so
    "trainer.save_freq=2",
)
STEPS_AN_EPOCH, EPOCHS = 2, 2
LAST_STEP = EPOCHS * STEPS_AN_EPOCH
MEGATRON = "model_engine=megatron"
TP2 = ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=2")
#: Model, and overrides. The last has two ranks, a rollout replica on each, and takes 13 GB. Every day Megatron is in
#: test_sorted.
ENGINES = {"fsdp": ("qwen2", ()), "megatron-tp2": ("llama", (MEGATRON, *TP2))}


def start(run_dir, *overrides, **settings):
    return whole_run.start(run_dir, *SMALL, *overrides, **settings)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.xdist_group(name), *([ONLY_SLOW] if name != "fsdp" else [])])
        for name in ENGINES
    ],
)
def trained(request, tmp_path_factory):
    """A run, and what it printed. Meanwhile, a second start in its folder is refused."""
    model, overrides = ENGINES[request.param]
    run_dir = tmp_path_factory.mktemp("run")
    process = start(run_dir, *overrides, MODEL=model, epochs=EPOCHS)
    wait_for_step(process, run_dir, 1)
    second = start(run_dir, *overrides, MODEL=model, epochs=EPOCHS)
    refused, _ = second.communicate(timeout=120)
    assert (second.returncode, "is in use by process" in refused) == (1, True), refused
    return run_dir, finish(process, run_dir)


def test_trains_drafts_and_reports(trained, tmp_path):
    run_dir, output = trained
    summary = json.loads((run_dir / "summary.json").read_text())
    assert set(summary) == {"run", "epochs", "bubble_slots", "engine", "staleness_mean", "staleness_max"}
    assert summary["run"] == "histospec"
    first, second = summary["epochs"]
    assert first["history_hit_rate"] == 0
    assert second["history_hit_rate"] >= MOSTLY
    assert second["accept_length"] > 1
    assert first["accepted_by_source"]["history"] == 0 < second["accepted_by_source"]["history"]
    assert 0 < second["accept_rate"] <= 1
    assert 0 < second["accepted_share"] < 1
    assert second["entropy"] > 0
    assert second["staleness_max"] == 0
    assert 0 <= second["bubble_ratio"] < 1
    assert str(run_dir / "summary.json") in output.replace("\n", "")
    assert "Replicas over time" in (run_dir / "report.html").read_text()
    assert f"step {LAST_STEP}/{LAST_STEP}" in output
    shutil.copytree(run_dir / "checkpoints" / "events", tmp_path / "checkpoints" / "events")
    lost, whole = read(tmp_path), read(run_dir)
    assert lost.summary == whole.summary, "the event log alone has not the whole report"
    np.testing.assert_equal(lost.steps, whole.steps)


def test_every_request_and_stage_is_logged(trained):
    run_dir, _ = trained
    requests = check_nothing_twice(run_dir, LAST_STEP)
    assert set(requests["sample"]) == {0, 1, 2, 3}
    times = [requests[name] for name in ("queued_at", "started_at", "first_token_at", "finished_at")]
    assert all((earlier <= later + 0.05).all() for earlier, later in pairwise(times))
    np.testing.assert_array_equal(requests["policy_version_start"], requests["step"] - 1)
    np.testing.assert_array_equal(requests["policy_version_end"], requests["step"] - 1)
    warm = requests["epoch"] > 0
    assert requests["accepted_tokens"][~warm].sum() > 0, "the group's live texts gave no draft"
    share = [requests["accepted_tokens"][w].sum() / requests["response_tokens"][w].sum() for w in (warm, ~warm)]
    assert share[0] > share[1]
    assert not requests["history_hit"][~warm].any()
    lasted = requests["finished_at"] - requests["started_at"]
    late = warm & ~requests["history_hit"]
    assert late.sum() <= (1 - MOSTLY) * warm.sum(), requests["step"][late]
    assert (lasted[late] < np.quantile(lasted[warm], 0.25)).all(), (requests["step"][late], lasted[late])
    assert (requests["accepted_tokens"] <= requests["drafted_tokens"]).all()
    assert (requests["response_tokens"] <= 384).all()
    stages = events.to_numpy(events.read_stages(run_dir / "checkpoints" / "events"))
    assert {"gen", "update_actor", "update_weights", "step"} <= set(stages["stage"])


def test_metrics_carry_verls_names_and_ours(trained):
    steps = [metrics for _, metrics in steps_of(trained[0])]
    for name in (
        *("rollout/spec_accept_rate", "rollout/spec_accept_length", "rollout/bubble_ratio"),
        *("rollout/useful_tokens_per_s", "rollout/history/hit_rate", "timing_s/history_update"),
    ):
        assert name in steps[-1]
    assert steps[-1]["rollout/history/errors"] == 0
    both = [(metrics["rollout/entropy"], metrics["actor/entropy"]) for metrics in steps if "rollout/entropy" in metrics]
    assert len(both) >= len(steps) / 2, "recording never lags by many steps here"
    sampled, exact = map(np.mean, zip(*both, strict=True))
    assert sampled == pytest.approx(exact, rel=0.2)
    # What vLLM returned against the actor's own recomputation, over the whole step.
    assert steps[-1]["training/rollout_actor_probs_pearson_corr"] > 0.999
    assert steps[-1]["training/rollout_probs_diff_max"] < 0.02


def check_nothing_twice(run_dir, last_step):
    """Of all attempts, those that stand cover each step and each prompt of an epoch once. Return the requests."""
    requests = requests_of(run_dir)
    steps, counts = np.unique(requests["step"], return_counts=True)
    assert steps.tolist() == list(range(1, last_step + 1))
    assert set(counts) == {8 * 4}, "a step's trajectories were counted twice"
    for epoch in range(last_step // STEPS_AN_EPOCH):
        prompts = np.unique(requests["prompt_key"][requests["epoch"] == epoch], return_counts=True)[1]
        assert prompts.tolist() == [4] * 16, "a prompt was trained twice in one epoch"
    return requests


@ONLY_SLOW
@pytest.mark.timeout(2400)
def test_killed_at_five_random_moments(tmp_path):
    rng = np.random.default_rng(2026)
    for _ in range(5):
        process = start(tmp_path, epochs=6)
        try:
            process.wait(timeout=float(rng.uniform(20, 150)))
        except subprocess.TimeoutExpired:
            kill_all(process)
    finish(start(tmp_path, epochs=6), tmp_path)
    check_nothing_twice(tmp_path, last_step=12)
    _, metrics = steps_of(tmp_path)[-1]
    assert metrics["rollout/history/hit_rate"] >= MOSTLY
    assert metrics["rollout/history/errors"] == 0
    assert metrics["rollout/history/responses"] == 16 * 4 * 4  # four epochs of every prompt
    assert 0 <= metrics["critic/score/mean"] <= 1


@ONLY_SLOW
@pytest.mark.parametrize(("mode", "overrides"), [("separate_async", ()), ("my_async", ()), ("my_async", (MEGATRON,))])
def test_other_trainers_of_verl_and_somebodys_own(mode, overrides, tmp_path):
    modules = "verl_rhyme.plugin,examples.own_trainer.my_trainer"
    finish(start(tmp_path, *overrides, epochs=EPOCHS, MODE=mode, VERL_USE_EXTERNAL_MODULES=modules), tmp_path)
    _, metrics = steps_of(tmp_path)[-1]
    assert metrics["rollout/spec/drafted_tokens"] > 0
    assert metrics["rollout/history/errors"] == 0
    if mode == "my_async":
        assert "mine/full_length" in metrics
        assert metrics["actor/mine/updates"] == LAST_STEP
