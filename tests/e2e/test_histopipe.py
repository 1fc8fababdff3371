"""HistoPipe's preset, as a user runs it: two replicas, samples placed, moved and trained once.

That samples move is in each day's run of all parts together (test_stream), too.
"""

import json

import numpy as np
import pytest
import whole_run

from tests.conftest import ONLY_SLOW
from verl_rhyme.observability import events

pytestmark = [ONLY_SLOW, pytest.mark.timeout(1200), pytest.mark.whole_run, pytest.mark.alone]
RHYME = "actor_rollout_ref.rollout.custom.rhyme"
#: Of two groups, each on its replica, whatever gets longer than expected moves, not only the last of its group.
MOVES = (f"+{RHYME}.placement.options.groups=2", f"+{RHYME}.placement.options.tail=1.0")
PROMPTS, SAMPLES, BATCH, LIMIT, EPOCHS = 16, 4, 4, 384, 2
SMALL = (
    f"data.train_batch_size={BATCH}",
    f"actor_rollout_ref.rollout.n={SAMPLES}",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.max_num_seqs=6",
    "trainer.save_freq=-1",
    *MOVES,
)


@pytest.mark.parametrize("mode", ["separate_async", "sync"])
def test_samples_are_placed_and_moved(tmp_path, mode):
    apart = mode == "separate_async"
    keep = [f"{RHYME}.scheduling.at_version=finish"] if apart else []
    run = {"epochs": EPOCHS, "RHYME": "histopipe", "REPLICAS": "2", "MODE": mode, "STALENESS": str(int(apart))}
    run |= whole_run.importing("eager_moves")
    whole_run.finish(whole_run.start(tmp_path, *SMALL, *keep, **run), tmp_path)
    staleness = int(apart)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["run"] == ("histopipe-finish" if apart else "histopipe-k0") + "-groups_2-tail_1"
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
    samples = attempts_of(requests)
    assert len(samples) == EPOCHS * PROMPTS * SAMPLES, "each sample is trained once"
    # A weight sync cuts nothing short: what was elsewhere was moved.
    assert 0 < check_moved(requests, samples) <= moved
    for rows in samples:
        assert requests["step"][rows[-1]] - 1 - requests["policy_version_start"][rows].min() <= staleness


def attempts_of(requests):
    """Rows of each sample that was trained, in the order in which they ran."""
    samples = {}
    for row in np.lexsort((requests["started_at"], requests["request"])):
        if requests["trained"][row]:
            samples.setdefault((requests["uid"][row], requests["sample"][row]), []).append(row)
    return list(samples.values())


def check_moved(requests, samples):
    """What goes on elsewhere, or under newer weights, keeps its budget. How many samples were on several replicas."""
    for rows in samples:
        assert requests["response_tokens"][rows].sum() <= LIMIT
        assert (np.diff(requests["policy_version_end"][rows]) >= 0).all()
        assert (requests["stop_reason"][rows[:-1]] == "aborted").all()
    return sum(len(set(requests["replica"][rows])) > 1 for rows in samples)
