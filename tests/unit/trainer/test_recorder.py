"""Recording of trained and untrained samples."""

import errno
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import lmdb
import numpy as np
import pytest
import torch
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import replay_buffer

from tests.conftest import examples
from verl_rhyme.config import HistoryConfig
from verl_rhyme.drafting.policy import SOURCES
from verl_rhyme.history import environment, history_folder
from verl_rhyme.history.environment import Environment, HistoryError
from verl_rhyme.history.keys import prompt_key, visit_label
from verl_rhyme.history.reader import HistoryReader
from verl_rhyme.history.store import HistoryStore
from verl_rhyme.history.values import Values
from verl_rhyme.history_writer.history_service import HistoryUnavailable
from verl_rhyme.history_writer.history_writer import HistoryWriter
from verl_rhyme.observability import events, metrics
from verl_rhyme.observability.events import REQUESTS
from verl_rhyme.processes.messages import Handover, Part
from verl_rhyme.processes.request import FIELD
from verl_rhyme.trainer.base import RhymeTrainerMixin
from verl_rhyme.trainer.draft_counts import DraftCounts
from verl_rhyme.trainer.observers import Step
from verl_rhyme.trainer.recorder import MAX_LAG, Recorder, _Samples


def ended(recorder):
    return recorder.on_step(Step(1, 1.0, 1.0))


def test_errors_are_counted_and_the_first_is_logged(caplog):
    recorder = Recorder(SimpleNamespace(restarts=0), None, lambda: 1, DraftCounts(dict))
    for _ in range(2):
        recorder.start(None, step=1, part=1, epoch=0)
    measured = ended(recorder)
    assert (measured[metrics.HISTORY_ERRORS], measured[metrics.HISTORY_LOST]) == (2, 2)
    assert caplog.text.count("recording failed") == 1
    recorder.close()


class Queue:
    """The part of TransferQueue that verl's buffer and the recorder use, in a dict."""

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
                "response_mask": torch.ones(3),
                "extra_fields": {},
            }

    def batch(self, *keys):
        """Of these keys, or of all."""
        keys = list(keys or self.data)
        return KVBatchMeta(partition_id="train", keys=keys, tags=[self.tags[key] for key in keys])

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


class Slow:
    """A local history whose writer records only as many pieces as permitted."""

    restarts = 0

    def __init__(self, folder, permits=0, epochs=4):
        config = HistoryConfig(max_bytes=1 << 22, epochs=epochs)
        self.writer = HistoryWriter(str(folder), "vocabulary", config, "run")
        self.permits = threading.Semaphore(permits)

    def append(self, batch, step):
        assert self.permits.acquire(timeout=60)
        return self.writer.append(batch, step)

    def fetch(self, piece):
        self.writer.fetch(piece)

    def rewards(self, stored):
        return self.writer.rewards(stored)

    def snapshot(self, checkpoint):
        self.writer.snapshot(f"{checkpoint}/history")

    def restore(self, checkpoint):
        return self.writer.restore(f"{checkpoint}/history")


PROMPTS = 9


def install(monkeypatch, *modules):
    """Return a queue that the modules use in place of TransferQueue."""
    queue = Queue()
    for module in ("verl_rhyme.processes.stored_samples", "verl_rhyme.trainer.recorder", *modules):
        monkeypatch.setattr(f"{module}.tq", queue)
    return queue


@pytest.fixture
def slow(tmp_path, monkeypatch):
    """A recorder, its queue, and its history, which gets the samples of each prompt as one piece."""
    queue, history = install(monkeypatch), Slow(tmp_path / "h")
    monkeypatch.setattr("verl_rhyme.processes.stored_samples.PIECE_BYTES", 1)
    recorder = Recorder(history, None, lambda: 1, DraftCounts(dict))
    yield recorder, queue, history
    history.permits.release(1000)
    recorder.close()
    history.writer.close()


def step_of(recorder, queue, history, step):
    """Train groups of two and clear them while one piece of the history is recorded."""
    for prompt in range(PROMPTS):
        queue.put_group(prompt, f"u{step}p{prompt}", [0.0, 1.0])
    batch = queue.batch()
    recorder.start(batch, step=step, part=step, epoch=step)
    history.permits.release()
    recorder.join()
    queue.kv_clear(batch.keys, "train")
    return ended(recorder)


def read(folder, prompt):
    reader = HistoryReader(folder / "h", "vocabulary")
    found = reader.get(prompt_key([prompt, prompt]))
    reader.close()
    return found


