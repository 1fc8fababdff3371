"""The writers of several Ray nodes on one machine, without Ray: each has its folder, below one base."""

import os
import signal
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import numpy as np
import pytest

from verl_rhyme.config import HistoryConfig
from verl_rhyme.history import share
from verl_rhyme.history.environment import HistoryError
from verl_rhyme.history.reader import HistoryReader
from verl_rhyme.history.record import Trajectory
from verl_rhyme.workers.history_writer import HistoryWriter, node_history_dir

KEY = b"k" * 16
NODES = ("a" * 16, "b" * 16)
WRITE = """
import sys, time
import numpy as np
from verl_rhyme.config import HistoryConfig
from verl_rhyme.history.record import Trajectory
from verl_rhyme.workers.history_writer import HistoryWriter
for folder in sys.argv[2:]:
    writer = HistoryWriter(folder, set(sys.argv[2:]), "vocabulary", HistoryConfig(max_bytes=1 << 20), sys.argv[1])
    writer.open()
    writer.record([[Trajectory(b"k" * 16, np.array([5, 6], np.int32), 1.0, 0, 0, 0)]], 1)
    globals()[folder] = writer
print("ready", flush=True)
time.sleep(600)
"""


def writer(base, node, run="first", living=NODES):
    living = {node_history_dir(str(base), name) for name in living}
    return HistoryWriter(node_history_dir(str(base), node), living, "vocabulary", HistoryConfig(max_bytes=1 << 20), run)


def record(opened, token, step=1):
    return opened.record([[Trajectory(KEY, np.array([token], np.int32), 1.0, 0, 0, 0)]], step)


def tokens(base, node):
    reader = HistoryReader(node_history_dir(str(base), node), "vocabulary")
    history = reader.get(KEY)
    reader.close()
    return None if history is None else history.response(0).tolist()


@pytest.fixture
def killed(tmp_path):
    """Folders of both nodes, whose writers, of the run "first", were killed."""
    folders = [node_history_dir(str(tmp_path), node) for node in NODES]
    command = [sys.executable, "-c", textwrap.dedent(WRITE), "first", *folders]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    return tmp_path


def test_two_nodes_on_one_machine_leave_each_other_alone(tmp_path):
    writers = [writer(tmp_path, node) for node in NODES]
    for token, opened in enumerate(writers):
        assert opened.open() == os.getpid()
        assert record(opened, token)["dropped"] == 0
    assert [tokens(tmp_path, node) for node in NODES] == [[0], [1]]
    writers[0].close()
    assert record(writers[1], 7, step=2)["responses"] == 2
    writers[1].close()
    assert not list(tmp_path.iterdir())


def test_a_writer_started_anew_leaves_its_runs_other_dead_ones_to_their_nodes(killed):
    """Whatever killed one may have killed them all; each is started anew on its own time."""
    opened = [writer(killed, node) for node in NODES]
    for one in opened:
        one.open()
        assert [tokens(killed, node) for node in NODES] == [[5, 6], [5, 6]]
    for one in opened:
        one.close()


@pytest.mark.parametrize(("node", "run"), [("a" * 16, "first"), ("c" * 16, "second")])
def test_what_dead_writers_left_is_deleted_where_their_nodes_are_gone(killed, node, run):
    opened = writer(killed, node, run, living=[node])
    opened.open()
    assert [path.name for path in killed.iterdir()] == [node]
    opened.close()


def test_a_snapshot_that_comes_in_pieces_is_restored_and_leaves_nothing(tmp_path):
    first, second = (writer(tmp_path, node) for node in NODES)
    record(first, 3)
    first.snapshot(str(tmp_path / "snapshot"))
    for file in (tmp_path / "snapshot").iterdir():
        content = file.read_bytes()
        for start in range(0, len(content), 5000):
            second.receive(file.name, content[start : start + 5000], start == 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == [*NODES, "snapshot"]
    assert second.restore_received()["responses"] == 1
    assert tokens(tmp_path, NODES[1]) == [3]
    first.close()
    second.close()
    assert [path.name for path in tmp_path.iterdir()] == ["snapshot"]


@pytest.mark.parametrize(("disk", "memory"), [(1 << 30, 8 << 30), (8 << 30, 1 << 30)], ids=["disk", "memory"])
def test_nodes_that_share_disk_and_memory_share_one_half_of_them(tmp_path, monkeypatch, disk, memory):
    """Also when one starts anew after others have filled theirs: its bound stays."""
    monkeypatch.setattr(share.shutil, "disk_usage", lambda folder: SimpleNamespace(free=disk))
    monkeypatch.setattr(share, "available_memory", lambda: memory)
    living = {node_history_dir(str(tmp_path), f"node{i}") for i in range(4)}
    made = [HistoryWriter(folder, living, "vocabulary", HistoryConfig(), "run") for folder in sorted(living)]
    try:
        for writer in made:
            writer.open()
        assert all("shared by 4" in writer.settle() for writer in made)
        bounds = [writer._store._map_size for writer in made]
        assert bounds == pytest.approx([(1 << 29) // 4] * 4, rel=1e-2)
        text = np.arange(20_000, dtype=np.int32)
        made[0].record([[Trajectory(bytes([i]) * 16, text, 1.0, 0, 0, 0) for i in range(16)]], 1)
        kept = made[0]._store.stats()
        os.close(made[0]._store._lock)  # it dies
        monkeypatch.setattr(share, "available_memory", lambda: 0)  # engines and trainer have it
        again = made[0] = HistoryWriter(str(made[0]._folder), living, "vocabulary", HistoryConfig(), "run")
        assert again.settle() == ""
        assert again._store._map_size == bounds[0]
        assert again._store.stats() == kept, "its history fits as before"
        alone = HistoryWriter(str(tmp_path / "elsewhere" / "x"), set(), "vocabulary", HistoryConfig(), "run")
        made.append(alone)
        assert "shared by 1" in alone.settle()
    finally:
        for writer in made:
            writer.close()


@pytest.fixture
def shared(tmp_path):
    """The user's folder in a place that runs and users share."""
    return tmp_path / f"verl_rhyme-{os.getuid()}"


def left_by_a_killed_run(base):
    folder = node_history_dir(str(base), NODES[0])
    command = [sys.executable, "-c", textwrap.dedent(WRITE), "killed", folder]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGKILL)


def test_what_this_users_killed_runs_left_on_the_node_goes(shared):
    """Whatever checkpoint folder they had: on a preempting cluster it may never be used again here."""
    left_by_a_killed_run(shared / "killed")
    opened = writer(shared / "mine", NODES[0])
    opened.open()
    assert [path.name for path in shared.iterdir()] == ["mine"]
    opened.close()
    assert not list(shared.iterdir())


def test_a_run_whose_writer_alone_died_keeps_its_history(shared):
    """Its engines read on, and its next writer takes the folder over."""
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


def test_runs_of_a_folder_of_the_users_own_are_left_alone(tmp_path):
    """``history.dir`` may lie among anything."""
    left_by_a_killed_run(tmp_path / "other")
    opened = writer(tmp_path / "mine", NODES[0])
    opened.open()
    opened.close()
    assert tokens(tmp_path / "other", NODES[0]) == [5, 6]


def test_the_users_folder_is_private_all_the_way_and_no_link(shared, tmp_path):
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
