"""Supervised run with real processes, and its printed lines."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from verl_rhyme.observability import metrics as m
from verl_rhyme.observability import progress
from verl_rhyme.observability.progress import MetricsFollower, step_line
from verl_rhyme.observability.supervise import session_processes

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc"),
    pytest.mark.slow,  # most start the command
]

FULL = {
    m.EPOCH: 2,
    m.REWARD_MEAN: 0.41,
    m.GEN_S: 4.1,
    m.GEN_MS_PER_TOKEN: 4100 / 3512,
    m.SPEC_DRAFTED: 2000.0,
    m.SPEC_ACCEPTED: 1220.0,
    m.SPEC_VERIFY_STEPS: 920.0,
    m.HISTORY_HIT_RATE: 0.98,
    m.BUBBLE_RATIO: 0.22,
}


COLD = {m.SPEC_DRAFTED: 0.0, m.SPEC_ACCEPTED: 0.0, m.SPEC_VERIFY_STEPS: 9.0, m.SPEC_ACCEPT_LENGTH: 0.0}
TRAJECTORIES = {m.VERL_STALENESS_MEAN: 2.0, m.VERL_STALENESS_MAX: 4.0}
GROUPS = {m.STALENESS_MEAN: 0.96, m.STALENESS_MAX: 2.0}


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({m.REWARD_MEAN_AFTER_KL: 0.5, m.REWARD_MEAN: float("nan")}, "reward 0.50"),
        ({"val-core/knights/acc/mean@1": 0.25}, "validation knights/acc/mean@1 0.25"),
        ({m.SPEC_ACCEPT_LENGTH: 2.0, m.SPEC_ACCEPT_RATE: 0.5}, "2.0 tokens/step, 50% accepted"),
        (COLD, ""),
        ({m.HISTORY_LOST: 2.0}, "history lost 2 steps"),
        ({m.BUBBLE_RATIO: 0.2}, ""),
        ({**TRAJECTORIES, **GROUPS}, "staleness 1.0 (max 2)"),
        ({**GROUPS, m.STALENESS_MAX: 0.0, **TRAJECTORIES}, ""),
        (TRAJECTORIES, "staleness 2.0 (max 4)"),
        (
            {m.FILTERED_GROUPS: 40.0, m.FILTERED_SCORE: 0.25, m.FAILED_PROMPTS: 3.0},
            "40 groups dropped: equal scores (mean 0.25), 3 prompts failed",
        ),
        ({m.FILTERED_GROUPS: 1.0}, "1 group dropped: equal scores"),  # in verl's trainer modes
        ({m.FILTERED_GROUPS: 0.0, m.FAILED_PROMPTS: 0.0}, ""),
    ],
)
def test_a_line_leaves_out_what_is_missing(data: dict[str, float], line: str) -> None:
    assert step_line(3, data) == "step 3" + f" | {line}" * bool(line)


def test_a_whole_line() -> None:
    assert step_line(12, FULL, 24) == (
        "step 12/24 epoch 3 | reward 0.41 | 3 512 tokens in 4.1 s (857 tok/s) | "
        "2.3 tokens/step, 61% accepted, 98% with history | bubble 22%"
    )


def test_step_line_shows_a_low_yield_of_drafts_and_the_entropy() -> None:
    low = {**FULL, m.SPEC_ACCEPTED: 61.0, m.GEN_MS_PER_TOKEN: 1.0}  # of 4100 tokens
    share = "drafts yielded 1% of the tokens"
    assert f"98% with history, {share} |" in step_line(12, low)
    assert "nats" not in step_line(12, {**low, m.VERL_ENTROPY: 2.44}), "verl's may be per sequence"
    recorded = {**low, m.ENTROPY: 2.19}
    assert f"{share} at an entropy of 2.19 nats per token |" in step_line(12, recorded)
    for other in ({m.SPEC_ACCEPTED: 2000.0}, {m.SPEC_DRAFTED: 0.0, m.SPEC_ACCEPTED: 0.0}, {m.HISTORY_HIT_RATE: 0.0}):
        assert "drafts yielded" not in step_line(12, {**recorded, **other})


def test_follower_reads_whole_lines_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = MetricsFollower(path)
    assert follower.poll() == []
    path.write_text('{"step": 1, "data": {"a": 1}}\n{"step": 2, "da')
    assert follower.poll() == [(1, {"a": 1})]
    assert follower.poll() == []
    with path.open("a") as file:
        file.write('ta": {"a": 2}}\n')
    assert follower.poll() == [(2, {"a": 2})]
    path.write_text('{"step": 9, "data": {}}\n')  # verl's logger truncates the file
    assert follower.poll() == [(9, {})]


PRELUDE = """
import json, os, signal, subprocess, sys, time
def log(step, **data):
    with open(os.environ["VERL_FILE_LOGGER_PATH"], "a") as file:
        file.write(json.dumps({"step": step, "data": data}) + "\\n")
