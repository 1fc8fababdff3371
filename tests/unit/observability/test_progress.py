"""Supervised run with real processes, and its printed lines."""

from __future__ import annotations

import io
import json
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
from verl_rhyme.observability.errors import SHOWN_LINES, last_error
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


def test_step_line() -> None:
    assert step_line(12, FULL, 24) == (
        "step 12/24 epoch 3 | reward 0.41 | 3 512 tokens in 4.1 s (857 tok/s) | "
        "2.3 tokens/step, 61% accepted, 98% with history | bubble 22%"
    )


def test_step_line_leaves_out_what_is_missing() -> None:
    assert step_line(1, {m.EPOCH: 0, m.REWARD_MEAN_AFTER_KL: 0.5, m.REWARD_MEAN: float("nan")}) == (
        "step 1 epoch 1 | reward 0.50"
    )
    assert step_line(0, {"val-core/knights/acc/mean@1": 0.25}, 8) == "step 0/8 | validation knights/acc/mean@1 0.25"
    assert (
        step_line(3, {m.SPEC_ACCEPT_LENGTH: 2.0, m.SPEC_ACCEPT_RATE: 0.5}) == "step 3 | 2.0 tokens/step, 50% accepted"
    )
    cold = {m.SPEC_DRAFTED: 0.0, m.SPEC_ACCEPTED: 0.0, m.SPEC_VERIFY_STEPS: 9.0, m.SPEC_ACCEPT_LENGTH: 0.0}
    assert step_line(3, cold) == "step 3"
    assert step_line(3, {m.BUBBLE_RATIO: 0.2}) == "step 3"


def test_step_line_shows_staleness_of_off_policy_steps() -> None:
    trajectories = {m.VERL_STALENESS_MEAN: 2.0, m.VERL_STALENESS_MAX: 4.0}
    groups = {m.STALENESS_MEAN: 0.96, m.STALENESS_MAX: 2.0}
    assert step_line(3, {**trajectories, **groups}) == "step 3 | staleness 1.0 (max 2)"
    assert step_line(3, {**groups, m.STALENESS_MAX: 0.0, **trajectories}) == "step 3"
    assert step_line(3, trajectories) == "step 3 | staleness 2.0 (max 4)"


def test_step_line_shows_dropped_groups_and_prompts() -> None:
    dropped = {m.FILTERED_GROUPS: 40.0, m.FILTERED_SCORE: 0.25, m.FAILED_PROMPTS: 3.0}
    assert step_line(3, dropped) == "step 3 | 40 groups dropped: equal scores (mean 0.25), 3 prompts failed"
    assert step_line(3, {m.FILTERED_GROUPS: 1.0}) == "step 3 | 1 group dropped: equal scores"  # in verl's trainer modes
    assert step_line(3, {m.FILTERED_GROUPS: 0.0, m.FAILED_PROMPTS: 0.0}) == "step 3"


def test_step_line_shows_a_low_yield_of_drafts_and_the_entropy() -> None:
    low = {**FULL, m.SPEC_ACCEPTED: 61.0, m.GEN_MS_PER_TOKEN: 1.0}  # of 4100 tokens
    share = "drafts yielded 1% of the tokens"
    assert f"98% with history, {share} |" in step_line(12, low)
    assert "nats" not in step_line(12, {**low, m.VERL_ENTROPY: 2.44}), "verl's may be per sequence"
    recorded = {**low, m.ENTROPY: 2.19}
    assert f"{share} at an entropy of 2.19 nats per token |" in step_line(12, recorded)
    for other in ({m.SPEC_ACCEPTED: 2000.0}, {m.SPEC_DRAFTED: 0.0, m.SPEC_ACCEPTED: 0.0}, {m.HISTORY_HIT_RATE: 0.0}):
        assert "drafts yielded" not in step_line(12, {**recorded, **other})


def test_heartbeat_lines_show_the_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))  # each call takes a second
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    out = io.StringIO()
    with progress.Display(Console(file=out, width=200), 8) as display:
        for second in range(60):
            display.tick("starting Ray" if second < 30 else "vLLM's engines start")
        display.step(0, {})  # validation before training
        assert display.starting
        display.step(1, {})
        assert not display.starting
        for _ in range(60):
            display.tick("")
    lines = out.getvalue().splitlines()
    waiting = [line for line in lines if " since the start" in line]
    starting = [line for line in waiting if line.startswith("starting: ")]
    assert starting[0].startswith("starting: starting Ray, 1")
    assert starting[-1].startswith("starting: vLLM's engines start, ")
    assert all(line.startswith("in step 2: rollout, then training, ") for line in waiting[len(starting) :])
    assert len(starting) > 2 * (len(waiting) - len(starting)) > 0


def test_a_bar_on_a_terminal() -> None:
    out = io.StringIO()
    with progress.Display(Console(file=out, width=160, force_terminal=True), 2) as display:
        display.step(1, FULL)
        display.step(2, FULL)
    for shown in ("step 1/2 epoch 3 | reward 0.41", "2/2", "━"):
        assert shown in out.getvalue()


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


# ---- the end of a log ----

