"""The pipeline, as a user runs it: real verl, Ray, vLLM; few slots, samples interrupted at every update."""

import json

import numpy as np
import pytest
import whole_run
from whole_run import ROOT, requests_of, steps_of

from tests.conftest import ONLY_SLOW

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


def run(run_dir, *overrides, epochs, timeout=900, **env):
    """Metrics of each step of a run to its end, and its requests."""
    whole_run.finish(start(run_dir, *overrides, epochs=epochs, **env), run_dir, timeout)
    return [metrics for _, metrics in steps_of(run_dir)], requests_of(run_dir)


def check_on_policy(steps, requests):
    """Only tokens of the current policy are trained: with vLLM's and the actor's probabilities equal."""
    trained = requests["trained"]
    for end in ("policy_version_start", "policy_version_end"):
        np.testing.assert_array_equal(requests[end][trained], requests["step"][trained] - 1)
    for metrics in steps:
        assert metrics["training/off_policy/trajectory_staleness_worst/max"] == 0
        assert metrics["training/staleness/tokens/max"] == 0
        assert metrics["training/rollout_actor_probs_pearson_corr"] > 0.999
        assert metrics["training/order/by_length"] == 1


def check_each_prompt_once(requests, epochs):
    trained = requests["trained"]
    steps, counts = np.unique(requests["step"][trained], return_counts=True)
    assert steps.tolist() == list(range(1, epochs * STEPS_AN_EPOCH + 1))
    assert set(counts) == {BATCH * SAMPLES}
    # What is put off at the end of an epoch is trained in the next.
    counts = np.unique(requests["prompt_key"][trained], return_counts=True)[1]
    assert counts.tolist() == [epochs * SAMPLES] * PROMPTS, "a prompt was not trained once for each epoch"


@pytest.fixture(scope="module")
def coupled(tmp_path_factory):
    """Two epochs of tail batching, coupled; the coordinator is killed, then the run, past a checkpoint, which is
    resumed. Its folder, requests and output."""
    run_dir = tmp_path_factory.mktemp("coupled")
    process = start(run_dir, epochs=2)
    whole_run.wait_for_step(process, run_dir, 1)
    [coordinator] = whole_run.processes(run_dir, "coordinator")
    coordinator.kill()
    whole_run.wait_for_step(process, run_dir, 3)
    whole_run.kill_all(process)
    assert whole_run.REOPENED in (run_dir / "train.log").read_text(errors="replace")
    output = whole_run.finish(start(run_dir, epochs=2), run_dir)
    return run_dir, requests_of(run_dir), output


@pytest.mark.xdist_group("sorted-on-policy")
class TestOnPolicy:
    def test_reports_what_it_cost(self, coupled):
        run_dir, requests, _ = coupled
        summary = json.loads((run_dir / "summary.json").read_text())
        assert summary["run"] == "full-k0"
        assert summary["staleness_max"] == summary["staleness_mean"] == 0
        for epoch in summary["epochs"]:
            assert 1 <= epoch["waiting_max"] <= BATCH + 2, "none waits for longer than a batch of those put off takes"
            assert epoch["discarded_tokens"] > 0
        assert sum(epoch["reverified_tokens"] for epoch in summary["epochs"]) > 0
        trained = np.flatnonzero(requests["trained"])
        keys, steps = requests["prompt_key"][trained], requests["step"][trained]
        again = [row for row, key, step in zip(trained, keys, steps, strict=True) if step > steps[keys == key].min()]
        # what was put off in the first epoch is trained in the second, and has no history yet
        assert requests["history_hit"][again].mean() >= whole_run.MOSTLY, "the history was not restored"

    def test_trains_each_prompt_once_for_each_epoch_and_only_tokens_of_the_current_policy(self, coupled):
        run_dir, requests, _ = coupled
        check_on_policy([metrics for _, metrics in steps_of(run_dir)], requests)
        assert (~requests["trained"]).any(), "no sample was interrupted: the test sees no interruption"
        check_each_prompt_once(requests, epochs=2)

    def test_lengths_are_forecast_from_the_first_epoch_over_the_kill(self, coupled):
        steps = [metrics for _, metrics in steps_of(coupled[0])]
        seen = [metrics for metrics in steps if "rollout/lengths/seen" in metrics]
        assert (seen[0]["rollout/lengths/seen"], seen[-1]["rollout/lengths/seen"]) == (0, 1)
        assert 0.2 < seen[-1]["rollout/lengths/mean_ratio"] < 5
        assert not any("rollout/lengths/forecast_errors" in metrics for metrics in steps)

    def test_resumes_where_it_was_killed(self, coupled):
        run_dir, _, output = coupled
        history = steps_of(run_dir)
        assert "resuming after step " in output
        assert [step for step, _ in history][-6:] == [3, 4, 5, 6, 7, 8]
        assert len(history) > 8, "nothing was done twice, or the metrics file lost the steps before the kill"
        assert history[-6][1]["rollout/prompts/loaded"] < 2 * BATCH, "what was put off was not restored"
        again = sum(metrics["rollout/spec/reverified_tokens"] for _, metrics in history[-6:-4])
        assert again > 0, "what was interrupted before was not restored"


