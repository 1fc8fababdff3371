"""Owners of weight folders: a folder is removed only if its owner is dead, and never through a link."""

import json
import os
import shutil
import stat
import threading
import uuid

import pytest
from relay_world import let_go, same, write

from verl_rhyme.history import ownership
from verl_rhyme.weights import claims
from verl_rhyme.weights.claims import claim
from verl_rhyme.weights.folder import WeightsError


def test_a_dead_owners_folder_is_taken_over(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "_DYING_S", 0.1)
    left = claim(tmp_path)
    write(left, 1)
    assert stat.S_IMODE(left.path.stat().st_mode) == 0o700
    assert claim(tmp_path, str(left.path)).path != left.path, "a live owner's folder is taken over"
    let_go(left)
    folder = claim(tmp_path, str(left.path))
    assert folder.path == left.path
    assert same(folder, 1)


def test_an_unusable_root_raises(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(WeightsError, match="File exists"):
        claim(tmp_path / "file")


def test_only_folders_of_dead_owners_are_removed(tmp_path):
    theirs = claim(tmp_path)
    write(theirs, 1)
    claim(tmp_path)
    assert same(theirs, 1), "a live owner's weights are gone"
    let_go(theirs)
    claim(tmp_path)
    assert not theirs.path.exists()


def test_two_processes_that_start_at_once_do_not_disturb_each_other(tmp_path, monkeypatch):
    """One process inspects the other's lock file just before the other locks it."""
    name = uuid.UUID(int=1)
    monkeypatch.setattr("uuid.uuid4", lambda: name)
    file = tmp_path / f"verl_rhyme_weights_{name.hex}.lock"
    inspecting = ownership.lock(file, create=True)
    threading.Timer(0.1, os.close, [inspecting]).start()
    folder = claim(tmp_path)
    write(folder, 1)
    assert same(folder, 1)


ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root may give a file away")


@pytest.mark.parametrize(
    "change",
    [
        lambda folder, lock: lock.write_text(json.dumps({**json.loads(lock.read_text()), "host": "x", "boot": "y"})),
        lambda folder, lock: lock.write_text(""),
        pytest.param(lambda folder, lock: os.chown(folder, 12345, -1), marks=ROOT),
        pytest.param(lambda folder, lock: os.chown(lock, 12345, -1), marks=ROOT),
    ],
    ids=["another host", "unsigned", "another user's folder", "another user's lock"],
)
def test_folders_of_others_stay(tmp_path, change):
    """On some network file systems locks do not reach other hosts, so that a live owner's lock can be taken."""
    theirs = claim(tmp_path)
    write(theirs, 1)
    change(theirs.path, theirs.path.with_suffix(".lock"))
    let_go(theirs)
    claim(tmp_path)
    assert same(theirs, 1)


def test_links_are_not_followed(tmp_path):
    root, target = tmp_path / "root", tmp_path / "global_step_10"
    target.mkdir()
    left = claim(root)
    let_go(left)
    left.path.rmdir()
    left.path.symlink_to(target)
    (tmp_path / "aim").write_bytes(left.path.with_suffix(".lock").read_bytes())
    linked = root / f"verl_rhyme_weights_{'a' * 32}"
    linked.mkdir()
    linked.with_suffix(".lock").symlink_to(tmp_path / "aim")
    claim(root)
    assert target.is_dir()
    assert linked.is_dir(), "a folder with a linked lock is removed"


def test_an_old_folder_that_cannot_be_removed_is_only_logged(tmp_path, monkeypatch, caplog):
    let_go(claim(tmp_path))

    def refused(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shutil, "rmtree", refused)
    assert claim(tmp_path).path.exists()
    assert "cannot remove" in caplog.text
    assert "Permission denied" in caplog.text
