"""The pipeline, as a user runs it: real verl, Ray, vLLM; few slots, samples interrupted at every update."""

import json

import numpy as np
import pytest
import whole_run
from whole_run import ROOT

from tests.conftest import ONLY_SLOW
from verl_rhyme.observability import events

pytestmark = [pytest.mark.timeout(1200), pytest.mark.whole_run]
PROMPTS, SAMPLES, BATCH = 16, 4, 4
STEPS_AN_EPOCH = PROMPTS // BATCH
SMALL = (
    f"data.train_batch_size={BATCH}",
    f"actor_rollout_ref.rollout.n={SAMPLES}",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16",
    "actor_rollout_ref.rollout.max_num_seqs=6",
    "trainer.save_freq=2",
)


def start(run_dir, *overrides, epochs, **env):
    return whole_run.start(run_dir, *SMALL, *overrides, epochs=epochs, **{"RHYME": "full", "STALENESS": "0", **env})


def requests_of(run_dir):
    return events.to_numpy(events.read_requests(run_dir / "checkpoints" / "events"))


@pytest.fixture(scope="module")
def coupled(tmp_path_factory):
    """Two epochs of tail batching, coupled; killed past a checkpoint, and resumed."""
    run_dir = tmp_path_factory.mktemp("coupled")
    process = start(run_dir, epochs=2)
    whole_run.wait_for_step(process, run_dir, 3)
    whole_run.kill_all(process)
    whole_run.finish(start(run_dir, epochs=2), run_dir)
    return run_dir


@pytest.mark.xdist_group("sorted-on-policy")
class TestOnPolicy:
    def test_reports_what_it_cost(self, coupled):
        summary = json.loads((coupled / "summary.json").read_text())
        assert summary["run"] == "full-k0"
        assert summary["staleness_max"] == summary["staleness_mean"] == 0
        for epoch in summary["epochs"]:
            assert 1 <= epoch["waiting_max"] <= BATCH + 2, "none waits for longer than a batch of those put off takes"
            assert epoch["discarded_tokens"] > 0
        assert sum(epoch["reverified_tokens"] for epoch in summary["epochs"]) > 0
        requests = requests_of(coupled)
        trained = np.flatnonzero(requests["trained"])
        first = dict[bytes, int]()
        for key, step in zip(requests["prompt_key"][trained], requests["step"][trained], strict=True):
            first[key] = min(int(step), first.get(key, int(step)))
        again = [row for row in trained if requests["step"][row] > first[requests["prompt_key"][row]]]
        # what was put off in the first epoch is trained in the second, and has no history yet
        assert requests["history_hit"][again].mean() >= whole_run.MOSTLY

    def test_trains_nothing_but_the_current_policys_tokens(self, coupled):
        requests = requests_of(coupled)
        trained = requests["trained"]
        np.testing.assert_array_equal(requests["policy_version_end"][trained], requests["step"][trained] - 1)
        np.testing.assert_array_equal(requests["policy_version_start"][trained], requests["step"][trained] - 1)
        assert (~trained).any(), "nothing was cut short: the test sees no interruption"
        for _, metrics in whole_run.steps_of(coupled):
            assert metrics["training/off_policy/trajectory_staleness_worst/max"] == 0
            assert metrics["training/staleness/tokens/max"] == 0
            # vLLM's and the actor's probabilities of every token: made by these very weights.
            assert metrics["training/rollout_actor_probs_pearson_corr"] > 0.999
            assert metrics["training/sorted/order"] == 1

    def test_lengths_are_forecast_from_the_first_epoch_over_the_kill(self, coupled):
        told = [metrics for _, metrics in whole_run.steps_of(coupled) if "rollout/lengths/seen" in metrics]
        assert told[0]["rollout/lengths/seen"] == 0
        assert told[-1]["rollout/lengths/seen"] == 1
        assert 0.2 < told[-1]["rollout/lengths/mean_ratio"] < 5
        assert not any("rollout/lengths/forecast_errors" in metrics for _, metrics in whole_run.steps_of(coupled))
        last = json.loads((coupled / "summary.json").read_text())["epochs"][1]
        assert -1 <= last["length_rank_correlation"] <= 1

    def test_each_prompt_is_trained_once_for_each_epoch(self, coupled):
        check_each_prompt_once(coupled, epochs=2)

    def test_resumes_where_it_was_killed(self, coupled):
        history = whole_run.steps_of(coupled)
        assert [step for step, _ in history][-6:] == [3, 4, 5, 6, 7, 8]
        assert len(history) > 8, "nothing was done twice: the kill came too late"
        resumed = history[-6][1]
        assert resumed["training/sorted/loaded_prompts"] < 2 * BATCH, "what was put off was not restored"
        again = sum(metrics["rollout/spec/reverified_tokens"] for _, metrics in history[-6:-4])
        assert again > 0, "what was interrupted before was not restored"


