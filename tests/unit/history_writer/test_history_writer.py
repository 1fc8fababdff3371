"""History writers without Ray: each has its folder below one base."""

import os
import threading

import numpy as np
import pytest

from tests.unit.history.stores import kill, read
from verl_rhyme.config import HistoryConfig
from verl_rhyme.history.environment import HistoryError
from verl_rhyme.history.reader import HistoryReader
from verl_rhyme.history.record import PromptHistory, Trajectory, version_of
from verl_rhyme.history_writer import history_writer
from verl_rhyme.history_writer.history_writer import HistoryWriter, node_history_dir

KEYS = [bytes([i]) * 16 for i in range(8)]
NODES = ("a" * 16, "b" * 16)


def writer(base, node=NODES[0], run="first"):
    return HistoryWriter(node_history_dir(str(base), node), "vocabulary", HistoryConfig(max_bytes=1 << 20), run)


def trajectory(tokens, key=KEYS[0], sample=0, logprobs=None):
    return Trajectory(key, np.array(tokens, np.int32), 1.0, 0, 0, sample, logprobs)


def tokens(base, node=NODES[0]):
    return read(node_history_dir(str(base), node), int.from_bytes(KEYS[0], "big"), "vocabulary")


def test_two_writers_below_one_base_do_not_interfere(tmp_path):
    writers = [writer(tmp_path, node) for node in NODES]
    for token, opened in enumerate(writers):
        assert opened.open() == os.getpid()
        assert opened.record([[trajectory([token])]], 1)["dropped"] == 0
    assert [tokens(tmp_path, node) for node in NODES] == [[[0]], [[1]]]
    writers[0].close()
    assert writers[1].record([[trajectory([7])]], 2)["responses"] == 2
    writers[1].close()
    assert not list(tmp_path.iterdir())


def test_recording_has_a_lower_priority_than_rays_processes(tmp_path):
    """Ray starts its processes with a niceness of 15; only root may lower that."""
    found = []

    def recording():
        os.setpriority(os.PRIO_PROCESS, 0, 15)
        writer(tmp_path).lower_priority()
        found.append(os.getpriority(os.PRIO_PROCESS, 0))

    thread = threading.Thread(target=recording)
    thread.start()
    thread.join()
    assert found[0] > 15


@pytest.fixture
def shared(tmp_path):
    """The user's folder at a place that runs and users share."""
    return tmp_path / f"verl_rhyme-{os.getuid()}"


def left_by_a_killed_run(base):
    opened = writer(base, run="killed")
    opened.record([[trajectory([5, 6])]], 1)
    kill(opened._store)


def open_and_close(base):
    opened = writer(base)
    opened.open()
    found = sorted(path.name for path in base.parent.iterdir())
    opened.close()
    return found


def test_folders_of_killed_runs_are_removed_once_no_engine_reads_there(shared):
    """For any checkpoint folder: on a preempting cluster the same one may never be used again on this node."""
    left_by_a_killed_run(shared / "killed")
    left_by_a_killed_run(shared / "living")
    reader = HistoryReader(node_history_dir(str(shared / "living"), NODES[0]), "vocabulary")
    assert reader.get(KEYS[0]) is not None
    assert open_and_close(shared / "mine") == ["living", "mine"]
    assert tokens(shared / "living") == [[5, 6]]
    reader.close()
    assert open_and_close(shared / "mine") == ["mine"]
    assert not list(shared.iterdir())


def test_users_own_history_dir_is_not_cleaned(tmp_path):
    """``history.dir`` may contain other files."""
    left_by_a_killed_run(tmp_path / "other")
    open_and_close(tmp_path / "mine")
    assert tokens(tmp_path / "other") == [[5, 6]]


def test_users_folder_is_private_and_not_a_link(shared, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    shared.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(HistoryError, match=r"is a link.*history\.dir"):
        writer(shared / "mine").open()
    assert not list((tmp_path / "elsewhere").iterdir())
    shared.unlink()
    before = os.umask(0o022)
    try:
        opened = writer(shared / "mine")
        opened.open()
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (shared, shared / "mine")] == [0o700, 0o700]
    opened.close()


# ---- values fetched by other nodes ----


@pytest.fixture
def sharing(tmp_path, monkeypatch):
    """A writer whose values are not put into Ray's store."""
    monkeypatch.setattr(history_writer.ray, "put", lambda value: value.copy())
    opened = writer(tmp_path)
    yield opened
    opened.close()


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
    assert (counts["sampled"], counts["nats"]) == (6, 6.0)


def test_values_are_read_while_a_step_is_recorded(sharing):
    """Otherwise other nodes' engines would wait, for minutes if responses are long."""
    sharing.record([[trajectory([3])]], 1)
    inside, leave = threading.Event(), threading.Event()

    def pieces():
        yield [trajectory([1], KEYS[1])]
        inside.set()
        assert leave.wait(20)

    recording = threading.Thread(target=sharing.record, args=(pieces(), 2))
    recording.start()
    try:
        assert inside.wait(20)
        assert len(sharing.values(dict.fromkeys(KEYS[:2], b""))[KEYS[1]]) > 0
    finally:
        leave.set()
        recording.join()