RAY_LOG = """\
\x1b[36m(TaskRunner pid=77)\x1b[0m starting
(WorkerDict pid=12) Traceback (most recent call last):
(TaskRunner pid=77) INFO some other line
(WorkerDict pid=12)   File "worker.py", line 9, in update
(WorkerDict pid=12)     raise OSError("disk")
(WorkerDict pid=12) OSError: disk
Error executing job with overrides: ['a=b']
Traceback (most recent call last):
  File "main_ppo.py", line 45, in main
    run_ppo(config)
ray.exceptions.RayTaskError(ValueError): ray::TaskRunner.run() (pid=77, ip=10.0.0.1)
  File "trainer.py", line 3, in run
    raise ValueError("train_batch_size must divide")
ValueError: train_batch_size must divide

Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.
(EngineCore pid=99) ERROR 11-20 10:00:00 [core.py:12] Traceback (most recent call last):
(EngineCore pid=99) ERROR 11-20 10:00:00 [core.py:12]   File "core.py", line 1, in step
(EngineCore pid=99) ERROR 11-20 10:00:00 [core.py:12] KeyboardInterrupt
(Other pid=5) Traceback (most recent call last):
(Other pid=5)   File "x.py", line 1, in f
(Other pid=5) ray.exceptions.ActorDiedError: The actor died unexpectedly [repeated 3x across cluster]
Exception ignored in: <function D.__del__>
Traceback (most recent call last):
  File "d.py", line 1, in __del__
TypeError: 'NoneType' object is not callable
"""


def test_last_error_is_the_cause_not_the_aftermath(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(RAY_LOG)
    lines = last_error(log)
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "ValueError: train_batch_size must divide"
    assert 'File "trainer.py", line 3, in run' in lines[-3]
    # Only this run's part counts. It has no cause, so an error of the aftermath is shown.
    lines = last_error(log, begin=RAY_LOG.index("(EngineCore"))
    assert lines[-1].startswith("TypeError") or lines[-1].startswith("ray.exceptions.ActorDiedError")


def test_last_error_shows_exceptions_of_any_name(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(
        "Traceback (most recent call last):\n"
        '  File "main_ppo.py", line 45, in main\n'
        "ray.exceptions.RayTaskError(RolloutError): ray::Coordinator.enough() (pid=7)\n"
        '  File "rollout.py", line 3, in _fail\n'
        "    raise RolloutError(\n"
        "verl_rhyme.scheduling.group_filter.RolloutError: 8 prompts in a row failed\n"
        "an unrelated line\n"
    )
    assert last_error(log)[-1] == "verl_rhyme.scheduling.group_filter.RolloutError: 8 prompts in a row failed"


def test_last_error_untangles_processes(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("\n".join(RAY_LOG.splitlines()[:6]))
    assert last_error(log) == [
        "Traceback (most recent call last):",
        '  File "worker.py", line 9, in update',
        '    raise OSError("disk")',
        "OSError: disk",
    ]


def test_last_error_without_traceback(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("".join(f"noise {i}\n" for i in range(50)))
    assert last_error(log)[-1] == "noise 49"
    log.write_text("Could not override 'x'.\nhydra.errors.ConfigCompositionException: no x\nKey 'x' is not in struct\n")
    assert any("ConfigCompositionException" in line for line in last_error(log))
    log.write_text("")
    assert last_error(log) == ["(the log is empty)"]
    assert "cannot read" in last_error(tmp_path / "nowhere")[0]
    log.write_text("Traceback (most recent call last):\n" + '  File "a.py"\n' * 100 + "RecursionError: deep\n")
    assert len(last_error(log)) == SHOWN_LINES
    assert last_error(log)[-1] == "RecursionError: deep"


# ---- the command ----

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

    def call(script: str, total: int = 2, hangup: Any = signal.SIG_DFL) -> subprocess.Popen[str]:
        files = ["--metrics", str(tmp_path / "run" / "metrics.jsonl"), "--log", str(tmp_path / "run" / "train.log")]
        command = [sys.executable, "-c", IMPATIENT, *files, "--total-steps", str(total)]
        command += ["--", sys.executable, "-c", script]
        before = signal.signal(signal.SIGHUP, hangup)  # inherited; the tests themselves may run under nohup
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
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


def test_exit_status_after_a_signal_is_128_plus_its_number(start: Start) -> None:
    process = start("import os; os.kill(os.getpid(), 9)")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 137
    assert "out of memory?" in output


def test_metrics_of_the_previous_run_are_kept(start: Start, tmp_path: Path) -> None:
    for _ in range(2):
        assert start(f"{PRELUDE}\nlog(1, a=1)").wait(60) == 0
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1
    assert json.loads((tmp_path / "run" / "metrics-001.jsonl").read_text())["step"] == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_the_whole_session(start: Start, tmp_path: Path, number: signal.Signals) -> None:
    process = start(STUBBORN + "time.sleep(600)")
    processes = pids(tmp_path / "run")
    assert set(processes) <= set(session_processes(processes[0]))
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert "training interrupted" in output
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
    assert process.wait(30) == 137
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
