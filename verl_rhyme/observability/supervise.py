"""Command in a separate session that leaves no process behind, on Linux."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

#: Seconds between an interrupt and the kill.
GRACE_S = 15.0

#: Seconds for processes that outlive the command (Ray's daemons) to end by themselves.
LINGER_S = 5.0

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1


class Supervised:
    """Running command whose process group receives SIGINT, SIGTERM and SIGHUP; a context manager of the main thread.

    SIGHUP stays ignored if it was ignored before (under ``nohup`` a run outlives its terminal). The whole session is
    killed :data:`GRACE_S` after the first signal, or at the second one. Ray and vLLM start separate process groups, but
    never separate sessions. Output is appended to ``log``. Raises OSError if the command cannot be started.
    """

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.interrupted = False
        #: Message for the user; the reader clears it.
        self.notice: str | None = None
        self._kill_at: float | None = None
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
                close_fds=False,  # the lock of the run folder (checks/run_lock.py)
                preexec_fn=_child_setup(),
            )
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Supervised:
        ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
        self._before = {number: signal.signal(number, self._forward) for number in _FORWARDED if number not in ignored}
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._process.poll() is None:  # the reader failed
                self._send(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(GRACE_S)
            self._sweep()
        finally:
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def wait(self, timeout: float) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
            return self.status
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self._kill_session()
        return None

    @property
    def status(self) -> int:
        """Exit status of the finished command, as in a shell: 128 + n after signal n."""
        code = self._process.wait()
        return code if code >= 0 else 128 - code

    def _forward(self, number: int, frame: FrameType | None) -> None:
        again = self.interrupted
        self.interrupted = True
        self._kill_at = time.monotonic() + (0 if again else GRACE_S)
        self.notice = None if again else f"stopping (at most {GRACE_S:.0f} s; interrupt again to kill) ..."
        self._send(signal.Signals(number))

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _sweep(self) -> None:
        deadline = time.monotonic() + LINGER_S
        while session_processes(self._process.pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        self._kill_session()

    def _kill_session(self) -> None:
        """Kill Python's resource trackers last: they remove shared memory when its users are gone."""
        for spare_trackers in (True, False):
            left = session_processes(self._process.pid)
            killed = [pid for pid in left if not (spare_trackers and _is_resource_tracker(pid))]
            for pid in killed:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            deadline = time.monotonic() + (2.0 if left else 0.0)
            while time.monotonic() < deadline and set(session_processes(self._process.pid)) - {self._process.pid}:
                time.sleep(0.05)


def session_processes(session: int) -> list[int]:
    members = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, ValueError):
                # pid (name) state ppid pgrp session ...; the name may contain ")"
                fields = Path(f"/proc/{entry}/stat").read_text(errors="replace").rpartition(")")[2].split()
                if int(fields[3]) == session and fields[0] not in "ZX":
                    members.append(int(entry))
    return members


def _is_resource_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _child_setup() -> Callable[[], None]:
    libc = ctypes.CDLL(None)
    parent = os.getpid()

    def setup() -> None:
        # A shell starts background jobs with SIGINT ignored, which Python would inherit.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # end with the parent, even if it is killed
        if os.getppid() != parent:
            os._exit(1)

    return setup
