"""The history writer without Ray."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from verl_rhyme.config import HistoryConfig
from verl_rhyme.history.record import PromptHistory, Trajectory, version_of
from verl_rhyme.history_writer import history_writer
from verl_rhyme.history_writer.history_writer import HistoryWriter, node_history_dir

KEYS = [bytes([i]) * 16 for i in range(8)]


def trajectory(tokens, key=KEYS[0], sample=0, logprobs=None):
    return Trajectory(key, np.array(tokens, np.int32), 1.0, 0, 0, sample, logprobs)


@pytest.fixture
def sharing(tmp_path, monkeypatch):
    """A writer whose values are not put into Ray's store."""
    monkeypatch.setattr(history_writer.ray, "put", lambda value: value.copy())
    folder = node_history_dir(str(tmp_path), "a" * 16)
    opened = HistoryWriter(folder, "vocabulary", HistoryConfig(max_bytes=1 << 20), "run")
    yield opened
    opened.close()
    assert not list(tmp_path.iterdir())


def test_recording_has_a_lower_priority_than_rays_processes(sharing):
    """Ray starts its processes with a niceness of 15."""
    with ThreadPoolExecutor(1) as recording:
        recording.submit(sharing.lower_priority).result()
        assert recording.submit(os.getpriority, os.PRIO_PROCESS, 0).result() > 15


def test_only_changed_values_are_sent(sharing):
    key, other = KEYS[:2]
    assert sharing.values({key: b""}) == {key: None}, "it opens the store itself"
    sharing.record([[trajectory([3])]], 1)
    answers = sharing.values({key: b"", other: b""})
    assert PromptHistory.decode(answers[key]).response(0).tolist() == [3]
    assert answers[other] is None
    version = version_of(answers[key])
    assert sharing.values({key: version}) == {key: None}
    assert sharing.record([[trajectory([4])]], 2)["sent_bytes"] == len(answers[key])
    later = sharing.values({key: version})[key]
    assert [PromptHistory.decode(later).response(i).tolist() for i in range(2)] == [[3], [4]]
    sharing._store.clear()
    assert len(sharing.values({key: version_of(later)})[key]) == 0, "nothing is kept of it any more"


def test_answers_and_shared_values_are_bounded(sharing, monkeypatch):
    sharing.record([[trajectory(np.arange(2000) + i, key) for i, key in enumerate(KEYS)]], 1)
    size = len(sharing.values({KEYS[0]: b""})[KEYS[0]])
    monkeypatch.setattr(history_writer, "_ANSWER_BYTES", 2 * size)
    sharing._shared_bytes = 2 * size
    wanted = dict.fromkeys(KEYS, b"")
    found = {}
    while wanted:
        answers = sharing.values(wanted)
        assert 1 <= len(answers) <= 3
        assert len(sharing._shared) <= 2
        found |= answers
        wanted = {key: version for key, version in wanted.items() if key not in answers}
    assert [int(PromptHistory.decode(found[key]).response(0)[0]) for key in KEYS] == list(range(8))


def test_nats_are_counted_for_responses_with_log_probs(sharing):
    known = np.array([-0.5, -1.5, 0.0], np.float32)
    group = [trajectory(range(3), logprobs=known), trajectory(range(3), sample=1)]
    counts = sharing.record([group, [trajectory(range(3), KEYS[1], logprobs=2 * known)]], 1)
    assert (counts["sampled"], counts["nats"], counts["bad_logprobs"]) == (6, 6.0, 0)
    broken = np.array([-0.5, np.nan, -np.inf], np.float32)
    counts = sharing.record([[trajectory(range(3), KEYS[2], logprobs=broken)]], 2)
    assert (counts["sampled"], counts["nats"], counts["bad_logprobs"]) == (1, 0.5, 2)


def test_values_are_read_while_a_step_is_recorded(sharing):
    """Otherwise other nodes' engines would wait, for minutes if responses are long."""

    def pieces():
        yield [trajectory([1], KEYS[1])]
        with ThreadPoolExecutor(1) as reading:
            found.update(reading.submit(sharing.values, dict.fromkeys(KEYS[:2], b"")).result(20))

    found = {}
    sharing.record([[trajectory([3])]], 1)
    sharing.record(pieces(), 2)
    assert all(len(found[key]) > 0 for key in KEYS[:2])