"""

#: A command with a child that ignores signals and has left the process group, like Ray's daemons.
STUBBORN = (
    PRELUDE
    + """
child = subprocess.Popen(
    [sys.executable, "-c", "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)];"
     "print('ready', flush=True); time.sleep(600)"],
    stdout=subprocess.PIPE, preexec_fn=os.setpgrp)
child.stdout.readline()
print("pids", os.getpid(), child.pid, flush=True)
"""
)

IMPATIENT = """
from verl_rhyme.observability import progress, supervise
supervise.LINGER_S = 1.0
raise SystemExit(progress.main())
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    running: list[subprocess.Popen[str]] = []

    def call(
        script: str, total: int = 2, hangup: Any = signal.SIG_DFL, inherits: tuple[int, ...] = ()
    ) -> subprocess.Popen[str]:
        files = ["--metrics", str(tmp_path / "run" / "metrics.jsonl"), "--log", str(tmp_path / "run" / "train.log")]
        command = [sys.executable, "-c", IMPATIENT, *files, "--total-steps", str(total)]
        command += ["--", sys.executable, "-c", script]
        before = signal.signal(signal.SIGHUP, hangup)  # inherited; the tests themselves may run under nohup
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        running.append(subprocess.Popen(command, pass_fds=inherits, **output))
        signal.signal(signal.SIGHUP, before)
        return running[-1]

    yield call
    for process in running:
        process.kill()
        process.wait()


def pids(run: Path) -> list[int]:
    """Wait for the process ids that STUBBORN prints to its log, and return them."""
    for _ in range(300):
        if (run / "train.log").exists():
            for line in (run / "train.log").read_text().splitlines():
                if line.startswith("pids "):
                    return [int(pid) for pid in line.split()[1:]]
        time.sleep(0.1)
    raise AssertionError("the command did not start")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def gone(processes: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(alive, processes))


def test_steps_are_printed_and_output_goes_to_the_log(start: Start, tmp_path: Path) -> None:
    script = f"{PRELUDE}\nprint('noise')\nfor step in (1, 2):\n  log(step, **{FULL!r})\n  time.sleep(0.5)"
    process = start(script)
    output, _ = process.communicate(timeout=60)
    lines = output.splitlines()
    assert process.returncode == 0
    assert lines[0] == f"starting verl, Ray and vLLM (about a minute); log: {tmp_path / 'run' / 'train.log'}"
    assert lines[1].startswith("step 1/2 epoch 3 | reward 0.41")
    assert lines[2].startswith("step 2/2 epoch 3 | reward 0.41")
    assert len(lines) == 3
    assert (tmp_path / "run" / "train.log").read_text() == "noise\n"


def test_a_bar_on_a_terminal(tmp_path: Path) -> None:
    out = io.StringIO()
    script = f"{PRELUDE}\nfor step in (1, 2): log(step, **{FULL!r}); time.sleep(0.5)"
    files, console = (tmp_path / "metrics.jsonl", tmp_path / "train.log"), Console(file=out, force_terminal=True)
    assert progress.run([sys.executable, "-c", script], *files, 2, console) == 0
    for shown in ("starting", "step 1/2 epoch 3 | reward 0.41", "1/2", "━"):
        assert shown in out.getvalue()


