"""What ``history.max_bytes=null`` stands for on a node: its part of what disk and memory have free."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from verl_rhyme.config import AUTOMATIC_HISTORY_SHARE
from verl_rhyme.history import environment
from verl_rhyme.history.owner import Owner

_CGROUPS = Path("/sys/fs/cgroup")
#: Of a cgroup's memory, version 2 and 1: its limit, what is used of it, and which lines of ``memory.stat`` are files in
#: memory, which count as used and are given back under pressure.
_MEMORY = (
    ("memory.max", "memory.current", ("active_file", "inactive_file")),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
)


def available_memory() -> int:
    """Bytes that processes here may still take, within the cgroup; what the kernel would give back counts."""
    with open("/proc/meminfo") as meminfo:
        free = next(int(line.split()[1]) << 10 for line in meminfo if line.startswith("MemAvailable"))
    for limit, used, files in _MEMORY:
        with suppress(OSError, ValueError):  # of the other version, or "max"
            bound, taken = (int((_CGROUPS / name).read_text()) for name in (limit, used))
            lines = (_CGROUPS / limit).with_name("memory.stat").read_text().splitlines()
            cached = sum(int(size) for name, size in map(str.split, lines) if name in files)
            free = min(free, bound - max(0, taken - cached))
    return max(0, free)


def _held(folder: Path) -> int:
    """Bytes of the stores in a folder, whose writer may just be replacing one."""
    held = 0
    for inner, _, files in os.walk(folder):
        if environment.DATA_FILE in files:
            with suppress(FileNotFoundError):
                held += os.stat(os.path.join(inner, environment.DATA_FILE)).st_size
    return held


def automatic(folder: Path, living: Collection[Path]) -> tuple[int, str]:
    """Bytes for the store in ``folder``, at least 1 MiB, and how they came about, in words.

    The stores that are seen from here lie on one file system, and those of this kernel in one memory: together they
    take :data:`AUTOMATIC_HISTORY_SHARE` of each, in equal parts. What they hold already counts as free disk, so that
    the answer is the same for the first and for the last that asks.

    Args:
        folder: This node's, which is there.
        living: Where those of all nodes are, this one among them or not; a folder that no writer signed is no store.
    """
    signed = {other: owner for other in living if other.is_dir() and (owner := Owner.of(other)) is not None}
    seen = {folder, *signed}
    held = sum(map(_held, seen))
    boot = Owner.here("").boot
    near = 1 + sum(owner.boot == boot for other, owner in signed.items() if other != folder)
    disk, memory = shutil.disk_usage(folder).free + held, available_memory()
    bound = max(1 << 20, int(AUTOMATIC_HISTORY_SHARE * min(disk / len(seen), memory / near)))
    told = (
        f"{bound / (1 << 30):.2f} GiB, {AUTOMATIC_HISTORY_SHARE:.0%} of the smaller of {disk / (1 << 30):.1f} GiB of "
        f"free disk, shared by {len(seen)}, and {memory / (1 << 30):.1f} GiB of free memory, shared by {near}"
    )
    return bound, told
