"""Run the parts in sequence, each in a process with a time limit, and store their rows.

Uses only the standard library; each part imports its packages. A folder per machine has ``results.jsonl``: the rows of
the parts (``part``, ``decides`` and the part's figures), and after each part a row with its ``status``: ``done``,
``failed``, ``timed out`` or ``skipped``. A finished part is not run again. A part that runs again replaces the rows of
its unfinished run.
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

#: Last characters of a failed part's standard error to report.
_TAIL = 1500
#: Seconds to wait for the output of an ended process; a child outside its group may hold it open.
_LINGER_S = 10.0
_DONE = "done"


class Results:
    """Results in a folder.

    Args:
        folder: Folder; it is created.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / "results.jsonl"
        self.rows: list[dict[str, Any]] = []
        for line in self.file.read_text().splitlines() if self.file.exists() else ():
            try:
                self.rows.append(json.loads(line))
            except ValueError:  # the machine stopped during the write
                continue

    def done(self, part: str) -> dict[str, Any] | None:
        """Return the row that reports a part as done."""
        return next((row for row in self.rows if row["part"] == part and row.get("status") == _DONE), None)

    def add(self, row: dict[str, Any]) -> None:
        """Append a row to the file at once."""
        self.rows.append(row)
        with self.file.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def drop(self, part: str) -> None:
        """Remove the rows of an earlier run of a part."""
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
    report: Callable[[str], object],
) -> bool:
    """Run the unfinished parts, and report their rows and status.

    Args:
        parts: Parts in order.
        results: Results to extend.
        about: Fields of each row.
        gpu: Whether this machine has a GPU.
        quick: Use small sizes.
        report: Called with each line of output.

    Returns:
        Whether every part is done or cannot run on this machine.
    """
    complete = True
    for part in parts:
        if (before := results.done(part.name)) is not None:
            report(f"{part.name}: already done at commit {before.get('commit', 'unknown')}")
            continue
        results.drop(part.name)
        report(f"\n{part.name}, at most {part.limit_s:.0f} s. It decides {part.decides}.")
        began = time.monotonic()
        status, reason = _part(part, results, about, gpu, quick, report)
        end = {"part": part.name, "status": status, "reason": reason, "seconds": round(time.monotonic() - began, 1)}
        results.add({**end, **about})
        report(f"{part.name}: {status}" + (f" ({reason})" if reason else ""))
        complete &= status in (_DONE, "skipped")
    return complete


def _part(
    part: Part, results: Results, about: dict[str, Any], gpu: bool, quick: bool, report: Callable[[str], object]
) -> tuple[str, str]:
    """Return a part's status and the reason."""
    if missing := part.missing():
        return "skipped", f"missing packages: {', '.join(missing)}"
    if part.gpu_only and not gpu:
        return "skipped", part.gpu_only
    count = 0

    def keep(line: str) -> None:
        nonlocal count
        try:
            row = json.loads(line)
        except ValueError:
            return  # output of a library
        if isinstance(row, dict):
            count += 1
            results.add({"part": part.name, "decides": part.decides, **row, **about})
            report(f"  {_short(row)}")

    command = [sys.executable, *part.command, *(part.quick if quick else ())]
    environment = {**os.environ, **dict(part.environment), **(dict(part.quick_environment) if not gpu else {})}
    ended, errors = _listen(command, environment, part.limit_s, keep)
    if ended is None:
        return "timed out", f"after {part.limit_s:.0f} s, with {count} rows"
    if ended:
        return "failed", f"exit status {ended}: {errors[-_TAIL:].strip()}"
    return (_DONE, "") if count else ("failed", f"it printed no rows: {errors[-_TAIL:].strip()}")


def _listen(
    command: list[str], environment: dict[str, str], limit_s: float, keep: Callable[[str], object]
) -> tuple[int | None, str]:
    """Run a process and its children to the time limit; pass each line of its output to ``keep`` at once.

    Returns:
        Exit status (``None`` after the time limit) and standard error.
    """
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
        with contextlib.suppress(ProcessLookupError, PermissionError):  # its process group has ended
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
    """Return the results as text: each part, its purpose and its rows."""
    lines = []
    for part in parts:
        rows = [row for row in results.rows if row["part"] == part.name]
        end = next((row for row in rows if "status" in row), None)
        status = "not run" if end is None else f"{end['status']}, {end['seconds']} s"
        why = f": {end['reason'].splitlines()[-1]}" if end is not None and end["reason"] else ""
        lines += [f"\n{part.name} ({status}{why})", f"  decides {part.decides}"]
        lines += [f"    {_short({k: v for k, v in row.items() if k != 'decides'})}" for row in rows if row is not end]
    return "\n".join(lines)