def test_failure_passes_status_and_shows_the_error_of_this_run(start: Start, tmp_path: Path) -> None:
    process = start("import sys; print('RuntimeError: of the first run'); sys.exit(7)")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 7
    assert "RuntimeError: of the first run" in output
    process = start("raise ValueError('batch size 3 is odd')")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "training failed (exit status 1)" in output
    assert "  ValueError: batch size 3 is odd" in output
    assert "first run" not in output


def test_steps_of_earlier_starts_are_not_shown_again(start: Start, tmp_path: Path) -> None:
    process = start(f"{PRELUDE}\nlog(1, a=1)")
    assert "step 1" in process.communicate(timeout=60)[0]
    process = start(f"{PRELUDE}\nlog(2, a=1)")
    output, _ = process.communicate(timeout=60)
    assert "step 2" in output
    assert "step 1" not in output
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


def test_the_command_inherits_the_lock_of_the_run_folder(start: Start, tmp_path: Path) -> None:
    """The run script passes its descriptor by number (``checks/run_lock.py``)."""
    with open(tmp_path / "run.lock", "w") as lock:
        process = start(f"import os; os.write({lock.fileno()}, b'held')", inherits=(lock.fileno(),))
        assert process.wait(60) == 0
    assert (tmp_path / "run.lock").read_text() == "held"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_the_whole_session(start: Start, tmp_path: Path, number: signal.Signals) -> None:
    process = start(STUBBORN + "time.sleep(600)")
    processes = pids(tmp_path / "run")
    assert set(processes) <= set(session_processes(processes[0]))
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert "training interrupted; the same command goes on from the last checkpoint" in output
    assert gone(processes, 1)
    assert session_processes(processes[0]) == []


def test_under_nohup_a_run_outlives_its_terminal(start: Start, tmp_path: Path) -> None:
    process = start(STUBBORN + "time.sleep(2); sys.exit(4)", hangup=signal.SIG_IGN)
    pids(tmp_path / "run")
    process.send_signal(signal.SIGHUP)
    assert process.wait(30) == 4


def test_interrupt_lets_the_command_clean_up(start: Start, tmp_path: Path) -> None:
    script = STUBBORN + "try: time.sleep(600)\nexcept KeyboardInterrupt: print('cleaned', flush=True); sys.exit(3)"
    process = start(script)
    pids(tmp_path / "run")
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 3
    assert "cleaned" in (tmp_path / "run" / "train.log").read_text()


def test_second_interrupt_kills(start: Start, tmp_path: Path) -> None:
    process = start(
        STUBBORN + "[signal.signal(n, signal.SIG_IGN) for n in (2, 15)]\nprint('deaf', flush=True)\ntime.sleep(600)"
    )
    processes = pids(tmp_path / "run")
    while "deaf" not in (tmp_path / "run" / "train.log").read_text():
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    time.sleep(1.0)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 128 + signal.SIGKILL
    assert gone(processes, 1)


def test_crash_leaves_no_process(start: Start, tmp_path: Path) -> None:
    process = start(STUBBORN + "os.kill(os.getpid(), 9)")
    processes = pids(tmp_path / "run")
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGKILL
    assert "out of memory?" in output
    assert gone(processes, 1)


def test_the_command_ends_when_its_supervisor_is_killed(start: Start, tmp_path: Path) -> None:
    process = start(PRELUDE + "print('pids', os.getpid(), flush=True); time.sleep(600)")
    processes = pids(tmp_path / "run")
    os.kill(process.pid, signal.SIGKILL)
    assert gone(processes, 5)


SHARED = (
    PRELUDE
    + """
from multiprocessing import shared_memory
block = shared_memory.SharedMemory(create=True, size=4096)
print("shared", block.name, flush=True)
print("pids", os.getpid(), flush=True)
signal.signal(2, signal.SIG_IGN)
time.sleep(600)
"""
)


def test_kill_leaves_no_shared_memory(start: Start, tmp_path: Path) -> None:
    process = start(SHARED)
    pids(tmp_path / "run")
    line = next(x for x in (tmp_path / "run" / "train.log").read_text().splitlines() if x.startswith("shared "))
    block = Path("/dev/shm") / line.split()[1]
    assert block.exists()
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 137
    assert not block.exists()
