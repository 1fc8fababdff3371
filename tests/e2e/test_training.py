"""The one command, as a user runs it: real verl, Ray, vLLM; killed and resumed."""

import json
import shutil
import subprocess

import numpy as np
import pytest
import whole_run
from whole_run import MOSTLY, finish, kill_all, steps_of, wait_for_step

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
STEPS_AN_EPOCH = 2
MEGATRON = "model_engine=megatron"
TP2 = ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=2")
#: Model, and overrides. The last has two ranks, a rollout replica on each, and takes 13 GB. Megatron is in another run
#: here and in test_sorted as well.
ENGINES = {"fsdp": ("qwen2", ()), "megatron": ("llama", (MEGATRON,)), "megatron-tp2": ("llama", (MEGATRON, *TP2))}


def start(run_dir, *overrides, **settings):
    return whole_run.start(run_dir, *SMALL, *overrides, **settings)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.xdist_group(name), *([ONLY_SLOW] if name != "fsdp" else [])])
        for name in ENGINES
    ],
)
def engine(request):
    """Starts a run with this engine: ``engine(run_dir, epochs=2)``."""
    model, overrides = ENGINES[request.param]
    return lambda run_dir, **env: start(run_dir, *overrides, MODEL=model, **env)


EPOCHS = 2
LAST_STEP = EPOCHS * STEPS_AN_EPOCH


@pytest.fixture(scope="module")
def trained(engine, tmp_path_factory):
    """A run that is killed one step after its checkpoint of step 2, and resumed to its end. Meanwhile, a second start
    in its folder is refused."""
    run_dir = tmp_path_factory.mktemp("run")
    process = engine(run_dir, epochs=EPOCHS)
    wait_for_step(process, run_dir, 1)
    second = engine(run_dir, epochs=EPOCHS)
    refused, _ = second.communicate(timeout=120)
    assert (second.returncode, "is in use by process" in refused) == (1, True), refused
    wait_for_step(process, run_dir, 3)
    kill_all(process)
    return run_dir, finish(engine(run_dir, epochs=EPOCHS), run_dir)


def test_trains_drafts_and_reports(trained):
    run_dir, output = trained
    summary = json.loads((run_dir / "summary.json").read_text())
    assert set(summary) == {"run", "epochs", "bubble_slots", "engine", "staleness_mean", "staleness_max"}
    assert summary["run"] == "histospec"
    assert len(summary["epochs"]) == EPOCHS
    first, second = summary["epochs"][:2]
    assert set(first) == {
        *("epoch", "reward_mean", "rollout_s", "tokens", "accept_length", "accept_rate", "history_hit_rate"),
        *("useful_tokens_per_s", "bubble_ratio", "staleness_mean", "staleness_max"),
        *(
            "discarded_tokens",
            "reverified_tokens",
            "drafted_by_source",
            "accepted_by_source",
            "waiting_max",
            "migrated",
            "length_rank_correlation",
        ),
        *("accepted_share", "entropy"),
    }
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
    assert "resuming after step " in output


def test_the_event_log_alone_has_the_report(trained, tmp_path):
    run_dir, _ = trained
    shutil.copytree(run_dir / "checkpoints" / "events", tmp_path / "checkpoints" / "events")
    lost, whole = read(tmp_path), read(run_dir)
    assert lost.summary == whole.summary
    np.testing.assert_equal(lost.steps, whole.steps)


def test_every_request_and_stage_is_logged(trained):
    run_dir, _ = trained
    requests = events.to_numpy(events.read_requests(run_dir / "checkpoints" / "events"))
    assert len(requests["step"]) == LAST_STEP * 8 * 4
    assert set(requests["sample"]) == {0, 1, 2, 3}
    assert len(set(map(bytes, requests["prompt_key"]))) == 16
    for earlier, later in (
        ("queued_at", "started_at"),
        ("started_at", "first_token_at"),
        ("first_token_at", "finished_at"),
    ):
        assert (requests[earlier] <= requests[later] + 0.05).all(), (earlier, later)
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
    _, metrics = steps_of(trained[0])[-1]
    for name in (
        *("rollout/spec_accept_rate", "rollout/spec_accept_length", "rollout/bubble_ratio"),
        *("rollout/useful_tokens_per_s", "rollout/history/hit_rate", "timing_s/history_update"),
    ):
        assert name in metrics
    assert metrics["rollout/history/errors"] == 0
    both = [(m["rollout/entropy"], m["actor/entropy"]) for _, m in steps_of(trained[0]) if "rollout/entropy" in m]
    assert len(both) >= len(steps_of(trained[0])) / 2, "recording never lags by many steps here"
    sampled, exact = map(np.mean, zip(*both, strict=True))
    assert sampled == pytest.approx(exact, rel=0.2)
    # What vLLM returned against the actor's own recomputation, over the whole step.
    assert metrics["training/rollout_actor_probs_pearson_corr"] > 0.999
    assert metrics["training/rollout_probs_diff_max"] < 0.02


def test_resumes_where_it_was_killed(trained):
    run_dir, _ = trained
    history = steps_of(run_dir)
    # Step 3 and perhaps 4 ran twice, from the same weights; what the killed run did of them is part of no checkpoint.
    assert [step for step, _ in history][-2:] == [3, 4]
    assert len(history) > LAST_STEP, "the metrics file lost the steps before the kill"
    assert history[-2][1]["rollout/history/hit_rate"] >= MOSTLY, "the history was not restored"
    assert history[-2][1]["rollout/history/errors"] == 0
    check_nothing_twice(run_dir, last_step=LAST_STEP)


def check_nothing_twice(run_dir, last_step):
    """Of all attempts, those that stand cover each step and each prompt of an epoch once."""
    requests = events.to_numpy(events.read_requests(run_dir / "checkpoints" / "events"))
    steps, counts = np.unique(requests["step"], return_counts=True)
    assert steps.tolist() == list(range(1, last_step + 1))
    assert set(counts) == {8 * 4}, "a step's trajectories were counted twice"
    for epoch in range(last_step // STEPS_AN_EPOCH):
        prompts = requests["prompt_key"][requests["epoch"] == epoch]
        assert set(np.unique(prompts, return_counts=True)[1]) == {4}, "a prompt was trained twice in one epoch"


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
def test_separate_rollout_pool(tmp_path):
    finish(start(tmp_path, epochs=3, MODE="separate_async"), tmp_path)
    drafted = [metrics["rollout/spec/drafted_tokens"] for _, metrics in steps_of(tmp_path)]
    assert drafted[-1] > 0
    assert steps_of(tmp_path)[-1][1]["rollout/history/errors"] == 0


@pytest.mark.parametrize(
    "overrides", [pytest.param((), marks=ONLY_SLOW, id="fsdp"), pytest.param((MEGATRON,), id="megatron")]
)
def test_somebodys_own_trainer_and_worker(overrides, tmp_path):
    modules = "verl_rhyme.plugin,examples.own_trainer.my_trainer"
    process = start(tmp_path, *overrides, epochs=EPOCHS, MODE="my_async", VERL_USE_EXTERNAL_MODULES=modules)
    finish(process, tmp_path)
    _, metrics = steps_of(tmp_path)[-1]
    assert "mine/full_length" in metrics
    assert metrics["actor/mine/updates"] == LAST_STEP
    assert metrics["rollout/spec/drafted_tokens"] > 0
    assert metrics["rollout/history/errors"] == 0