def test_a_step_ends_before_the_history_has_its_samples(slow, tmp_path):
    recorder, queue, history = slow
    for step in (1, 2):
        measured = step_of(recorder, queue, history, step)
        assert measured["rollout/history/errors"] == 0
        assert measured.get("rollout/history/responses", 0) <= 2 * step
    history.permits.release(1000)
    recorder.drain()
    measured = ended(recorder)
    assert measured["rollout/history/responses"] == 4 * PROMPTS
    assert measured["rollout/entropy"] == pytest.approx(0.1), "counts earlier recordings"
    assert all(read(tmp_path, prompt).step.tolist() == [1, 1, 2, 2] for prompt in range(PROMPTS))
    assert not history.writer._fetched


def test_log_probabilities_that_are_no_numbers_are_counted_and_warned_of_once(slow, caplog):
    recorder, queue, history = slow
    history.permits.release(1000)
    for step, bad in enumerate([float("nan"), float("-inf")], start=1):
        queue.put_group(1, f"u{step}", [0.0, 1.0])
        queue.data[f"u{step}_0_0"]["rollout_log_probs"][1:] = bad
        recorder.start(queue.batch(f"u{step}_0_0", f"u{step}_1_0"), step=step, part=step, epoch=step)
        recorder.drain()
        measured = ended(recorder)
        assert (measured[metrics.BAD_LOGPROBS], measured[metrics.ENTROPY]) == (2, pytest.approx(0.1))
    assert ended(recorder)[metrics.BAD_LOGPROBS] == 0
    assert caplog.text.count("the engine sampled 2 tokens with a log-probability of NaN or infinity") == 1


def test_slow_recording_drops_whole_batches_and_warns_once(slow, caplog):
    recorder, queue, history = slow
    measured = [step_of(recorder, queue, history, step) for step in range(1, MAX_LAG + 4)]
    assert [metrics["rollout/history/errors"] for metrics in measured] == [0] * len(measured)
    dropped = [metrics.get("rollout/history/dropped", 0) for metrics in measured]
    assert dropped == [0] * (MAX_LAG + 1) + [2 * PROMPTS] * 2
    assert [metrics.get("rollout/history/lost_steps", 0) for metrics in measured] == [0] * (MAX_LAG + 1) + [1] * 2
    assert caplog.text.count("steps behind training") == 1
    history.permits.release(1000)
    recorder.drain()
    assert ended(recorder)["rollout/history/dropped"] == 0
    assert step_of(recorder, queue, history, 9)["rollout/history/dropped"] == 0, "recording has not caught up"


class Fault:
    """Makes calls of one function fail: the one after ``skipped`` others, or all from then on."""

    def __init__(self, error, skipped, always):
        self._error, self._left, self._always = error, skipped, always
        self.on = self.reached = False

    def wrap(self, real):
        def call(*arguments, **named):
            if self.on:
                self._left -= 1
                if self._left == -1 or (self._left < 0 and self._always):
                    self.reached = True
                    raise self._error
            return real(*arguments, **named)

        return call


ERRORS = [
    OSError(errno.EIO, "Input/output error"),
    HistoryError("another process writes the history"),
    lmdb.MapFullError("mdb_put: MDB_MAP_FULL"),
    MemoryError(),
    lmdb.DiskError("No space left on device"),
]
#: Every function by which the store reaches its folder, its own methods, and the calls of the writer.
SITES = [
    *((HistoryStore, name) for name in ("append", "snapshot", "restore", "stats")),
    (Environment, "namespace"),
    *((environment, name) for name in ("create", "acquire", "check", "current", "keep", "publish", "new_folder")),
    *((history_folder, name) for name in ("acquire", "keep", "_empty")),
    *((Values, name) for name in ("__init__", "put", "stored", "save_ledger", "evict_excess")),
    *((os, name) for name in ("replace", "fsync", "utime")),
    (shutil, "copyfile"),
    *((Path, name) for name in ("mkdir", "replace", "write_text", "touch")),
    *(("lmdb", name) for name in ("begin", "copy", "reader_check", "set_mapsize", "info")),
    *((Slow, name) for name in ("fetch", "append", "rewards", "snapshot", "restore")),
]


@pytest.mark.parametrize(("place", "name"), SITES, ids=[f"{getattr(p, '__name__', p)}.{name}" for p, name in SITES])
def test_no_fault_of_the_history_reaches_the_trainer_or_outlasts_itself(tmp_path, monkeypatch, place, name):
    """Each call fails once, and all calls fail for a while, as files are deleted.

    The recorder raises nothing, each step since then is in the history or reported as lost, and once the fault ends
    steps are recorded again.
    """
    cases = [(0, True), *((skipped, False) for skipped in range(examples(3, slow=40)))]
    for number, (skipped, always) in enumerate(cases):
        error = ERRORS[(SITES.index((place, name)) + number) % len(ERRORS)]
        fault = Fault(HistoryUnavailable("the writer died") if place is Slow else error, skipped, always)
        with monkeypatch.context() as patch:
            live_through(tmp_path / str(number), patch, fault, place, name)
        assert number or fault.reached
        if not fault.reached:
            break


