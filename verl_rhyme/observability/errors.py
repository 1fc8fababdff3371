"""Cause of a failure, from the mixed log of Ray, verl and vLLM or from an exception."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
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
_TRACEBACK = "Traceback (most recent call last):"
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:\([\w.]+\))?(?::|$)")
_NAMED_EXCEPTION = re.compile(r"^[\w.]*(?:Error|Exception|Interrupt|Exit)(?:\([\w.]+\))?(?::|$)")
_OF_A_TASK = re.compile(r"^[\w.]*RayTaskError\((\w+)\)")
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


def _type_of(exception: str) -> str:
    return exception.partition(":")[0].rpartition(".")[2]


@dataclass
class _Traceback:
    lines: list[str]
    ignored: bool
    end: int = 0
    exception: str = ""

    @property
    def is_cause(self) -> bool:
        return not self.ignored and bool(self.exception) and not _AFTERMATH.match(self.exception)


@dataclass
class _Origin:
    """Tracebacks of one process, whose lines Ray mixes with those of other processes."""

    open: _Traceback | None = None
    before: str = ""
    done: list[_Traceback] = field(default_factory=list)

    def add_line(self, line: str, number: int) -> None:
        if line == _TRACEBACK:
            self.open = _Traceback([], ignored=self.before.startswith("Exception ignored in"))
            self.done.append(self.open)
        elif self.open is not None and line and not line[0].isspace():
            # The remote frames and the remote exception follow Ray's exception, which names the latter.
            remote = _OF_A_TASK.match(self.open.exception)
            if (
                _EXCEPTION.match(line)
                if not self.open.exception
                else _NAMED_EXCEPTION.match(line) or (remote and _type_of(line) == remote[1])
            ):
                self.open.exception = line
            else:
                self.open = None
        if self.open is not None and line:
            self.open.lines.append(line)
            self.open.end = number
        self.before = line or self.before


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
    origins: dict[str, _Origin] = {}
    plain = []
    for number, raw in enumerate(text.splitlines()):
        line = _REPEATED.sub("", _ANSI.sub("", raw)).rstrip()
        origin = _ORIGIN.match(line)
        if origin:
            line = line[origin.end() :]
        line = _LEVEL.sub("", line)
        origins.setdefault(origin[1] if origin else "", _Origin()).add_line(line, number)
        if line.strip():
            plain.append(line)
    tracebacks = sorted((t for o in origins.values() for t in o.done if t.exception), key=lambda t: t.end)
    causes = [t for t in tracebacks if t.is_cause]
    if causes or tracebacks:
        lines = (causes or tracebacks)[-1].lines
        return lines if len(lines) <= SHOWN_LINES else ["...", *lines[-(SHOWN_LINES - 1) :]]
    named = [line for line in plain if _ERROR_LINE.search(line)]
    return (named or plain or ["(the log is empty)"])[-SHOWN_LINES // 2 :]
