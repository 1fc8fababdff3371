"""Training beside a stream of rollout, as a user runs it: parts of each batch go through before it is whole."""

import json

import numpy as np
import pytest
import whole_run
from whole_run import SLOW

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


@pytest.mark.parametrize(("stream_mode", "engine"), [("sync", "fsdp"), pytest.param("async", "megatron", marks=SLOW)])
def test_batches_are_trained_in_parts(tmp_path, stream_mode, engine):
    run = {"epochs": EPOCHS, "RHYME": "stream", "STREAM_MODE": stream_mode, "REPLICAS": "2", "ENGINE": engine}
    run["MODE"] = "separate_async"
    whole_run.finish(whole_run.start(tmp_path, *SMALL, **run), tmp_path)
    staleness = int(stream_mode == "async")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["arm"] == f"stream-{stream_mode}"
    assert max(epoch["staleness_max"] for epoch in summary["epochs"]) <= staleness
    steps = [metrics for _, metrics in whole_run.steps_of(tmp_path)]
    assert len(steps) == EPOCHS * PROMPTS // BATCH
    for metrics in steps:
        assert metrics["training/stream/parts"] >= 1
        assert metrics["training/rollout_actor_probs_pearson_corr"] > (0.95 if staleness else 0.999)
    # Which groups are done first, and whether a group's rewards differ, is chance; in eight steps some do.
    assert sum(metrics["training/stream/early_share"] for metrics in steps) > 0
    assert max(metrics["training/stream/parts"] for metrics in steps) > 1
    assert sum(metrics["actor/grad_norm"] for metrics in steps) > 0

    requests = events.to_numpy(events.read_requests(tmp_path / "checkpoints" / "events"))
    trained = requests["trained"]
    samples = {}
    for row in np.flatnonzero(trained):
        samples.setdefault((requests["uid"][row], requests["sample"][row]), []).append(row)
    assert len(samples) == EPOCHS * PROMPTS * SAMPLES, "each sample is trained once"
    late = requests["step"][trained] - 1 - requests["policy_version_start"][trained]
    assert late.min() >= 0
    assert late.max() <= staleness