def live_through(folder, patch, fault, place, name):
    if place == "lmdb":
        opened = environment.lmdb.open

        def faulty(*arguments, **named):
            made = Mock(wraps=opened(*arguments, **named))
            setattr(made, name, fault.wrap(getattr(made, name)))
            return made

        patch.setattr(environment.lmdb, "open", faulty)
    else:
        patch.setattr(place, name, fault.wrap(getattr(place, name)))
    queue, history = install(patch), Slow(folder / "h", permits=1000, epochs=9)
    patch.setattr("verl_rhyme.history.store._LOCK_TIMEOUT_S", 0.0)
    recorder = Recorder(history, None, lambda: 1, DraftCounts(dict))
    reader = HistoryReader(folder / "h", "vocabulary", refresh_interval=0.0)
    evicted = 0  # a map that stays full has no room for earlier steps

    def train(step):
        nonlocal evicted
        for prompt in range(2):
            queue.put_group(prompt, f"u{step}p{prompt}", [0.0, 1.0])
        batch = queue.batch()
        recorder.on_batch(batch, step, step)
        recorder.drain()
        queue.kv_clear(batch.keys, "train")
        measured = ended(recorder)
        evicted += measured.get(f"{metrics.HISTORY}/evicted", 0)
        failing, fault.on = fault.on, False
        found = read(folder, 0)
        fault.on = failing
        counted = evicted or measured.get(metrics.HISTORY_LOST, 0)
        assert counted or (found is not None and step in found.step), "a lost step is not counted"

    def recorded():
        found = [reader.get(prompt_key([prompt, prompt])) for prompt in range(2)]
        steps = [[] if each is None else each.step[::2].tolist() for each in found]
        assert steps[0] == steps[1], "a step is recorded whole or not at all"
        return steps[0]

    try:
        train(1)
        fault.on = True
        train(2)
        delete(folder / "h")
        train(3)
        recorder.save(str(folder / "global_step_3"))
        delete(folder / "h")
        recorder.load(str(folder / "global_step_3"))
        train(4)
        fault.on = False
        train(5)
        assert recorded()[-1] == 5
        assert recorded() == sorted(recorded())
        train(6)
        assert recorded()[-2:] == [5, 6]
        environments = [path for path in (folder / "h").iterdir() if path.name.startswith("env-")]
        assert len(environments) == 1, "no copies of a failed attempt remain"
    finally:
        fault.on = False
        recorder.close()
        reader.close()
        history.writer.close()
    assert not (folder / "h").exists()


def delete(folder, rmtree=shutil.rmtree):
    rmtree(folder, ignore_errors=True)


def test_end_of_run_does_not_wait_for_pending_recordings(slow):
    recorder, queue, history = slow
    step_of(recorder, queue, history, 1)
    threading.Timer(0.2, history.permits.release).start()
    recorder.close()
    assert history.writer.record([], 9)["responses"] <= 4


