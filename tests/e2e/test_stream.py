"""Training alongside rollout, as a user runs it: two replicas; parts of each batch pass before it is complete."""

import json
import subprocess
import sys

import numpy as np
import pytest
import whole_run
from whole_run import RHYME

from tests.conftest import ONLY_SLOW

pytestmark = [pytest.mark.timeout(1200), pytest.mark.whole_run, pytest.mark.alone]
PROMPTS, SAMPLES, BATCH, EPOCHS, LIMIT = 16, 3, 4, 2, 384  # a part of one group is padded
STEPS = EPOCHS * PROMPTS // BATCH
SMALL = (
    f"data.train_batch_size={BATCH}",
    f"actor_rollout_ref.rollout.n={SAMPLES}",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.max_num_seqs=6",
    "trainer.save_freq=-1",
)
#: Of two groups, each on its replica, whatever gets longer than expected moves, not only the last of its group.
MOVES = (f"+{RHYME}.placement.options.groups=2", f"+{RHYME}.placement.options.tail=1.0")
LORA = ("actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_alpha=32")


def run(folder, preset, staleness, *overrides, **env):
    """Summary, metrics of each step, requests, and rows of each trained sample in the order in which they ran. Each
    sample is trained once, and none is staler than allowed."""
    settings = {"epochs": EPOCHS, "RHYME": preset, "STALENESS": str(staleness), "REPLICAS": "2", **env}
    whole_run.finish(whole_run.start(folder, *SMALL, *overrides, **settings), folder)
    summary = json.loads((folder / "summary.json").read_text())
    steps = [metrics for _, metrics in whole_run.steps_of(folder)]
    assert len(steps) == STEPS
    for metrics in steps:
        assert metrics["training/rollout_actor_probs_pearson_corr"] > (0.95 if staleness else 0.999)
        assert metrics["training/staleness/tokens/max"] <= staleness
        assert "rollout/placement/errors" not in metrics
    requests = whole_run.requests_of(folder)
    trained = requests["trained"]
    late = requests["step"][trained] - 1 - requests["policy_version_start"][trained]
    assert 0 <= late.min() <= late.max() <= staleness
    assert summary["staleness_max"] <= staleness
    samples = {}
    for row in np.lexsort((requests["started_at"], requests["request"])):
        if trained[row]:
            samples.setdefault((requests["uid"][row], requests["sample"][row]), []).append(row)
    assert len(samples) == EPOCHS * PROMPTS * SAMPLES, "each sample is trained once"
    return summary, steps, requests, samples.values()


def check_moved(requests, samples):
    """What continues elsewhere, or under newer weights, keeps its budget. How many samples were on several replicas."""
    for rows in samples:
        assert requests["response_tokens"][rows].sum() <= LIMIT
        assert (np.diff(requests["policy_version_end"][rows]) >= 0).all()
        assert (requests["stop_reason"][rows[:-1]] == "aborted").all()
    return sum(len(set(requests["replica"][rows])) > 1 for rows in samples)


def test_all_parts_work_together(tmp_path):
    """Of each what it does is counted, in one run. Decoding takes its time: where the engines are ahead of the trainer,
    batches are whole before it asks for them. HistoPipe's placement is the one that moves samples: each moves once.
    The adapters must reach the engines: a difference of their weights ends the run.
    """
    placed = (f"{RHYME}.placement.policy=histopipe", *MOVES, *LORA)
    slow = whole_run.steady("100", "eager_moves")
    summary, steps, requests, samples = run(tmp_path, "full", 2, *placed, MODE="separate_async", **slow)
    assert summary["run"] == "full-k2-histopipe-groups_2-tail_1"
    assert summary["staleness_max"] >= 1
    assert 0.5 <= summary["staleness_mean"] <= 1.2, "about one version, with two batches in flight"

    def total(name):
        return sum(metrics.get(name, 0) for metrics in steps)

    assert steps[0]["rollout/prompts/loaded"] == 2 * BATCH, "two batches are in flight"
    assert total("rollout/prompts/waiting/max") > 0, "batches collect finished samples first"
    assert total("training/parts/early_share") > 0, "parts are trained while the rest is generated"
    assert total("rollout/spec/accepted_tokens") > 0, "drafts are accepted"
    assert all("rollout/weights/replicas_behind" in metrics for metrics in steps[1:]), (
        "replicas load weights themselves"
    )
    assert "are not compared" not in (tmp_path / "train.log").read_text(), "weights of the engines and the actor"
    trained = requests["trained"]
    late = requests["step"][trained] - 1 - requests["policy_version_start"][trained]
    assert {0, 1} <= {*late}, "what runs at a new version continues"
    assert {*requests["replica"]} == {0, 1}
    assert np.nanmin(requests["predicted_tokens"][trained]) >= 0, "lengths are predicted"
    assert sum(epoch["migrated"] for epoch in summary["epochs"]) > 0
    assert check_moved(requests, samples) > 0, "samples continue at another replica"


