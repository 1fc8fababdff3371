"""Cause of a failure, from the mixed log of Ray, verl and vLLM or from an exception."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

#: Bytes read from the end of a log.
TAIL_BYTES = 4 << 20

#: Lines shown from the end of a traceback.
SHOWN_LINES = 16

#: Errors of wrong code.
BROKEN = (
    *(ImportError, SyntaxError, NameError, AttributeError, TypeError, LookupError, ValueError),
    *(AssertionError, ArithmeticError, NotImplementedError),
)

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_ORIGIN = re.compile(r"^\(([^()\n]*pid=\d+[^()\n]*)\) ?")
_LEVEL = re.compile(r"^(?:ERROR|WARNING|INFO|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?")
_REPEATED = re.compile(r" ?\[repeated \d+x across cluster\].*$")
_EXCEPTION = r"[A-Za-z_][\w.]*(?:\([\w.]+\))?(?::.*)?"
_NAMED_EXCEPTION = r"[\w.]*(?:Error|Exception|Interrupt|Exit)(?:\([\w.]+\))?(?::.*)?"
_FRAMES = r"(?:(?:[ \t].*)?\n)*"
#: A traceback, its exception and, after an exception of Ray, the remote frames and the remote exception.
_TRACEBACK = re.compile(
    rf"^Traceback \(most recent call last\):\n{_FRAMES}({_EXCEPTION})$(?:\n{_FRAMES}{_NAMED_EXCEPTION}$)*", re.MULTILINE
)
_ERROR_LINE = re.compile(r"\b(?:[A-Za-z]*(?:Error|Exception)\b|error:|Killed\b|No space left on device)")

#: Exceptions of processes that fail because another process failed.
_AFTERMATH = re.compile(
    r"^(?:\S*\.)?(?:ActorDiedError|ActorUnavailableError|RayActorError|WorkerCrashedError|OwnerDiedError|KeyboardInterrupt"
    r"|SystemExit|BrokenPipeError|ConnectionResetError|EOFError|CancelledError|EngineDeadError)\b"
)


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def last_line(error: BaseException) -> str:
    """Return the last line of an error's message; errors of other processes begin with a traceback."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def is_broken(error: BaseException) -> bool:
    """Return whether an error is one of wrong code, which raises again; Ray's errors inherit from their causes."""
    return isinstance(error, BROKEN) and not isinstance(error, OSError | UnicodeError | json.JSONDecodeError)


def last_error(log: str | os.PathLike[str], begin: int = 0) -> list[str]:
    """Return the end of the last traceback in a run's output that shows a cause; without one, the last lines that name
    an error, or else the last lines: at most :data:`SHOWN_LINES`, without Ray's and vLLM's prefixes. The run's part of
    the file begins at byte ``begin``.
    """
    try:
        with Path(log).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(begin, size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return [f"(cannot read {log}: {error.strerror})"]
    plain: list[str] = []
    origins: dict[str, list[tuple[int, str]]] = {}  # numbered lines of each process, which Ray mixes
    for number, raw in enumerate(text.splitlines()):
        line = _REPEATED.sub("", _ANSI.sub("", raw)).rstrip()
        origin = _ORIGIN.match(line)
        line = _LEVEL.sub("", line[origin.end() :] if origin else line)
        origins.setdefault(origin[1] if origin else "", []).append((number, line))
        if line:
            plain.append(line)
    tracebacks = sorted(found for lines in origins.values() for found in _tracebacks(lines))
    causes = [lines for _, lines in tracebacks if not _AFTERMATH.match(lines[-1])]
    if tracebacks:
        lines = causes[-1] if causes else tracebacks[-1][1]
        return lines if len(lines) <= SHOWN_LINES else ["...", *lines[-(SHOWN_LINES - 1) :]]
    named = [line for line in plain if _ERROR_LINE.search(line)]
    return (named or plain or ["(the log is empty)"])[-SHOWN_LINES // 2 :]


def _tracebacks(lines: Sequence[tuple[int, str]]) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of the last line, and the lines, of each traceback of a process; those of ignored errors not."""
    text = "\n".join(line for _, line in lines)
    for match in _TRACEBACK.finditer(text):
        before = text[: match.start()].rstrip().rpartition("\n")[2]
        if not before.startswith("Exception ignored in"):
            last = text.count("\n", 0, match.end())
            yield lines[last][0], [line for line in match[0].splitlines() if line]
