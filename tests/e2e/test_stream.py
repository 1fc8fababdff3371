"""Training beside a stream of rollout, as a user runs it: parts of each batch go through before it is whole."""

import json
import subprocess
import sys

import numpy as np
import pytest
import whole_run
from test_histopipe import MOVES, RHYME, attempts_of, check_moved

from tests.conftest import ONLY_SLOW
from verl_rhyme.observability import events

pytestmark = [pytest.mark.timeout(1200), pytest.mark.whole_run, pytest.mark.alone]
PROMPTS, SAMPLES, BATCH, EPOCHS = 16, 3, 4, 2  # a part of one group is padded
SMALL = (
    f"data.train_batch_size={BATCH}",
    f"actor_rollout_ref.rollout.n={SAMPLES}",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.max_num_seqs=6",
    "trainer.save_freq=-1",
)

LORA = ("actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_alpha=32")


@pytest.mark.parametrize(
    ("preset", "staleness", "engine"),
    [("sorted", 0, "fsdp"), ("stream", 1, "megatron")],
)
@ONLY_SLOW
def test_batches_are_trained_in_parts(tmp_path, preset, staleness, engine):
    run = {"epochs": EPOCHS, "RHYME": preset, "STALENESS": str(staleness), "REPLICAS": "2", "ENGINE": engine}
    run["MODE"] = "separate_async"
    whole_run.finish(whole_run.start(tmp_path, *SMALL, **run), tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["run"] == preset
    assert summary["staleness_max"] <= staleness
    steps = [metrics for _, metrics in whole_run.steps_of(tmp_path)]
    assert len(steps) == EPOCHS * PROMPTS // BATCH
    for metrics in steps:
        assert metrics["training/stream/parts"] >= 1
        assert metrics["training/rollout_actor_probs_pearson_corr"] > (0.95 if staleness else 0.999)
        assert metrics["training/staleness/tokens/max"] <= staleness
    # Which groups are done first, and whether a group's rewards differ, is chance; in eight steps some do.
    assert sum(metrics["training/stream/early_share"] for metrics in steps) > 0
    assert max(metrics["training/stream/parts"] for metrics in steps) > 1
    assert sum(metrics["actor/grad_norm"] for metrics in steps) > 0

    late, requests = trained_once(tmp_path)
    assert late.min() >= 0
    assert late.max() <= staleness
    if staleness:
        return
    assert sum(metrics["rollout/spec/reverified_tokens"] for metrics in steps) > 0, "what was cut short is drafted from"
    trained = requests["trained"]
    np.testing.assert_array_equal(requests["policy_version_end"][trained], requests["step"][trained] - 1)


def test_all_parts_work_together(tmp_path):
    """Of each what it does is counted, in one run. Decoding takes its time: where the engines are ahead of the trainer,
    batches are whole before it asks for them. HistoPipe's placement is the one that moves samples: each moves once.
    The adapters must reach the engines: a difference of their weights ends the run.
    """
    run = {"epochs": EPOCHS, "RHYME": "full", "STALENESS": "2", "MODE": "separate_async", "REPLICAS": "2"}
    run |= whole_run.steady("100", "eager_moves")
    placed = (f"{RHYME}.placement.policy=histopipe", *MOVES, *LORA)
    whole_run.finish(whole_run.start(tmp_path, *SMALL, *placed, **run), tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["run"] == "full-k2-histopipe-groups_2-tail_1"
    assert 1 <= summary["staleness_max"] <= 2
    assert 0.5 <= summary["staleness_mean"] <= 1.2, "about one version, with two batches in flight"
    steps = [metrics for _, metrics in whole_run.steps_of(tmp_path)]
    assert len(steps) == EPOCHS * PROMPTS // BATCH

    def total(name):
        return sum(metrics.get(name, 0) for metrics in steps)

    assert steps[0]["training/sorted/loaded_prompts"] == 2 * BATCH, "two batches are in flight"
    assert total("training/sorted/waiting/max") > 0, "updates take what is finished first"
    assert total("training/stream/early_share") > 0, "parts are trained while the rest is generated"
    assert total("rollout/spec/accepted_tokens") > 0, "drafts are accepted"
    assert total("rollout/placement/errors") == 0
    assert all("rollout/weights/replicas_behind" in metrics for metrics in steps[1:]), (
        "replicas take weights themselves"
    )
    assert all(metrics["training/rollout_actor_probs_pearson_corr"] > 0.95 for metrics in steps)
    assert "are not compared" not in (tmp_path / "train.log").read_text(), "weights of the engines and the actor"
    late, requests = trained_once(tmp_path)
    assert {0, 1} <= {*late} <= {0, 1, 2}, "what runs at a new version goes on, and nothing is older"
    assert {*requests["replica"]} == {0, 1}
    assert np.nanmin(requests["predicted_tokens"][requests["trained"]]) >= 0, "lengths are predicted"
    assert sum(epoch["migrated"] for epoch in summary["epochs"]) > 0
    assert check_moved(requests, attempts_of(requests)) > 0, "samples go on at another replica"


@ONLY_SLOW
def test_a_ranker_trained_on_one_run_predicts_for_the_next(tmp_path):
    run = {"epochs": 1, "PROMPTS": "48", "PEOPLE": "2 3 4 5", "RHYME": "stream", "REPLICAS": "2"}
    first, second = tmp_path / "first", tmp_path / "second"
    whole_run.finish(whole_run.start(first, *SMALL, f"{RHYME}.events.responses=true", **run), first)
    train = ["ranker", "train", str(first), "--out", str(tmp_path / "ranker"), "--epochs", "2"]
    subprocess.run([sys.executable, "-m", "verl_rhyme.cli", *train], check=True, timeout=300)
    whole_run.finish(whole_run.start(second, *SMALL, f"{RHYME}.lengths.ranker={tmp_path}/ranker", **run), second)
    steps = whole_run.steps_of(second)
    assert not any("rollout/lengths/ranker_failures" in metrics for _, metrics in steps)
    assert steps[-1][1]["rollout/lengths/ranked"] == 1


def trained_once(run_dir):
    """How many versions behind each trained request is, and all requests."""
    requests = events.to_numpy(events.read_requests(run_dir / "checkpoints" / "events"))
    trained = requests["trained"]
    samples = {(requests["uid"][row], requests["sample"][row]) for row in np.flatnonzero(trained)}
    assert len(samples) == EPOCHS * PROMPTS * SAMPLES, "each sample is trained once"
    return requests["step"][trained] - 1 - requests["policy_version_start"][trained], requests
