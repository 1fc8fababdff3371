"""Start, watch, kill and read whole runs of ``recipes/run_tiny_cpu.sh``."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SLOW = pytest.mark.skipif(not os.environ.get("RHYME_SLOW"), reason="minutes of starts; set RHYME_SLOW=1")


def start(run_dir, *overrides, epochs, **env):
    return subprocess.Popen(
        ["bash", str(ROOT / "recipes" / "run_tiny_cpu.sh"), *overrides],
        env={**os.environ, "RUN_DIR": str(run_dir), "EPOCHS": str(epochs), "PROMPTS": "16", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process, run_dir, timeout=600):
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
        output += "\n(timed out)"
    log = run_dir / "train.log"
    tail = log.read_text(errors="replace")[-4000:] if log.exists() else ""
    assert process.returncode == 0, f"{output[-4000:]}\n--- train.log\n{tail}"
    return output


def steps_of(run_dir):
    """(step, metrics) in the order they were logged, over all files that resumes have left."""
    files = sorted(run_dir.glob("metrics*.jsonl"), key=lambda path: path.stat().st_mtime)
    return [(line["step"], line["data"]) for file in files for line in map(json.loads, file.read_text().splitlines())]


def wait_for_step(process, run_dir, step, timeout=500):
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and process.poll() is None:
        if any(found >= step for found, _ in steps_of(run_dir)):
            return
        time.sleep(0.2)
    raise AssertionError(f"no step {step}: {process.communicate(timeout=60)[0][-3000:]}")


def kill_all(process):
    """kill -9 of the whole run: everything that descends from the command, wherever it moved to."""
    import psutil

    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    sessions = {os.getsid(p.pid) for p in family if p.is_running()}
    for victim in psutil.process_iter(["pid"]):
        try:
            if os.getsid(victim.pid) in sessions or victim in family:
                victim.kill()
        except (ProcessLookupError, psutil.NoSuchProcess, PermissionError):
            continue
    process.wait(timeout=30)
