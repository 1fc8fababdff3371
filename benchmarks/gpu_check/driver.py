"""Runs parts one after another, each in a process and for a time of its own, and keeps what they tell.

Only the standard library: what a part needs is the part's affair. A folder for each machine holds ``results.jsonl``:
rows of parts as they came (``part``, ``decides`` and what the part told), and after each part one with its ``status``:
``done``, ``failed``, ``timed out`` or ``skipped``. A part that is done is not run again; rows of one that did not come
to its end are replaced when it runs again.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.parts import Part

#: Characters of what a failed part wrote to standard error.
_TAIL = 1500
#: Seconds for which the output of a process that has ended is waited for: who left its group may hold it open.
_LINGER_S = 10.0
_DONE = "done"


class Results:
    """What a folder has.

    Args:
        folder: Is made.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / "results.jsonl"
        self.rows: list[dict[str, Any]] = []
        for line in self.file.read_text().splitlines() if self.file.exists() else ():
            try:
                self.rows.append(json.loads(line))
            except ValueError:  # the machine went away while it was written
                continue

    def done(self, part: str) -> dict[str, Any] | None:
        """The row that says so."""
        return next((row for row in self.rows if row["part"] == part and row.get("status") == _DONE), None)

    def add(self, row: dict[str, Any]) -> None:
        """Kept as soon as it is there."""
        self.rows.append(row)
        with self.file.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def drop(self, part: str) -> None:
        """What an earlier go at a part left."""
        self.rows = [row for row in self.rows if row["part"] != part]
        new = self.file.with_suffix(".new")
        new.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        new.replace(self.file)


def run(
    parts: Sequence[Part],
    results: Results,
    about: dict[str, Any],
    gpu: bool,
    quick: bool,
    say: Callable[[str], object],
) -> bool:
    """Run what is left, and tell each part's rows and end.

    Args:
        parts: In their order.
        results: Where rows go.
        about: Goes into each row.
        gpu: This machine has one.
        quick: Small sizes.
        say: Shows a line.

    Returns:
        Whether every part is done, or cannot be run here.
    """
    whole = True
    for part in parts:
        if (before := results.done(part.name)) is not None:
            say(f"{part.name}: done before, at commit {before.get('commit', 'unknown')}")
            continue
        results.drop(part.name)
        say(f"\n{part.name}, {part.limit_s:.0f} s at most. It decides {part.decides}.")
        began = time.monotonic()
        status, reason = _part(part, results, about, gpu, quick, say)
        end = {"part": part.name, "status": status, "reason": reason, "seconds": round(time.monotonic() - began, 1)}
        results.add({**end, **about})
        say(f"{part.name}: {status}" + (f" ({reason})" if reason else ""))
        whole &= status in (_DONE, "skipped")
    return whole


def _part(
    part: Part, results: Results, about: dict[str, Any], gpu: bool, quick: bool, say: Callable[[str], object]
) -> tuple[str, str]:
    """Its status, and why."""
    if missing := part.missing():
        return "skipped", f"not here: {', '.join(missing)}"
    if part.gpu_only and not gpu:
        return "skipped", part.gpu_only
    told = 0

    def keep(line: str) -> None:
        nonlocal told
        try:
            row = json.loads(line)
        except ValueError:
            return  # a library's word
        if isinstance(row, dict):
            told += 1
            results.add({"part": part.name, "decides": part.decides, **row, **about})
            say(f"  {_short(row)}")

    command = [sys.executable, *part.command, *(part.quick if quick else ())]
    environment = {**os.environ, **dict(part.environment), **(dict(part.quick_environment) if not gpu else {})}
    ended, errors = _listen(command, environment, part.limit_s, keep)
    if ended is None:
        return "timed out", f"after {part.limit_s:.0f} s, with {told} rows"
    if ended:
        return "failed", f"exit status {ended}: {errors[-_TAIL:].strip()}"
    return (_DONE, "") if told else ("failed", f"it told nothing: {errors[-_TAIL:].strip()}")


def _listen(
    command: list[str], environment: dict[str, str], limit_s: float, keep: Callable[[str], object]
) -> tuple[int | None, str]:
    """Exit status (``None``: it was ended for the time it took) and standard error of a process; each line of its
    output is kept as it comes. With it ends what it began."""
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    errors: list[str] = []
    readers = [
        threading.Thread(target=_read, args=(stream, take), daemon=True)
        for stream, take in ((process.stdout, keep), (process.stderr, errors.append))
    ]
    for reader in readers:
        reader.start()
    try:
        status: int | None = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # its group is over
            os.killpg(process.pid, signal.SIGKILL)  # engines that outlive it would hold the GPU
        process.wait()
    for reader in readers:
        reader.join(timeout=_LINGER_S)
    return status, "".join(errors)


def _read(stream: Iterable[str], take: Callable[[str], object]) -> None:
    for line in stream:
        take(line)


def _short(row: dict[str, Any]) -> str:
    hidden = ("machine", "commit", "benchmark", "part")
    return "  ".join(f"{name} {value}" for name, value in row.items() if name not in hidden)


def table(results: Results, parts: Sequence[Part]) -> str:
    """All that is known, part by part, with what hangs on it."""
    lines = []
    for part in parts:
        rows = [row for row in results.rows if row["part"] == part.name]
        end = next((row for row in rows if "status" in row), None)
        status = "not run" if end is None else f"{end['status']}, {end['seconds']} s"
        why = f": {end['reason'].splitlines()[-1]}" if end is not None and end["reason"] else ""
        lines += [f"\n{part.name} ({status}{why})", f"  decides {part.decides}"]
        lines += [f"    {_short({k: v for k, v in row.items() if k != 'decides'})}" for row in rows if row is not end]
    return "\n".join(lines)