@ONLY_SLOW
@pytest.mark.parametrize(("preset", "staleness", "engine"), [("sorted", 0, "fsdp"), ("stream", 1, "megatron")])
def test_batches_are_trained_in_parts(tmp_path, preset, staleness, engine):
    mode = {"ENGINE": engine, "MODE": "separate_async"}
    summary, steps, requests, _ = run(tmp_path, preset, staleness, **mode)
    assert summary["run"] == preset
    assert all(metrics["training/parts/count"] >= 1 for metrics in steps)
    # Which groups are done first, and whether a group's rewards differ, is chance; in eight steps some do.
    assert sum(metrics["training/parts/early_share"] for metrics in steps) > 0
    assert max(metrics["training/parts/count"] for metrics in steps) > 1
    assert sum(metrics["actor/grad_norm"] for metrics in steps) > 0
    if not staleness:
        assert sum(metrics["rollout/spec/reverified_tokens"] for metrics in steps) > 0, "interrupted samples are drafts"
        trained = requests["trained"]
        np.testing.assert_array_equal(requests["policy_version_end"][trained], requests["step"][trained] - 1)


@ONLY_SLOW
def test_samples_are_placed_and_moved_between_colocated_engines(tmp_path):
    moves = whole_run.importing("eager_moves")
    summary, steps, requests, samples = run(tmp_path, "histopipe", 0, *MOVES, MODE="sync", **moves)
    assert summary["run"] == "histopipe-k0-groups_2-tail_1"
    assert all(-1 <= epoch["length_rank_correlation"] <= 1 for epoch in summary["epochs"])
    assert not any("rollout/weights/replicas_behind" in metrics for metrics in steps)
    trained = requests["trained"]
    assert set(requests["replica"][trained]) == {0, 1}
    assert np.nanmin(requests["predicted_tokens"][trained]) >= 0
    # A weight sync interrupts nothing, so what was elsewhere was moved.
    assert (requests["policy_version_start"] == requests["policy_version_end"]).all()
    assert 0 < check_moved(requests, samples) <= sum(epoch["migrated"] for epoch in summary["epochs"])


@ONLY_SLOW
def test_a_ranker_trained_on_one_run_predicts_for_the_next(tmp_path):
    settings = {"epochs": 1, "PROMPTS": "48", "PEOPLE": "2 3 4 5", "RHYME": "stream", "REPLICAS": "2"}
    first, second = tmp_path / "first", tmp_path / "second"
    whole_run.finish(whole_run.start(first, *SMALL, f"{RHYME}.events.responses=true", **settings), first)
    train = ["ranker", "train", str(first), "--out", str(tmp_path / "ranker"), "--epochs", "2"]
    subprocess.run([sys.executable, "-m", "verl_rhyme.cli", *train], check=True, timeout=300)
    whole_run.finish(whole_run.start(second, *SMALL, f"{RHYME}.lengths.ranker={tmp_path}/ranker", **settings), second)
    steps = whole_run.steps_of(second)
    assert not any("rollout/lengths/ranker_failures" in metrics for _, metrics in steps)
    assert steps[-1][1]["rollout/lengths/ranked"] == 1
