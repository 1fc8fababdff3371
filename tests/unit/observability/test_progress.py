"""Runner of a training command with real processes, and its printed lines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from verl_rhyme.observability import metrics as m
from verl_rhyme.observability import progress
from verl_rhyme.observability.progress import MetricsFollower, step_line

Run = Callable[[str], tuple[int, str]]

FULL = {
    **{m.EPOCH: 2, m.REWARD_MEAN: 0.41, m.GEN_S: 4.1, m.GEN_MS_PER_TOKEN: 4100 / 3512, m.BUBBLE_RATIO: 0.22},
    **{m.SPEC_DRAFTED: 2000.0, m.SPEC_ACCEPTED: 1220.0, m.SPEC_VERIFY_STEPS: 920.0, m.HISTORY_HIT_RATE: 0.98},
}
ACCEPTED = {names[1]: tokens for names, tokens in zip(m.SPEC_SOURCES.values(), (300.0, 0.0, 99.0, 1.0), strict=False)}
TRAJECTORIES = {m.VERL_STALENESS_MEAN: 2.0, m.VERL_STALENESS_MAX: 4.0}
GROUPS = {m.STALENESS_MEAN: 0.96, m.STALENESS_MAX: 2.0}
DROPPED = {m.FILTERED_GROUPS: 40.0, m.FILTERED_SCORE: 0.25, m.FAILED_PROMPTS: 3.0}


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({m.REWARD_MEAN_AFTER_KL: 0.5, m.REWARD_MEAN: float("nan")}, "reward 0.50"),
        ({"val-core/knights/acc/mean@1": 0.25}, "validation knights/acc/mean@1 0.25"),
        ({m.SPEC_ACCEPT_LENGTH: 2.0, m.SPEC_ACCEPT_RATE: 0.5}, "2.0 tokens/step, 50% accepted"),
        ({m.SPEC_DRAFTED: 0.0, m.SPEC_ACCEPTED: 0.0, m.SPEC_VERIFY_STEPS: 9.0, m.SPEC_ACCEPT_LENGTH: 0.0}, ""),
        (
            {m.SPEC_DRAFTED: 800.0, m.SPEC_ACCEPTED: 400.0, m.SPEC_VERIFY_STEPS: 400.0, **ACCEPTED},
            "2.0 tokens/step, 50% accepted (history 75%, own 25%)",
        ),
        ({m.HISTORY_LOST: 2.0}, "history lost 2 steps"),
        ({m.BUBBLE_RATIO: 0.2}, ""),
        (
            {m.TOOL_CALLS: 9.0, m.TOOL_S: 2.0, m.TOOL_SHARE: 0.4, m.PREFILLED_AGAIN: 12345.0},
            "tools 40% of the samples' time, 12 345 tokens prefilled again",
        ),
        ({**TRAJECTORIES, **GROUPS}, "staleness 1.0 (max 2)"),
        ({**GROUPS, m.STALENESS_MAX: 0.0, **TRAJECTORIES}, ""),
        (TRAJECTORIES, "staleness 2.0 (max 4)"),
        ({m.SLOW_TOOLS: 1.0}, m.SLOW_TOOLS_ADVICE),
        (DROPPED, "40 groups dropped: equal scores (mean 0.25), 3 prompts failed"),
        ({m.FILTERED_GROUPS: 1.0}, "1 group dropped: equal scores"),  # in verl's trainer modes
        (dict.fromkeys(DROPPED, 0.0), ""),
    ],
)
def test_a_line_leaves_out_what_is_missing(data: dict[str, float], line: str) -> None:
    assert step_line(3, data) == "step 3" + f" | {line}" * bool(line)


def test_a_whole_line_and_a_low_yield_of_drafts() -> None:
    assert step_line(12, FULL, 24) == (
        "step 12/24 epoch 3 | reward 0.41 | 3 512 tokens in 4.1 s (857 tok/s) | "
        "2.3 tokens/step, 61% accepted, 98% with history | bubble 22%"
    )
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
import json, os, signal, sys, time
def log(step, **data):
    with open(os.environ["VERL_FILE_LOGGER_PATH"], "a") as file:
        file.write(json.dumps({"step": step, "data": data}) + "\\n")
"""


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    def start(script: str) -> tuple[int, str]:
        """Return the exit status and the printed lines of a run of two steps."""
        command = [sys.executable, "-c", PRELUDE + script]
        status = progress.run(command, tmp_path / "metrics.jsonl", tmp_path / "train.log", 2)
        return status, capsys.readouterr().out

    return start