def check_each_prompt_once(run_dir, epochs):
    requests = requests_of(run_dir)
    trained = requests["trained"]
    steps, counts = np.unique(requests["step"][trained], return_counts=True)
    assert steps.tolist() == list(range(1, epochs * STEPS_AN_EPOCH + 1))
    assert set(counts) == {BATCH * SAMPLES}
    # What is put off at the end of an epoch is trained in the next.
    counts = np.unique(requests["prompt_key"][trained], return_counts=True)[1]
    assert counts.tolist() == [epochs * SAMPLES] * PROMPTS, "a prompt was not trained once for each epoch"


@pytest.mark.xdist_group("sorted-partial")
def test_partial_with_reference_and_validation(tmp_path):
    """Single trajectories, each token with the log-probability it was made with; on Megatron (FSDP's reference wants
    pinned memory). Without drafts, and with top-p: rhyme's sampler draws, and weights have the actor's support."""
    overrides = (
        *("actor_rollout_ref.rollout.custom.rhyme.drafting.enable=false", "actor_rollout_ref.rollout.top_p=0.8"),
        *("model_engine=megatron", "algorithm.adv_estimator=reinforce_plus_plus"),
        "actor_rollout_ref.actor.use_kl_loss=true",
        *("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16", "trainer.test_freq=4"),
    )
    whole_run.finish(start(tmp_path, *overrides, epochs=1, MODEL="llama", STALENESS="1"), tmp_path)
    steps = whole_run.steps_of(tmp_path)
    assert [step for step, _ in steps] == list(range(1, STEPS_AN_EPOCH + 1))
    for _, metrics in steps:
        assert "actor/kl_loss" in metrics
        assert metrics["training/off_policy/trajectory_staleness_worst/max"] <= 1
        assert metrics["training/sorted/discarded_tokens"] == 0
        assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=0.02)
    assert steps[0][1]["training/rollout_probs_diff_max"] < 0.01, "the policy of the first step has not moved"
    assert any(key.startswith("val-") for key in steps[-1][1])
    assert max(metrics["training/staleness/tokens/max"] for _, metrics in steps) == 1, "nothing was continued"
    requests = requests_of(tmp_path)
    train = ~requests["validate"]
    samples = {}
    for uid, sample, tokens in zip(*(requests[n][train] for n in ("uid", "sample", "response_tokens")), strict=True):
        samples[uid, sample] = samples.get((uid, sample), 0) + tokens
    assert len(samples) == PROMPTS * SAMPLES
    assert max(samples.values()) <= 384
    assert sum(samples.values()) == requests["response_tokens"][requests["trained"]].sum()