#: Megatron with a reference (FSDP's wants pinned memory) and validation. With top-p rhyme's sampler draws, and
#: log-probabilities have the actor's support.
MEGATRON = (
    *("model_engine=megatron", "actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.rollout.top_p=0.8"),
    *("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16", "trainer.test_freq=4"),
)


@ONLY_SLOW
def test_partial_without_drafts(tmp_path):
    """Single trajectories, each token with the log-probability it was made with."""
    overrides = ("actor_rollout_ref.rollout.custom.rhyme.drafting.enable=false", *MEGATRON)
    settings = {"MODEL": "llama", "STALENESS": "1"}
    steps, requests = run(tmp_path, *overrides, "algorithm.adv_estimator=reinforce_plus_plus", epochs=1, **settings)
    assert len(steps) == STEPS_AN_EPOCH
    for metrics in steps:
        assert metrics["training/off_policy/trajectory_staleness_worst/max"] <= 1
        assert metrics["rollout/samples/discarded_tokens"] == 0
        assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=0.02)
    assert steps[0]["training/rollout_probs_diff_max"] < 0.01, "the policy of the first step has not moved"
    assert max(metrics["training/staleness/tokens/max"] for metrics in steps) == 1, "nothing was continued"
    lengths = whole_run.lengths_of(requests)
    assert len(lengths) == PROMPTS * SAMPLES
    assert max(lengths.values()) <= 384
    assert sum(lengths.values()) == requests["response_tokens"][requests["trained"]].sum()


@pytest.mark.xdist_group("sorted-unreliable")
def test_slow_tools_dead_workers_and_canned_answers(tmp_path):
    """Each prompt is trained once all the same, no step waits for what does not come, and nothing old is trained; with
    SortedRL's load, whose batches can pass by a tool that hangs."""
    agent = "actor_rollout_ref.rollout.agent"
    overrides = (
        f"{agent}.agent_loop_config_path={ROOT / 'tests' / 'e2e' / 'unreliable_loop.yaml'}",
        f"{agent}.default_agent_loop=unreliable",
    )
    settings = {"RHYME": "sorted", "MODEL": "llama", **whole_run.importing("quick_stops")}
    steps, requests = run(tmp_path, *overrides, *MEGATRON, epochs=1, timeout=500, **settings)
    assert len(steps) == STEPS_AN_EPOCH
    assert all("actor/kl_loss" in metrics for metrics in steps)
    assert all(metrics["training/rollout_probs_diff_max"] < 0.02 for metrics in steps), "of another support"
    assert any(key.startswith("val-") for key in steps[-1])
    requests = {name: column[~requests["validate"]] for name, column in requests.items()}
    assert (tmp_path / "died").exists()
    assert sum(metrics["rollout/samples/abandoned_attempts"] for metrics in steps) > 0
    assert sum(metrics["rollout/prompts/dropped"] for metrics in steps) == 0
    assert sum(metrics["rollout/samples/failed_attempts"] for metrics in steps) >= PROMPTS // 4
    assert not any(metrics["rollout/history/errors"] for metrics in steps)
    check_on_policy(steps, requests)
    trained = requests["trained"]
    counts = np.unique(requests["prompt_key"][trained], return_counts=True)[1]
    # A canned answer took no request, nor did a sample without a trajectory; all else is there once.
    assert sorted(counts) == [SAMPLES - 1] * (PROMPTS // 2) + [SAMPLES] * (PROMPTS - PROMPTS // 2)
    samples = list(zip(requests["uid"][trained], requests["sample"][trained], strict=True))
    assert len(samples) == len(set(samples)), "a sample was trained twice"
    assert requests["sample"].max() < SAMPLES


@ONLY_SLOW
def test_two_ranks_and_two_replicas(tmp_path):
    overrides = (
        *("trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.max_num_seqs=3"),
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",  # a rank's share of the batch
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
    )
    steps, requests = run(tmp_path, *overrides, epochs=2)
    check_each_prompt_once(requests, epochs=2)
    check_on_policy(steps, requests)
    assert set(requests["replica"][requests["trained"]]) == {0, 1}
    assert sum(metrics["rollout/spec/reverified_tokens"] for metrics in steps) > 0


@ONLY_SLOW
def test_a_filtered_group_is_replaced(tmp_path):
    overrides = ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=reward")
    steps, requests = run(tmp_path, *overrides, epochs=1)
    assert len(steps) == STEPS_AN_EPOCH
    assert sum(metrics.get("training/filter_groups/evicted_samples", 0) for metrics in steps) > 0
    rewards = {}
    trained = requests["trained"]
    for uid, reward in zip(requests["uid"][trained], requests["reward"][trained], strict=True):
        rewards.setdefault(uid, set()).add(round(float(reward), 6))
    assert all(len(values) > 1 for values in rewards.values()), "a group without a signal was trained"
