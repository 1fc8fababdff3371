"""Owners of weight folders: a folder is removed only if its owner is dead, and never through a link."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import uuid

import pytest
from relay_world import let_go, same, write

from verl_rhyme.history import ownership
from verl_rhyme.weights import claims
from verl_rhyme.weights.claims import claim
from verl_rhyme.weights.folder import WeightsError

OWNER = """
import sys, time
from pathlib import Path
from verl_rhyme.weights.claims import claim
folder = claim(Path(sys.argv[1]))
(folder.path / "file").write_bytes(b"weights")
print(folder.path, flush=True)
time.sleep(600)
"""


def test_the_folder_is_private(tmp_path):
    folder = claim(tmp_path)
    write(folder, 1)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700


def test_a_dead_owners_folder_is_taken_over(tmp_path):
    left = claim(tmp_path)
    write(left, 1)
    assert claim(tmp_path, str(left.path)).path != left.path, "a live owner's folder is taken over"
    let_go(left)
    folder = claim(tmp_path, str(left.path))
    assert folder.path == left.path
    assert same(folder, 1)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_read_only_root_raises(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(WeightsError, match="Permission denied"):
        claim(tmp_path)


def test_only_folders_of_dead_owners_are_removed(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        theirs = process.stdout.readline().strip()
        claim(tmp_path)
        assert os.path.exists(theirs), "a live owner's weights are gone"
        process.send_signal(signal.SIGKILL)
        process.wait()
        claim(tmp_path)
        assert not os.path.exists(theirs)
    finally:
        process.kill()
        process.communicate()


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


@pytest.mark.parametrize("stem", ["", "0" * 31, "*", "g" * 32])
def test_only_names_made_by_claim_are_removed(tmp_path, stem):
    """Any user may make files in /dev/shm."""
    live = claim(tmp_path)
    write(live, 1)
    (tmp_path / f"verl_rhyme_weights_{stem}.lock").touch(0o666)
    other = tmp_path / f"verl_rhyme_weights_{stem}"
    other.mkdir()
    claim(tmp_path)
    assert same(live, 1)
    assert other.exists()


@pytest.mark.parametrize("signed", [{"host": "elsewhere", "boot": "another"}, None], ids=["another host", "unsigned"])
def test_folders_of_other_hosts_stay(tmp_path, signed):
    """On some network file systems locks do not reach other hosts, so that a live owner's lock can be taken."""
    theirs = claim(tmp_path)
    write(theirs, 1)
    lock = theirs.path.with_suffix(".lock")
    lock.write_text("" if signed is None else json.dumps({**json.loads(lock.read_text()), **signed}))
    let_go(theirs)
    claim(tmp_path)
    assert same(theirs, 1)


def test_links_are_not_followed(tmp_path):
    (tmp_path / "root").mkdir()
    target = tmp_path / "global_step_10"
    target.mkdir()
    left = claim(tmp_path / "root")
    let_go(left)
    left.path.rmdir()
    left.path.symlink_to(target)
    (tmp_path / "aim").write_bytes(left.path.with_suffix(".lock").read_bytes())
    linked = tmp_path / "root" / f"verl_rhyme_weights_{'a' * 32}"
    linked.mkdir()
    linked.with_suffix(".lock").symlink_to(tmp_path / "aim")
    claim(tmp_path / "root")
    assert target.is_dir()
    assert linked.is_dir(), "a folder with a linked lock is removed"


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give a file away")
@pytest.mark.parametrize("what", ["lock", "folder"])
def test_folders_of_other_users_stay(tmp_path, what):
    theirs = claim(tmp_path)
    write(theirs, 1)
    let_go(theirs)
    os.chown(theirs.path if what == "folder" else theirs.path.with_suffix(".lock"), 12345, -1)
    claim(tmp_path)
    assert same(theirs, 1)


def test_an_old_folder_that_cannot_be_removed_is_only_logged(tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr(claims.logger, "warning", lambda text, *of: lines.append(text % of))
    left = claim(tmp_path)
    let_go(left)

    def refused(path, *_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shutil, "rmtree", refused)
    assert claim(tmp_path).path.exists()
    assert any(line.startswith("cannot remove") and "Permission denied" in line for line in lines)
