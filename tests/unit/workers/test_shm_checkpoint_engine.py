"""Weights in shared memory: what a killed actor left goes, what a live one is sending stays."""

import os
import signal
import subprocess
import sys

import pytest

from verl_rhyme.workers import shm_checkpoint_engine as shm

SENDER = """
import sys, time
from pathlib import Path
from verl_rhyme.workers import shm_checkpoint_engine as shm
shm._FOLDER = Path(sys.argv[1])
path = Path(shm.ShmCheckpointEngine(1, is_master=True).prepare()["path"])
path.write_bytes(b"weights")
print(path, flush=True)
time.sleep(600)
"""


@pytest.fixture
def sender(tmp_path, monkeypatch):
    monkeypatch.setattr(shm, "_FOLDER", tmp_path)
    process = subprocess.Popen([sys.executable, "-c", SENDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


def test_only_a_dead_actors_files_are_removed(tmp_path, sender):
    process, path = sender
    ours = shm.ShmCheckpointEngine(1, is_master=True)
    first = ours.prepare()["path"]
    assert os.path.exists(path), "a live actor's weights are gone"
    process.send_signal(signal.SIGKILL)
    process.wait()
    second = ours.prepare()["path"]
    assert [file.name for file in tmp_path.iterdir()] == [ours._lock.name]
    assert first != second
