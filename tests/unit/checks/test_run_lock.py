"""One run at a time in a checkpoint folder, from its script to its training process."""

import errno
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from verl_rhyme.checks import run_lock
from verl_rhyme.config import ConfigError

HOLD = "import sys, pathlib, time; from verl_rhyme.checks import run_lock; run_lock.hold(pathlib.Path(sys.argv[1]))"


@pytest.fixture
def training(tmp_path):
    """Process that holds the lock as the training process of an own command does."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"{HOLD}; print('held', flush=True); time.sleep(600)", tmp_path], stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.wait()


def test_a_second_run_is_refused_until_the_first_has_ended(tmp_path, training):
    named = f"{tmp_path} is in use by process {training.pid} on {socket.gethostname()} since "
    assert run_lock.user(tmp_path).startswith(named)
    before = (tmp_path / "run.lock").read_bytes()
    with pytest.raises(ConfigError, match="end that run first, or set another folder") as refused:
        run_lock.take(tmp_path, os.getpid())
    assert str(refused.value).startswith(named)
    assert (tmp_path / "run.lock").read_bytes() == before
    training.send_signal(signal.SIGKILL)
    training.wait()
    assert run_lock.user(tmp_path) is None
    os.close(run_lock.take(tmp_path, os.getpid()))


def test_the_lock_of_a_machine_that_died_can_be_removed(tmp_path, training):
    """A file server may keep it for long."""
    file = tmp_path / "run.lock"
    assert str(file) not in run_lock.user(tmp_path), "its process is here"
    file.write_text(file.read_text().replace(socket.gethostname(), "node-7"))
    assert "If node-7 died or was cut off, the file server may keep its lock for long: once" in run_lock.user(tmp_path)
    assert run_lock.user(tmp_path).endswith(f"delete {file}")
    file.unlink()
    os.close(run_lock.take(tmp_path, os.getpid()))


SCRIPT = """
source "$0"; NAME=test
python -c 'import os, pathlib, sys; from verl_rhyme.checks import run_lock
os.close(run_lock.take(pathlib.Path(sys.argv[1]), os.getppid()))' "$1/checkpoints"
hold_lock "$1/checkpoints"
echo claimed; read -r
exec python -c "$2; print('training', flush=True); time.sleep(600)" "$1/checkpoints"
"""


def test_the_run_script_passes_its_lock_to_the_training(tmp_path):
    """The process that claims the folder ends before the training starts."""
    settings = run_lock.__file__.rpartition("/verl_rhyme/")[0] + "/recipes/settings.sh"
    process = subprocess.Popen(
        ["bash", "-c", SCRIPT, settings, tmp_path, HOLD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"},
    )
    try:
        for said in ("claimed\n", "training\n"):
            assert process.stdout.readline() == said
            assert f"process {process.pid} on" in run_lock.user(tmp_path / "checkpoints")
            with pytest.raises(ConfigError):
                run_lock.take(tmp_path / "checkpoints", os.getpid())
            if said == "claimed\n":
                late = f"source {settings}; NAME=late; hold_lock {tmp_path}/checkpoints"
                refused = subprocess.run(["bash", "-c", late], capture_output=True, text=True)
                told = f"late: {tmp_path}/checkpoints is in use by another start; set another RUN_DIR\n"
                assert (refused.returncode, refused.stderr) == (2, told)
                process.stdin.write("\n")
                process.stdin.flush()
    finally:
        process.kill()
        process.wait()
    deadline = time.monotonic() + 10
    while run_lock.user(tmp_path / "checkpoints") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert run_lock.user(tmp_path / "checkpoints") is None


def test_a_file_system_without_locks_is_reported(tmp_path, monkeypatch, capsys):
    def refuse(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_lock.fcntl, "flock", refuse)  # no such file system here
    os.close(run_lock.take(tmp_path, os.getpid()))
    assert "file system without locks (No locks available): a second run" in capsys.readouterr().err
    assert run_lock.user(tmp_path) is None


def test_an_inherited_lock_is_the_runs_own(tmp_path, monkeypatch):
    """The preflight of a run script's training must not warn of the script."""
    own = run_lock.take(tmp_path / "own", 123)
    assert "process 123 on" in run_lock.user(tmp_path / "own")
    monkeypatch.setenv(run_lock.VARIABLE, str(own))
    assert run_lock.user(tmp_path / "own") is None
    other = run_lock.take(tmp_path / "other", 123)
    assert "process 123 on" in run_lock.user(tmp_path / "other")
    os.close(own)
    os.close(other)