@pytest.mark.xdist_group("sorted-unreliable")
def test_slow_tools_dead_workers_and_canned_answers(tmp_path):
    """Each prompt is trained once all the same, no step waits for what does not come, and nothing old is trained; with
    SortedRL's load, whose batches can pass by a tool that hangs."""
    agent = "actor_rollout_ref.rollout.agent"
    overrides = (
        f"{agent}.agent_loop_config_path={ROOT / 'tests' / 'e2e' / 'unreliable_loop.yaml'}",
        f"{agent}.default_agent_loop=unreliable",
    )
    quick = whole_run.importing("quick_stops")
    whole_run.finish(start(tmp_path, *overrides, epochs=1, RHYME="sorted", **quick), tmp_path, timeout=400)
    steps = [metrics for _, metrics in whole_run.steps_of(tmp_path)]
    assert len(steps) == STEPS_AN_EPOCH
    assert (tmp_path / "died").exists()
    assert sum(metrics["training/sorted/abandoned"] for metrics in steps) > 0
    assert sum(metrics["training/sorted/dropped_prompts"] for metrics in steps) == 0
    assert sum(metrics["training/sorted/failed_attempts"] for metrics in steps) >= PROMPTS // 4
    for metrics in steps:
        assert metrics["training/off_policy/trajectory_staleness_worst/max"] == 0
        assert metrics["training/rollout_actor_probs_pearson_corr"] > 0.999
        assert metrics["rollout/history/errors"] == 0
    requests = requests_of(tmp_path)
    trained = requests["trained"]
    np.testing.assert_array_equal(requests["policy_version_end"][trained], requests["step"][trained] - 1)
    counts = np.unique(requests["prompt_key"][trained], return_counts=True)[1]
    # A canned answer took no request, nor did a sample without a trajectory; all else is there once.
    assert sorted(counts) == [SAMPLES - 1] * (PROMPTS // 2) + [SAMPLES] * (PROMPTS - PROMPTS // 2)
    samples = list(zip(requests["uid"][trained], requests["sample"][trained], strict=True))
    assert len(samples) == len(set(samples)), "a sample was trained twice"
    assert requests["sample"].max() < SAMPLES


def runs_while_the_actor_trains(run_dir):
    """Requests for training that ran during an update of the actor, by updates."""
    requests = requests_of(run_dir)
    stages = events.to_numpy(events.read_stages(run_dir / "checkpoints" / "events"))
    updates = stages["stage"] == "update_actor"
    starts, train = stages["started_at"][updates], ~requests["validate"]
    began, ended = requests["started_at"], requests["finished_at"]
    spans = zip(starts, starts + stages["duration_s"][updates], strict=True)
    return sum(int(((began < end) & (ended > start) & train).sum()) for start, end in spans)


@ONLY_SLOW
def test_two_ranks_and_two_replicas(tmp_path):
    overrides = (
        *("trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.max_num_seqs=3"),
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",  # a rank's share of the batch
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
    )
    whole_run.finish(start(tmp_path, *overrides, epochs=2), tmp_path)
    check_each_prompt_once(tmp_path, epochs=2)
    requests = requests_of(tmp_path)
    trained = requests["trained"]
    np.testing.assert_array_equal(requests["policy_version_end"][trained], requests["step"][trained] - 1)
    np.testing.assert_array_equal(requests["policy_version_start"][trained], requests["step"][trained] - 1)
    assert set(requests["replica"][trained]) == {0, 1}
    steps = whole_run.steps_of(tmp_path)
    for _, metrics in steps:
        assert metrics["training/staleness/tokens/max"] == 0
        assert metrics["training/sorted/order"] == 1
        assert metrics["training/rollout_actor_probs_pearson_corr"] > 0.999
    assert sum(metrics["rollout/spec/reverified_tokens"] for _, metrics in steps) > 0


@ONLY_SLOW
@pytest.mark.parametrize("staleness", ["0", "1"])
def test_ppo_with_a_critic(tmp_path, staleness):
    """The recipe on Megatron, cut down: FSDP's critic needs flash-attn or trl."""
    settings = {"SMOKE": "1", "SKIP_BOOTSTRAP": "1", "RHYME": "full", "STALENESS": staleness}
    few = "actor_rollout_ref.rollout.max_num_seqs=6"
    whole_run.finish(whole_run.start_recipe("qwen32b_ppo_math", tmp_path, few, **settings), tmp_path)
    steps = whole_run.steps_of(tmp_path)
    assert len(steps) == 2
    for _, metrics in steps:
        assert {"critic/vf_loss", "critic/grad_norm", "training/sorted/order"} <= metrics.keys()


@ONLY_SLOW
def test_a_filtered_group_is_replaced(tmp_path):
    overrides = ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=reward")
    whole_run.finish(start(tmp_path, *overrides, epochs=1), tmp_path)
    steps = whole_run.steps_of(tmp_path)
    assert len(steps) == STEPS_AN_EPOCH
    assert sum(metrics.get("training/filter_groups/evicted_samples", 0) for _, metrics in steps) > 0
    requests = requests_of(tmp_path)
    rewards = {}
    trained = requests["trained"]
    for uid, reward in zip(requests["uid"][trained], requests["reward"][trained], strict=True):
        rewards.setdefault(uid, set()).add(round(float(reward), 6))
    assert all(len(values) > 1 for values in rewards.values()), "a group without a signal was trained"
