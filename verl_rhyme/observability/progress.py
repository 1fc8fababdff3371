"""Runner of a training command: output to a log, one readable line per step and a progress bar to the terminal.

``python -m verl_rhyme.observability.progress --metrics RUN/metrics.jsonl --log RUN/train.log --total-steps N -- CMD``

The command runs in a separate session with ``VERL_FILE_LOGGER_PATH`` set. Steps are read from that file, so
``trainer.logger`` must contain ``file``. Interrupts reach the whole session, and no process of the session outlives the
command. The exit status is the command's (128 + n for signal n).
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from verl_rhyme.drafting.policy import SOURCES

from . import metrics, steps
from .errors import last_error
from .phases import Phases
from .supervise import Supervised

LOGGER_VARIABLE = "VERL_FILE_LOGGER_PATH"
POLL_S = 0.2

#: Seconds of silence after which a line is printed without a terminal: during the start, and later.
STARTING_HEARTBEAT_S, HEARTBEAT_S = 10.0, 30.0


def step_line(step: int, data: Mapping[str, Any], total_steps: int | None = None) -> str:
    """Return a readable line for the metrics of a step; missing metrics are left out.

    Args:
        step: Step from 1; 0 for the validation before training.
        data: Metric name to value, as verl logs them.
        total_steps: Steps of the training run, if known.
    """

    def value(name: str) -> float | None:
        return metrics.finite(data, name)

    head = f"step {step}" + (f"/{total_steps}" if total_steps else "")
    if (epoch := value(metrics.EPOCH)) is not None:
        head += f" epoch {int(epoch) + 1}"
    parts = [head]
    reward = value(metrics.REWARD_MEAN)
    reward = value(metrics.REWARD_MEAN_AFTER_KL) if reward is None else reward
    if reward is not None:
        parts.append(f"reward {reward:.2f}")
    tokens, seconds = metrics.response_tokens(data), metrics.rollout_s(data)
    bubble = None
    if tokens is not None and seconds:
        count = f"{tokens:,.0f}".replace(",", " ")
        parts.append(f"{count} tokens in {seconds:.1f} s ({tokens / seconds:.0f} tok/s)")
        bubble = value(metrics.BUBBLE_RATIO)  # misleading without the tokens per second
    parts += _drafting(data, value)
    parts += _dropped(value)
    if bubble is not None:
        parts.append(f"bubble {bubble:.0%}")
    parts += _staleness(value)
    validation = {name: v for name in data if name.startswith("val-core/") and (v := value(name)) is not None}
    parts += [f"validation {name.split('/', 1)[1]} {v:.2f}" for name, v in validation.items()]
    return " | ".join(parts)


def _drafting(data: Mapping[str, Any], value: Any) -> list[str]:
    parts = []
    drafted, accepted, verified = (
        value(name) for name in (metrics.SPEC_DRAFTED, metrics.SPEC_ACCEPTED, metrics.SPEC_VERIFY_STEPS)
    )
    if drafted and verified and accepted is not None:
        parts += [f"{1 + accepted / verified:.1f} tokens/step", f"{accepted / drafted:.0%} accepted"]
        if shares := metrics.shares({name: value(metrics.SPEC_SOURCES[f"accepted_{name}"]) for name in SOURCES}):
            parts[-1] += f" ({shares})"
    elif value(metrics.SPEC_ACCEPT_LENGTH):
        parts.append(f"{value(metrics.SPEC_ACCEPT_LENGTH):.1f} tokens/step")
        if (rate := value(metrics.SPEC_ACCEPT_RATE)) is not None:
            parts.append(f"{rate:.0%} accepted")
    if (hits := value(metrics.HISTORY_HIT_RATE)) is not None:
        parts.append(f"{hits:.0%} with history")
    if drafted and hits:
        little = metrics.little_from_drafts(accepted, metrics.response_tokens(data), value(metrics.ENTROPY))
        parts += [] if little is None else [little]
    return [", ".join(parts)] if parts else []


def _staleness(value: Any) -> list[str]:
    """Return the staleness of a step; empty if the step was on-policy."""
    for mean, greatest in (
        (metrics.STALENESS_MEAN, metrics.STALENESS_MAX),
        (metrics.VERL_STALENESS_MEAN, metrics.VERL_STALENESS_MAX),
    ):
        if (most := value(greatest)) is not None:
            return [f"staleness {value(mean) or 0.0:.1f} (max {most:.0f})"] if most > 0 else []
    return []


def _dropped(value: Any) -> list[str]:
    parts = []
    if groups := value(metrics.FILTERED_GROUPS):
        score = value(metrics.FILTERED_SCORE)
        why = "equal scores" + ("" if score is None else f" (mean {score:.2f})")
        parts.append(f"{groups:.0f} group{'s' if groups > 1 else ''} dropped: {why}")
    if failed := value(metrics.FAILED_PROMPTS):
        parts.append(f"{failed:.0f} prompt{'s' if failed > 1 else ''} failed")
    return [", ".join(parts)] if parts else []


class MetricsFollower:
    """Reader of lines appended to verl's metrics file; the file may appear late or be truncated."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._offset = 0

    def skip(self) -> None:
        """Skip the present lines, which belong to an earlier start, until the file is truncated."""
        self._offset = self.path.stat().st_size if self.path.exists() else 0

    def poll(self) -> list[tuple[int, dict[str, Any]]]:
        """Return (step, metrics) of the lines completed since the last call."""
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset = 0
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            self._offset = 0
            return []
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        return list(steps.parse_lines(whole.splitlines(), self.path))


