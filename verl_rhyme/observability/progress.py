"""Runner of a training command: output to a log, a readable line per step to the terminal.

``python -m verl_rhyme.observability.progress --metrics RUN/metrics.jsonl --log RUN/train.log --total-steps N -- CMD``

Steps are read from verl's metrics file, so ``trainer.logger`` must contain ``file``. The exit status is the command's
(128 + n for signal n). An interrupt of the terminal reaches the command, too; SIGTERM is passed on to it. Ray and vLLM
end their processes with the command.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import metrics, steps
from .errors import last_error

LOGGER_VARIABLE = "VERL_FILE_LOGGER_PATH"
POLL_S = 0.2
#: Seconds that an interrupted command has to end before it is terminated, and then killed.
GRACE_S = 15.0

#: Function from names of metrics to the value of the first that is known.
Value = Callable[..., "float | None"]


def step_line(step: int, data: Mapping[str, Any], total_steps: int | None = None) -> str:
    """Return a readable line for the metrics of a step (0: validation before training), without missing ones."""

    def value(*names: str) -> float | None:
        return metrics.finite(data, *names)

    epoch, reward = value(metrics.EPOCH), value(metrics.REWARD_MEAN, metrics.REWARD_MEAN_AFTER_KL)
    parts = [
        f"step {step}"
        + (f"/{total_steps}" if total_steps else "")
        + ("" if epoch is None else f" epoch {int(epoch) + 1}")
    ]
    if reward is not None:
        parts.append(f"reward {reward:.2f}")
    tokens, seconds = metrics.response_tokens(data), metrics.rollout_s(data)
    bubble = None
    if tokens is not None and seconds:
        count = f"{tokens:,.0f}".replace(",", " ")
        parts.append(f"{count} tokens in {seconds:.1f} s ({tokens / seconds:.0f} tok/s)")
        bubble = value(metrics.BUBBLE_RATIO)  # misleading without the tokens per second
    parts += [", ".join(group) for group in (_drafting(value, tokens), _dropped(value)) if group]
    if bubble is not None:
        parts.append(f"bubble {bubble:.0%}")
    if share := value(metrics.TOOL_SHARE):
        again = f"{value(metrics.PREFILLED_AGAIN) or 0:,.0f}".replace(",", " ")
        parts.append(f"tools {share:.0%} of the samples' time, {again} tokens prefilled again")
    if most := value(metrics.STALENESS_MAX, metrics.VERL_STALENESS_MAX):
        mean = value(metrics.STALENESS_MEAN, metrics.VERL_STALENESS_MEAN) or 0.0
        parts.append(f"staleness {mean:.1f} (max {most:.0f})")
    if value(metrics.SLOW_TOOLS):
        parts.append(metrics.SLOW_TOOLS_ADVICE)
    validation = {name: v for name in data if name.startswith("val-core/") and (v := value(name)) is not None}
    parts += [f"validation {name.split('/', 1)[1]} {v:.2f}" for name, v in validation.items()]
    return " | ".join(parts)


def _drafting(value: Value, tokens: float | None) -> list[str]:
    parts = []
    drafted, accepted, verified = (
        value(name) for name in (metrics.SPEC_DRAFTED, metrics.SPEC_ACCEPTED, metrics.SPEC_VERIFY_STEPS)
    )
    if drafted and verified and accepted is not None:
        parts += [f"{1 + accepted / verified:.1f} tokens/step", f"{accepted / drafted:.0%} accepted"]
        if shares := metrics.shares({source: value(names[1]) for source, names in metrics.SPEC_SOURCES.items()}):
            parts[-1] += f" ({shares})"
    elif length := value(metrics.SPEC_ACCEPT_LENGTH):  # of another drafter, as verl logs it
        parts.append(f"{length:.1f} tokens/step")
        if (rate := value(metrics.SPEC_ACCEPT_RATE)) is not None:
            parts.append(f"{rate:.0%} accepted")
    if (hits := value(metrics.HISTORY_HIT_RATE)) is not None:
        parts.append(f"{hits:.0%} with history")
    if drafted and hits and (low := metrics.low_yield(accepted, tokens, value(metrics.ENTROPY))):
        parts.append(low)
    return parts


def _dropped(value: Value) -> list[str]:
    parts = []
    if groups := value(metrics.FILTERED_GROUPS):
        score = value(metrics.FILTERED_SCORE)
        why = "equal scores" + ("" if score is None else f" (mean {score:.2f})")
        parts.append(f"{groups:.0f} group{'s' if groups > 1 else ''} dropped: {why}")
    if failed := value(metrics.FAILED_PROMPTS):
        parts.append(f"{failed:.0f} prompt{'s' if failed > 1 else ''} failed")
    if lost := value(metrics.HISTORY_LOST):
        parts.append(f"history lost {lost:.0f} step{'s' if lost > 1 else ''}")
    return parts


class MetricsFollower:
    """Reader of lines appended to verl's metrics file; the file may appear late or be truncated."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._offset = 0

    def poll(self) -> list[tuple[int, dict[str, Any]]]:
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


def run(command: Sequence[str], metrics_file: Path, log: Path, total_steps: int | None) -> int:
    metrics_file.parent.mkdir(parents=True, exist_ok=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    follower = MetricsFollower(metrics_file)
    follower.poll()  # steps of earlier starts
    log_begin = log.stat().st_size if log.exists() else 0
    with log.open("ab") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, LOGGER_VARIABLE: str(metrics_file.resolve())},
            close_fds=False,  # the lock of the run folder (checks/run_lock.py)
        )

    def pass_on(number: int, _: object) -> None:
        child.send_signal(number)
        raise KeyboardInterrupt

    def show_steps() -> None:
        for step, data in follower.poll():
            print(step_line(step, data, total_steps), flush=True)

    before = signal.signal(signal.SIGTERM, pass_on)
    print(f"starting verl, Ray and vLLM (about a minute); log: {log}", flush=True)
    interrupted = False
    try:
        while child.poll() is None:
            show_steps()
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        interrupted = True
        print(f"stopping (at most {2 * GRACE_S:.0f} s; interrupt again to hurry) ...", flush=True)
        _stop(child)
    finally:
        signal.signal(signal.SIGTERM, before)
    show_steps()
    status = child.returncode if child.returncode >= 0 else 128 - child.returncode
    if interrupted:
        print(f"training interrupted; the same command goes on from the last checkpoint; log: {log}")
    elif status:
        why = ", killed: out of memory?" if status == 128 + signal.SIGKILL else ""
        print(f"training failed (exit status {status}{why}); error from {log}:")
        for text in last_error(log, log_begin):
            print(f"  {text}")
    return status


def _stop(child: subprocess.Popen) -> None:
    """Wait for an interrupted command; after a while, or at another interrupt, terminate it, and then kill it."""
    for end in (child.terminate, child.kill):
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            child.wait(GRACE_S)
            return
        end()
    child.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m verl_rhyme.observability.progress", description=__doc__)
    parser.add_argument("--metrics", type=Path, required=True, help="file for verl's file logger")
    parser.add_argument("--log", type=Path, required=True, help="file to append the command's output to")
    parser.add_argument("--total-steps", type=int, help="number of training steps")
    parser.add_argument("command", nargs="+", help="the training command, after --")
    options = parser.parse_args(arguments)
    return run(options.command, options.metrics, options.log, options.total_steps)


if __name__ == "__main__":
    sys.exit(main())
