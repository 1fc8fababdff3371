"""History writers without Ray: each has its folder below one base."""

import os
import threading

import numpy as np
import pytest

from tests.unit.history.stores import kill
from verl_rhyme.config import HistoryConfig
from verl_rhyme.history.environment import HistoryError
from verl_rhyme.history.reader import HistoryReader
from verl_rhyme.history.record import PromptHistory, Trajectory, version_of
from verl_rhyme.history_writer import history_writer
from verl_rhyme.history_writer.history_writer import HistoryWriter, node_history_dir

KEY = b"k" * 16
NODES = ("a" * 16, "b" * 16)


def writer(base, node, run="first"):
    return HistoryWriter(node_history_dir(str(base), node), "vocabulary", HistoryConfig(max_bytes=1 << 20), run)


def record(opened, token, step=1):
    return opened.record([[Trajectory(KEY, np.array([token], np.int32), 1.0, 0, 0, 0)]], step)


def tokens(base, node):
    reader = HistoryReader(node_history_dir(str(base), node), "vocabulary")
    history = reader.get(KEY)
    reader.close()
    return None if history is None else history.response(0).tolist()


def test_two_writers_below_one_base_do_not_interfere(tmp_path):
    writers = [writer(tmp_path, node) for node in NODES]
    for token, opened in enumerate(writers):
        assert opened.open() == os.getpid()
        assert record(opened, token)["dropped"] == 0
    assert [tokens(tmp_path, node) for node in NODES] == [[0], [1]]
    writers[0].close()
    assert record(writers[1], 7, step=2)["responses"] == 2
    writers[1].close()
    assert not list(tmp_path.iterdir())


def test_recording_has_a_lower_priority_than_rays_processes(tmp_path):
    """Ray starts its processes with a niceness of 15; only root may lower that."""
    found = []

    def recording():
        os.setpriority(os.PRIO_PROCESS, 0, 15)
        writer(tmp_path, NODES[0]).lower_priority()
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
    opened = writer(base, NODES[0], "killed")
    opened.record([[Trajectory(KEY, np.array([5, 6], np.int32), 1.0, 0, 0, 0)]], 1)
    kill(opened._store)


def test_folders_of_killed_runs_are_removed(shared):
    """For any checkpoint folder: on a preempting cluster the same one may never be used again on this node."""
    left_by_a_killed_run(shared / "killed")
    opened = writer(shared / "mine", NODES[0])
    opened.open()
    assert [path.name for path in shared.iterdir()] == ["mine"]
    opened.close()
    assert not list(shared.iterdir())


def test_history_survives_the_death_of_its_writer(shared):
    """Its engines continue to read, and its next writer takes over the folder."""
    left_by_a_killed_run(shared / "living")
    reader = HistoryReader(node_history_dir(str(shared / "living"), NODES[0]), "vocabulary")
    assert reader.get(KEY) is not None
    opened = writer(shared / "mine", NODES[0])
    opened.open()
    assert tokens(shared / "living", NODES[0]) == [5, 6]
    opened.close()
    reader.close()
    opened = writer(shared / "mine", NODES[0])
    opened.open()
    assert [path.name for path in shared.iterdir()] == ["mine"]
    opened.close()


def test_users_own_history_dir_is_not_cleaned(tmp_path):
    """``history.dir`` may contain other files."""
    left_by_a_killed_run(tmp_path / "other")
    opened = writer(tmp_path / "mine", NODES[0])
    opened.open()
    opened.close()
    assert tokens(tmp_path / "other", NODES[0]) == [5, 6]


def test_users_folder_is_private_and_not_a_link(shared, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    shared.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(HistoryError, match=r"is a link.*history\.dir"):
        writer(shared / "mine", NODES[0]).open()
    assert not list((tmp_path / "elsewhere").iterdir())
    shared.unlink()
    before = os.umask(0o022)
    try:
        opened = writer(shared / "mine", NODES[0])
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
    opened = writer(tmp_path, NODES[0])
    yield opened
    opened.close()


def test_only_changed_values_are_sent(sharing):
    assert sharing.values({KEY: b""}) == {KEY: None}, "it opens the store itself"
    record(sharing, 3)
    answers = sharing.values({KEY: b"", b"other" + bytes(11): b""})
    assert PromptHistory.decode(answers[KEY]).response(0).tolist() == [3]
    assert answers[b"other" + bytes(11)] is None
    version = version_of(answers[KEY])
    assert sharing.values({KEY: version}) == {KEY: None}
    stats = record(sharing, 4, step=2)
    assert stats["sent_bytes"] == len(answers[KEY])
    later = sharing.values({KEY: version})[KEY]
    assert [PromptHistory.decode(later).response(i).tolist() for i in range(2)] == [[3], [4]]
    sharing._store.clear()
    assert len(sharing.values({KEY: version_of(later)})[KEY]) == 0, "nothing is kept of it any more"


def test_answers_and_shared_values_are_bounded(sharing, monkeypatch):
    keys = [bytes([i]) * 16 for i in range(8)]
    text = np.arange(2000, dtype=np.int32)
    sharing.record([[Trajectory(key, text + i, 1.0, 0, 0, 0) for i, key in enumerate(keys)]], 1)
    size = len(sharing.values({keys[0]: b""})[keys[0]])
    monkeypatch.setattr(history_writer, "_ANSWER_BYTES", 2 * size)
    sharing._shared_bytes = 2 * size
    wanted = dict.fromkeys(keys, b"")
    found = {}
    while wanted:
        answers = sharing.values(wanted)
        assert 1 <= len(answers) <= 3
        assert len(sharing._shared) <= 2
        found |= answers
        wanted = {key: version for key, version in wanted.items() if key not in answers}
    assert [int(PromptHistory.decode(found[key]).response(0)[0]) for key in keys] == list(range(8))


def test_nats_are_counted_for_responses_with_log_probs(sharing):
    text = np.arange(3, dtype=np.int32)
    known = np.array([-0.5, -1.5, 0.0], np.float32)
    group = [Trajectory(KEY, text, 1.0, 0, 0, 0, known), Trajectory(KEY, text, 1.0, 0, 0, 1, None)]
    other = [Trajectory(b"o" * 16, text, 1.0, 0, 0, 0, 2 * known)]
    counts = sharing.record([group, other], 1)
    assert (counts["sampled"], counts["nats"]) == (6, 6.0)


def test_values_are_read_while_a_step_is_recorded(sharing, monkeypatch):
    """Otherwise other nodes' engines would wait, for minutes if responses are long."""
    record(sharing, 3)
    inside, leave = threading.Event(), threading.Event()

    def pieces():
        yield [Trajectory(b"o" * 16, np.array([1], np.int32), 1.0, 0, 1, 0)]
        inside.set()
        assert leave.wait(20)

    recording = threading.Thread(target=sharing.record, args=(pieces(), 2))
    recording.start()
    try:
        assert inside.wait(20)
        assert len(sharing.values({KEY: b"", b"o" * 16: b""})[b"o" * 16]) > 0
    finally:
        leave.set()
        recording.join()