@pytest.mark.parametrize("asynchronous", [False, True])
def test_groups_dropped_by_verls_buffer_are_recorded_in_the_history(slow, tmp_path, monkeypatch, asynchronous):
    """Filtered groups and surplus are recorded with their policy version, and then cleared."""
    recorder, queue, history = slow
    history.permits.release(1000)
    monkeypatch.setattr("verl.trainer.ppo.v1.replay_buffer.tq", queue)
    buffer = (replay_buffer.ReplayBufferAsync if asynchronous else replay_buffer.ReplayBuffer)(
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
    queue.tags["zsurplus"]["global_steps"] = 2  # verl takes staler groups first
    request = {**dict.fromkeys(REQUESTS.names, 0), "node": "n", "stop_reason": "completed", "reason": "", "id": "r"}
    request |= {"draft_seconds": 0.5, "by_source": [[0, 0]] * len(SOURCES), "uid": "u"}
    for prompt, name, errors in ((1, "filtered_0_0", 2), (2, "trained_0_0", 1)):
        of = {"prompt_key": prompt_key([prompt, prompt]).hex(), "draft_errors": errors}
        queue.data[name]["extra_fields"] = {FIELD: [request | of]}
    trainer = SimpleNamespace(replay_buffer=buffer, _recorder=recorder, _part=lambda: 1, _epoch=lambda: 0)
    RhymeTrainerMixin._watch_dropped(trainer)
    batch, measured = buffer.sample(global_steps=1, partition_id="train", batch_size=1)
    assert sorted(batch.keys) == ["trained_0_0", "trained_1_0"]
    assert measured["training/filter_groups/evicted_samples"] == 1
    recorder.on_untrained(Handover({}, {}, Part([], []), [request | {"draft_errors": 4}]), step=1, epoch=0)
    recorder.on_batch(batch, step=1, epoch=0)
    recorder.drain()
    kept = ended(recorder)
    assert kept[metrics.SPEC_ERRORS] == 7, "draft counts of untrained samples are missing"
    assert metrics.SPEC_ERRORS not in ended(recorder), "counted once"
    dropped = {1} if asynchronous else {1, 3}  # the asynchronous buffer keeps what it did not take
    assert (kept["rollout/history/errors"], kept["rollout/history/untrained"]) == (0, 2 * len(dropped))
    for prompt in {2, *dropped}:
        found = read(tmp_path, prompt)
        assert [found.response(i).tolist() for i in range(2)] == [[prompt, 100, 7], [prompt, 101, 7]]
        assert found.policy_version.tolist() == [3, 3]
        assert found.confidence[1] > 128
        assert np.isfinite(found.reward).all()
    assert {key.split("_")[0] for key in queue.data} == {"trained"} | ({"zsurplus"} if asynchronous else set())


def test_the_history_and_the_entropy_are_of_the_policys_tokens(slow, tmp_path):
    """A tool's tokens are left out. Of a response that one request generated, no mask is fetched."""
    recorder, queue, history = slow
    queue.put_group(1, "a", [0.0, 1.0, 1.0])
    request = {**dict.fromkeys(REQUESTS.names, 0), "node": "n", "stop_reason": "completed", "reason": "", "id": "r"}
    request |= {"draft_seconds": 0.5, "by_source": [[0, 0]] * len(SOURCES), "prompt_key": prompt_key([1, 1]).hex()}
    said, mask = [5, 6, 7, 50, 51, 8, 9, 52], [1, 1, 1, 0, 0, 1, 1, 0]
    queue.tags["a_0_0"]["response_len"] = len(said)
    queue.data["a_0_0"] |= {
        "responses": torch.tensor(said),
        "response_mask": torch.tensor(mask),
        "rollout_log_probs": -0.1 * torch.tensor(mask),
        "rm_scores": torch.tensor([0.0] * 7 + [2.0]),
        "extra_fields": {FIELD: [request | {"response_tokens": tokens} for tokens in (3, 2)]},
    }
    queue.data["a_1_0"] |= {"response_mask": torch.zeros(3)}
    del queue.data["a_2_0"]["response_mask"]
    queue.data["a_2_0"]["extra_fields"] = {FIELD: [request | {"response_tokens": 3}]}
    history.permits.release(10)
    recorder.on_batch(queue.batch(), 1, 0)
    recorder.drain()
    measured = ended(recorder)
    found = read(tmp_path, 1)
    assert [found.response(i).tolist() for i in range(len(found))] == [[5, 6, 7, 8, 9], [1, 102, 7]]
    assert (found.sample.tolist(), found.reward.tolist()) == ([0, 2], [2.0, 1.0])
    assert (measured["rollout/history/responses"], measured["rollout/history/tokens"]) == (2, 8)
    assert measured["rollout/entropy"] == pytest.approx(0.1)


def test_the_log_of_responses_marks_tokens_that_the_policy_did_not_generate(tmp_path, monkeypatch):
    queue, history = install(monkeypatch), Slow(tmp_path / "h", permits=9)
    log = events.EventLog(tmp_path / "events")
    recorder = Recorder(history, log, lambda: 1, DraftCounts(dict), log_responses=True)
    queue.put_group(1, "a", [0.0])
    queue.data["a_0_0"]["response_mask"] = torch.tensor([1, 0, 1])
    recorder.on_batch(queue.batch(), 1, 0)
    recorder.drain()
    recorder.close()
    history.writer.close()
    (row,) = events.read_responses(log.folder).to_pylist()
    assert row["tokens"] == [1, 100, 7]
    assert row["logprobs"] == pytest.approx([-0.1, float("nan"), -0.1], nan_ok=True)


def test_sample_without_records_gets_the_key_of_its_group(monkeypatch):
    """Its agent loop kept no records; a group without any records gets the key of its token ids."""
    queue = install(monkeypatch)
    queue.put_group(1, "a", [0.0, 0.0])
    queue.put_group(2, "b", [0.0])
    queue.data["a_1_0"]["extra_fields"] = {FIELD: [{"prompt_key": "ab" * 16, "response_tokens": 3}]}
    batch = _Samples.of(queue.batch()).batch(np.zeros(3), epoch=0, logprobs=True)
    assert batch.prompts == [bytes.fromhex("ab" * 16)] * 2 + [prompt_key([2, 2])]
    assert batch.visits == [visit_label(uid) for uid in "aab"], "a group is one visit"
