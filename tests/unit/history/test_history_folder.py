"""Ownership of history folders: no process writes to or deletes the folder of a writer that is or may be alive."""

import fcntl
import json
import os
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.unit.history.stores import NAMESPACE, failing, key, kill, open_store, read, responses, trajectory
from verl_rhyme.history import environment, history_folder, ownership
from verl_rhyme.history.environment import HistoryError
from verl_rhyme.history.ownership import Owner
from verl_rhyme.history.reader import HistoryReader

open_second = partial(open_store, run="second")


@pytest.fixture(autouse=True)
def short_wait(monkeypatch):
    monkeypatch.setattr("verl_rhyme.history.store._LOCK_TIMEOUT_S", 0.2)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "base" / "node"


@pytest.fixture
def writer(folder):
    """A store of run "first"."""
    with open_store(folder, run="first") as store:
        store.append([trajectory(1, [5, 6])], step=1)
        yield store


@pytest.fixture
def dead(writer):
    kill(writer)


def owned_by(folder, **changes):
    before = json.loads((folder / "owner.json").read_text())
    (folder / "owner.json").write_text(json.dumps({**before, **changes}))


@pytest.mark.parametrize("pid", [os.getpid(), 2**22 + 1], ids=["", "of another container"])
def test_a_second_run_fails_and_deletes_nothing_whatever_the_pid(tmp_path, folder, writer, pid):
    owned_by(folder, pid=pid)
    history_folder._remove_dead(tmp_path / "base", keep=tmp_path)
    with pytest.raises(HistoryError) as error:
        open_second(folder)
    for part in (str(folder), str(pid), os.uname().nodename, "first", "history.dir"):
        assert part in str(error.value)
    assert read(folder) == [[5, 6]]


def test_a_killed_writers_folder_is_removed_but_not_this_runs(tmp_path, folder, dead):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "link").symlink_to(folder)
    for base, keep in ((folder.parent, folder), (tmp_path / "other", tmp_path), (tmp_path / "mine", tmp_path)):
        history_folder._remove_dead(base, keep)
        assert read(folder) == [[5, 6]]
    owned_by(folder, pid=os.getpid())  # the pid is in use again, but the free lock shows that the writer is dead
    history_folder._remove_dead(folder.parent, keep=tmp_path)
    assert not list(folder.parent.iterdir())


def test_in_the_users_folder_all_killed_runs_go_once_no_engine_reads_there(tmp_path):
    """For any checkpoint folder: on a preempting cluster the same one may never be used again on this node."""
    shared = tmp_path / f"verl_rhyme-{os.getuid()}"
    for run in ("killed", "living"):
        store = open_store(shared / run / "node", run=run)
        store.append([trajectory(1, [5, 6])], step=1)
        kill(store)
    reader = HistoryReader(shared / "living" / "node", NAMESPACE)
    assert responses(reader.get(key(1))) == [[5, 6]]
    for left in (["living", "mine"], ["mine"]):
        store = open_second(shared / "mine" / "node")
        assert sorted(path.name for path in shared.iterdir()) == left
        store.close(delete=True)
        reader.close()
    assert not list(shared.iterdir())


def test_another_machines_folder_counts_as_alive(tmp_path, folder, dead):
    """Two machines share a file system, but not its locks."""
    owned_by(folder, host="elsewhere", boot="another")
    history_folder._remove_dead(tmp_path / "base", keep=tmp_path)
    with pytest.raises(HistoryError, match=r"elsewhere.*history\.dir.*owner\.json"):
        open_second(folder)
    assert read(folder) == [[5, 6]]
    (folder / "owner.json").unlink()  # the remedy in the message
    with open_second(folder):
        assert read(folder) is None


@pytest.mark.parametrize(("run", "boot", "found"), [("first", 0, [[5, 6]]), ("second", 0, None), ("second", 1, None)])
def test_a_dead_writers_history_is_kept_by_the_same_run_only(folder, dead, run, boot, found):
    if boot:
        owned_by(folder, boot="another")
    with open_store(folder, run=run) as store:
        assert read(folder) == found
        assert Owner.of(folder) == Owner(run, os.uname().nodename, Owner.here("").boot, os.getpid())
        assert store.append([trajectory(1, [7])], step=1).trajectories == 1
    assert Owner.of(folder) is None


def test_a_lock_on_a_deleted_folder_is_not_accepted(folder, writer):
    """A lock on a deleted file excludes no other process."""
    shutil.rmtree(folder)
    with open_second(folder) as second:
        second.append([trajectory(1, [7])], step=1)
        writer.close(delete=True)
        assert read(folder) == [[7]]
        with pytest.raises(HistoryError):
            open_store(folder, run="third")


