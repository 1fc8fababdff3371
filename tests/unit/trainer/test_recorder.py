"""What becomes of requests and responses that are not trained."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from verl_rhyme.config import HistoryConfig
from verl_rhyme.history.keys import prompt_key
from verl_rhyme.history.store import HistoryReader
from verl_rhyme.observability import metrics
from verl_rhyme.trainer.base import RhymeTrainerMixin
from verl_rhyme.trainer.draft_counts import DraftCounts
from verl_rhyme.trainer.recorder import Recorder
from verl_rhyme.workers.history_writer import HistoryWriter


def test_errors_of_drafts_that_nobody_trained_are_counted_without_an_event_log():
    history = SimpleNamespace(restarts=0)
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


class Queue:
    """As much of TransferQueue as verl's buffer and our recorder use, in a dict."""

    def __init__(self):
        self.tags, self.data = {}, {}

    def put_group(self, prompt, uid, rewards, version=3):
        self.tags[uid] = {"is_prompt": True, "status": "finished", "global_steps": 1}
        for n, reward in enumerate(rewards):
            key, response = f"{uid}_{n}_0", torch.tensor([prompt, 100 + n, 7])
            self.tags[key] = {"status": "success", "response_len": 3, "seq_len": 5, "max_global_steps": version}
            self.data[key] = {
                "prompts": torch.tensor([prompt, prompt]),
                "responses": response,
                "rm_scores": torch.tensor([0.0, 0.0, reward]),
                "rollout_log_probs": torch.full((3,), -0.1),
                "extra_fields": {},
            }

    def kv_list(self):
        return {"train": {key: dict(tag) for key, tag in self.tags.items()}}

    def kv_clear(self, keys, partition_id):
        for key in keys:
            self.tags.pop(key, None)
            self.data.pop(key, None)

    def kv_batch_get(self, keys, partition_id, select_fields):
        rows = [self.data[key] for key in keys]
        return type("Rows", (dict,), {"__len__": lambda _: len(rows)})(
            {f: [row[f] for row in rows] for f in select_fields}
        )


@pytest.mark.parametrize("asynchronous", [False, True])
def test_groups_that_verls_buffer_drops_are_history_in_the_next_epoch(tmp_path, monkeypatch, asynchronous):
    """Filtered ones and surplus, by verl's own buffers, with the version that made them; each is cleared then."""
    from verl.trainer.ppo.v1 import replay_buffer

    queue = Queue()
    for module in (
        "verl.trainer.ppo.v1.replay_buffer",
        "verl_rhyme.workers.stored_samples",
        "verl_rhyme.trainer.recorder",
    ):
        monkeypatch.setattr(f"{module}.tq", queue)
    cls = replay_buffer.ReplayBufferAsync if asynchronous else replay_buffer.ReplayBuffer
    buffer = cls(
        *("sync", {}, None, "drop", {}),
        poll_interval=0.01,
        filter_groups_metric=replay_buffer.FILTER_GROUPS_REWARD_METRIC,
        refill_fn=lambda count: None,
        train_batch_size=1,
        gen_batch_size=1,
    )
    queue.put_group(1, "filtered", [1.0, 1.0])
    queue.put_group(2, "trained", [0.0, 1.0])
    queue.put_group(3, "zsurplus", [0.0, 1.0])
    queue.tags["zsurplus"]["global_steps"] = 2  # verl takes older ones first

    writer = HistoryWriter(str(tmp_path / "h"), "vocabulary", HistoryConfig(max_bytes=1 << 20), "run")
    history = SimpleNamespace(append=writer.append, rewards=writer.rewards, restarts=0)
    recorder = Recorder(history, None, lambda: 1, DraftCounts(dict))
    trainer = SimpleNamespace(replay_buffer=buffer, _recorder=recorder, _part=lambda: 1, _epoch=lambda: 0)
    RhymeTrainerMixin._watch_dropped(trainer)
    try:
        batch, told = buffer.sample(global_steps=1, partition_id="train", batch_size=1)
        assert sorted(batch.keys) == ["trained_0_0", "trained_1_0"]
        assert told["training/filter_groups/evicted_samples"] == 1
        recorder.start(batch, step=1, part=1, epoch=0)
        recorder.join()
        kept = recorder.take_metrics(rollout_s=1.0)
        dropped = {1} if asynchronous else {1, 3}  # the asynchronous buffer keeps what it did not take
        assert (kept["rollout/history/errors"], kept["rollout/history/untrained"]) == (0, 2 * len(dropped))
        reader = HistoryReader(tmp_path / "h", "vocabulary")
        for prompt in {2, *dropped}:
            found = reader.get(prompt_key([prompt, prompt]))
            assert [found.response(i).tolist() for i in range(2)] == [[prompt, 100, 7], [prompt, 101, 7]]
            assert found.policy_version.tolist() == [3, 3]
            assert found.confidence[1] > 128
        assert {key.split("_")[0] for key in queue.data} == {"trained"} | ({"zsurplus"} if asynchronous else set())
        assert np.isfinite(reader.get(prompt_key([1, 1])).reward).all()
        reader.close()
    finally:
        recorder.close()
        writer.close()
