"""Placement by forecasts, as a user runs it: two replicas, samples placed, moved and trained once."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import whole_run

from tests.conftest import ONLY_SLOW
from verl_rhyme.observability import events

pytestmark = [pytest.mark.timeout(1200), pytest.mark.whole_run, pytest.mark.alone]
HERE = str(Path(__file__).parent)
PATHS = [path for path in [os.environ.get("PYTHONPATH")] if path]
OPTIONS = "+actor_rollout_ref.rollout.custom.rhyme.placement.options"
PROMPTS, SAMPLES, BATCH, LIMIT, EPOCHS = 16, 4, 4, 384, 2
SMALL = (
    f"data.train_batch_size={BATCH}",
    f"actor_rollout_ref.rollout.n={SAMPLES}",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.max_num_seqs=6",
    f"{OPTIONS}.groups=2",
    f"{OPTIONS}.tail=1.0",  # whatever gets longer than expected moves, not only the last of its group
    "trainer.save_freq=-1",
)


@pytest.mark.parametrize("mode", ["separate_async", pytest.param("sync", marks=ONLY_SLOW)])
def test_samples_are_placed_and_moved(tmp_path, mode):
    eager = {"VERL_USE_EXTERNAL_MODULES": "eager_moves", "PYTHONPATH": os.pathsep.join([HERE, *PATHS])}
    apart = mode == "separate_async"
    keep = ["actor_rollout_ref.rollout.custom.rhyme.scheduling.at_version=finish"] if apart else []
    run = {"epochs": EPOCHS, "RHYME": "histopipe", "REPLICAS": "2", "MODE": mode, "STALENESS": str(int(apart)), **eager}
    whole_run.finish(whole_run.start(tmp_path, *SMALL, *keep, **run), tmp_path)
    staleness = int(apart)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["arm"] == ("histopipe-finish" if apart else "histopipe-k0") + "-groups_2-tail_1"
    assert all(-1 <= epoch["length_rank_correlation"] <= 1 for epoch in summary["epochs"])
    assert summary["staleness_max"] <= staleness
    moved = sum(epoch["migrated"] for epoch in summary["epochs"])
    steps = [metrics for _, metrics in whole_run.steps_of(tmp_path)]
    assert len(steps) == EPOCHS * PROMPTS // BATCH
    assert not any("rollout/placement/errors" in metrics for metrics in steps)
    assert all(("rollout/weights/replicas_behind" in metrics) == apart for metrics in steps[1:])
    for metrics in steps:  # what was moved included: its log-probs are those of its tokens
        assert metrics["training/rollout_actor_probs_pearson_corr"] > (0.95 if staleness else 0.999)

    requests = events.to_numpy(events.read_requests(tmp_path / "checkpoints" / "events"))
    trained = requests["trained"]
    assert set(requests["replica"][trained]) == {0, 1}
    assert np.nanmin(requests["predicted_tokens"][trained]) >= 0
    # A replica takes new weights when all is done that it began under the ones before.
    assert (requests["policy_version_start"] == requests["policy_version_end"]).all()
    samples = {}
    for row in np.lexsort((requests["started_at"], requests["attempt"])):
        if trained[row]:
            samples.setdefault((requests["uid"][row], requests["sample"][row]), []).append(row)
    assert len(samples) == EPOCHS * PROMPTS * SAMPLES, "each sample is trained once"
    been = [rows for rows in samples.values() if len(set(requests["replica"][rows])) > 1]
    assert 0 < len(been) <= moved  # a weight sync cuts nothing short: what was elsewhere was moved
    for rows in samples.values():
        assert requests["response_tokens"][rows].sum() <= LIMIT
        versions = requests["policy_version_end"][rows]
        assert (np.diff(versions) >= 0).all()
        assert (requests["stop_reason"][rows[:-1]] == "aborted").all()
        assert requests["step"][rows[-1]] - 1 - requests["policy_version_start"][rows].min() <= staleness