def test_a_waiting_writer_gets_the_folder_after_its_complete_deletion(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds, sleep=time.sleep: sleep(seconds / 50))  # check more often
    folder = tmp_path / "h"
    ending = history_folder.acquire(folder, "first", 1)
    for number in range(300):
        (folder / f"env-{number:04d}").mkdir()
    with ThreadPoolExecutor(1) as waiting:
        next_one = waiting.submit(history_folder.acquire, folder, "second", 10)
        time.sleep(5.0)  # 0.1 s
        history_folder.release(folder, ending, delete=True)
        held = next_one.result()
    assert {file.name for file in folder.iterdir()} == {"in_use.lock", "owner.json", "writer.lock"}
    assert Owner.of(folder).run == "second"
    os.close(held)


def test_a_deletion_cut_short_is_completed_by_the_next_run(tmp_path, folder, writer, monkeypatch):
    with monkeypatch.context() as killed:
        killed.setattr(history_folder.shutil, "rmtree", failing(OSError("killed")))
        writer.close(delete=True)
    assert len(list(folder.parent.iterdir())) == 1
    with open_second(folder):
        assert [path.name for path in folder.parent.iterdir()] == ["node"]


@pytest.mark.parametrize("text", ['{"name": "somebody"}', "not json", "[]"])
def test_a_folder_that_is_no_history_is_never_deleted(tmp_path, text):
    """``history.dir`` may contain other folders."""
    other = tmp_path / "project"
    other.mkdir()
    (other / "owner.json").write_text(text)
    history_folder._remove_dead(tmp_path, keep=tmp_path / "node")
    assert [file.name for file in other.iterdir()] == ["owner.json"]


@pytest.mark.parametrize("below", ["", "run"], ids=["the folder", "the user's folder above"])
def test_a_link_instead_of_a_folder_is_refused_and_its_target_kept(tmp_path, below):
    """In a shared place any user may have created the link; it may point to a checkpoint folder of this user."""
    checkpoint = tmp_path / "checkpoints" / "global_step_10"
    checkpoint.mkdir(parents=True)
    link = tmp_path / f"verl_rhyme-{os.getuid()}"
    link.symlink_to(checkpoint.parent)
    with pytest.raises(HistoryError, match=r"verl_rhyme-\d+ is a link.*history\.dir"):
        open_second(link / below)
    assert [path.name for path in checkpoint.parent.iterdir()] == ["global_step_10"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give a file away")
def test_another_users_folder_is_refused_and_nothing_in_it_deleted(tmp_path):
    folder = tmp_path / "node"
    folder.mkdir()
    (folder / "theirs").touch()
    os.chown(folder, 12345, -1)
    with pytest.raises(HistoryError, match=r"node belongs to user 12345.*history\.dir"):
        open_second(folder)
    assert [path.name for path in folder.iterdir()] == ["theirs"]


def test_other_users_cannot_read_a_history(tmp_path):
    top, checkpoint = tmp_path / f"verl_rhyme-{os.getuid()}", tmp_path / "global_step_1"
    folders = [top, top / "run", top / "run" / "node", checkpoint / "history"]
    before = os.umask(0o022)
    try:
        folders[2].mkdir(parents=True)  # of an earlier version
        with open_second(folders[2]) as store:
            store.append([trajectory(1, [7])], step=1)
            store.snapshot(checkpoint / "history")
            store.restore(checkpoint / "history")
            data = [*top.rglob("*.mdb"), *checkpoint.rglob("*.mdb")]
            assert {path.name for path in data} == {"data.mdb", "lock.mdb"}
            assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}
            assert {path.stat().st_mode & 0o777 for path in data} == {0o600}
    finally:
        os.umask(before)


# ---- the choice of a folder ----


def test_a_folder_is_tried_before_the_run(tmp_path, monkeypatch):
    environment.probe(tmp_path / "not" / "there")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(HistoryError, match=r"Not a directory.*set history\.dir to a folder"):
            history_folder.check(place)
    monkeypatch.setattr(fcntl, "flock", failing(OSError("No locks available")))
    with pytest.raises(HistoryError, match=r"No locks available.*: set history.dir to a folder on a"):
        history_folder.check(tmp_path)


def only_in(disk, folder):
    if not folder.is_relative_to(disk):
        raise HistoryError(f"{folder} cannot hold a store")


def test_an_automatic_folder_is_one_that_works(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = ownership.user_folder(str(tmp_path))
    assert history_folder.place() == own
    assert history_folder.here(own / "run") == own / "run"
    own.symlink_to("/")
    with pytest.raises(HistoryError, match="is a link or belongs to another user"):
        history_folder.check(own / "run")
    assert history_folder.place().is_relative_to("/var/tmp")
    assert history_folder.here(own / "run") == history_folder.place() / "run", "of another node"
    assert history_folder.here(own) == own, "of history.dir"
    monkeypatch.setattr(history_folder, "check", partial(only_in, Path("/dev/shm")))
    assert history_folder.place().is_relative_to("/dev/shm"), "memory is the last choice"
    monkeypatch.setattr(history_folder, "check", partial(only_in, Path("/nowhere")))
    assert history_folder.place() == own
