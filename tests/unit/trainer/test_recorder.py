"""What requests cost whose samples were not trained."""

from types import SimpleNamespace

from verl_rhyme.observability import metrics
from verl_rhyme.trainer.draft_counts import DraftCounts
from verl_rhyme.trainer.recorder import Recorder


def test_errors_of_drafts_that_nobody_trained_are_counted_without_an_event_log():
    history = SimpleNamespace(errors=0, restarts=0)
    recorder = Recorder(history, None, lambda: 1, DraftCounts(dict))
    try:
        rows = [{"id": name, "uid": "u", "draft_errors": 2, "draft_seconds": 0.5} for name in "ab"]
        recorder.log_untrained(rows, step=1, epoch=0)
        recorder.join()
        told = recorder.take_metrics(rollout_s=1.0)
        assert (told[metrics.SPEC_ERRORS], told[metrics.SPEC_DRAFT_S]) == (4, 1.0)
        assert metrics.SPEC_ERRORS not in recorder.take_metrics(rollout_s=1.0), "counted once"
    finally:
        recorder.close()