class Display:
    """Progress bar on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console, total_steps: int | None) -> None:
        self._console = console
        self._total = total_steps
        self._began = self._printed_at = time.monotonic()
        self._step = 0
        self._first: tuple[int, float] | None = None
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=console, transient=True) if console.is_terminal else None
        self._task = self._bar.add_task("starting", total=total_steps) if self._bar else None

    def __enter__(self) -> Display:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        self._printed_at = time.monotonic()

    def step(self, step: int, data: Mapping[str, Any]) -> None:
        """Show a finished step."""
        self._step = step
        text = step_line(step, data, self._total)
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=step, description="training")
        elif left := self._seconds_left(step):
            text += f" | about {_duration(left)} left"
        self.line(text)

    @property
    def starting(self) -> bool:
        """Whether no training step has finished yet."""
        return not self._step

    def tick(self, phase: str) -> None:
        """Show what a run is doing if it has printed nothing for long.

        Args:
            phase: Phase of a starting run, from :class:`~verl_rhyme.observability.phases.Phases`.
        """
        if self._bar and self._task is not None:
            if self.starting:
                self._bar.update(self._task, description=phase)
            return
        now = time.monotonic()
        if now - self._printed_at >= (STARTING_HEARTBEAT_S if self.starting else HEARTBEAT_S):
            doing = f"starting: {phase}" if self.starting else f"in step {self._step + 1}: rollout, then training"
            self.line(f"{doing}, {_duration(now - self._began)} since the start")

    def _seconds_left(self, step: int) -> float | None:
        """Estimate from the steps after the first one, which includes all warm-up."""
        now = time.monotonic()
        if self._first is None:
            self._first = (step, now)
        first, at = self._first
        if not self._total or step <= first or step >= self._total:
            return None
        return (now - at) / (step - first) * (self._total - step)


def run(command: Sequence[str], metrics_file: Path, log: Path, total_steps: int | None, console: Console) -> int:
    """Run ``command`` to its end (see the module) and return its exit status."""
    metrics_file.parent.mkdir(parents=True, exist_ok=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    aside = steps.set_aside(metrics_file)
    follower = MetricsFollower(metrics_file)
    log_begin = log.stat().st_size if log.exists() else 0
    environment = {**os.environ, LOGGER_VARIABLE: str(metrics_file.resolve())}
    child = Supervised(command, log, environment)
    phases = Phases(log, log_begin)
    with child, Display(console, total_steps) as display:
        display.line(f"starting verl, Ray and vLLM (about a minute); log: {log}")
        if aside:
            display.line(f"metrics of the previous run were moved to {aside}")
        while child.wait(POLL_S) is None:
            for step, data in follower.poll():
                display.step(step, data)
            if child.notice:
                display.line(child.notice)
                child.notice = None
            display.tick(phases.poll() if display.starting else "")
        for step, data in follower.poll():
            display.step(step, data)
    status = child.status
    if status and not child.interrupted:
        why = ", killed: out of memory?" if status == 128 + signal.SIGKILL else ""
        console.print(f"training failed (exit status {status}{why}); error from {log}:", markup=False, highlight=False)
        for text in last_error(log, log_begin):
            console.print(f"  {text}", markup=False, highlight=False, soft_wrap=True)
    elif child.interrupted:
        console.print(f"training interrupted; log: {log}", markup=False, highlight=False, soft_wrap=True)
    return status


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 600:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 60:.0f} min"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m verl_rhyme.observability.progress", description=__doc__)
    parser.add_argument("--metrics", type=Path, required=True, help="file for verl's file logger")
    parser.add_argument("--log", type=Path, required=True, help="file to append the command's output to")
    parser.add_argument("--total-steps", type=int, help="number of training steps")
    parser.add_argument("command", nargs="+", help="the training command, after --")
    options = parser.parse_args(arguments)
    return run(options.command, options.metrics, options.log, options.total_steps, Console())


if __name__ == "__main__":
    sys.exit(main())