def test_a_start_shows_its_own_steps_and_error(run: Run, tmp_path: Path) -> None:
    status, output = run(f"print('noise')\nfor step in (1, 2):\n  log(step, **{FULL!r})\n  time.sleep(0.3)")
    assert status == 0
    starting, first, second = output.splitlines()
    assert starting.endswith(f"about a minute); log: {tmp_path / 'train.log'}")
    assert first.startswith("step 1/2 epoch 3 | reward 0.41")
    assert second.startswith("step 2/2 epoch 3 | reward 0.41")
    assert (tmp_path / "train.log").read_text() == "noise\n"
    status, output = run("log(2); raise ValueError('batch size 3 is odd')")
    assert (status, output.count("step 2/2"), output.count("step 1")) == (1, 1, 0)
    assert "training failed (exit status 1)" in output
    assert "  ValueError: batch size 3 is odd" in output
    status, output = run("sys.exit(7)")
    assert (status, "ValueError" in output) == (7, False)


def test_a_killed_command_may_lack_memory(run: Run) -> None:
    status, output = run("os.kill(os.getpid(), 9)")
    assert (status, "out of memory?" in output) == (128 + signal.SIGKILL, True)


def test_the_command_inherits_the_lock_of_the_run_folder(run: Run, tmp_path: Path) -> None:
    """The run script passes its descriptor by number (``checks/run_lock.py``)."""
    with open(tmp_path / "run.lock", "w") as lock:
        os.set_inheritable(lock.fileno(), True)
        assert run(f"os.write({lock.fileno()}, b'held')")[0] == 0
    assert (tmp_path / "run.lock").read_text() == "held"


CLEANS = "try: print('ready', flush=True); time.sleep(60)\nexcept KeyboardInterrupt: print('cleaned'); sys.exit(3)"
PATIENT = "print('ready', flush=True); time.sleep(60)"
DEAF = "[signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; print('ready', flush=True); time.sleep(60)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "number", "to_all", "times", "status"),
    [
        (CLEANS, signal.SIGINT, True, 1, 3),
        (PATIENT, signal.SIGTERM, False, 1, 128 + signal.SIGTERM),
        (DEAF, signal.SIGINT, True, 3, 128 + signal.SIGKILL),
    ],
    ids=["a terminal interrupts both", "a signal to the runner is passed on", "more interrupts kill"],
)
def test_an_interrupt_ends_the_command(tmp_path, script, number, to_all, times, status) -> None:
    files = ["--metrics", str(tmp_path / "metrics.jsonl"), "--log", str(tmp_path / "train.log"), "--total-steps", "2"]
    command = [sys.executable, "-m", "verl_rhyme.observability.progress", *files, "--", sys.executable, "-c"]
    runner = subprocess.Popen([*command, PRELUDE + script], stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        while not (tmp_path / "train.log").exists() or "ready" not in (tmp_path / "train.log").read_text():
            time.sleep(0.05)
        for _ in range(times):
            (os.killpg if to_all else os.kill)(runner.pid, number)
            time.sleep(0.5)
        output, _ = runner.communicate(timeout=10)
    finally:
        runner.kill()
    assert runner.returncode == status
    assert "training interrupted; the same command goes on from the last checkpoint" in output
    assert ("cleaned" in (tmp_path / "train.log").read_text()) == (script == CLEANS)
