"""What ``history.max_bytes=null`` stands for on a node: a half of what disk or memory have free."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from verl_rhyme.config import HistoryConfig
from verl_rhyme.history import environment

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


def automatic(folder: Path) -> int:
    """Bytes for the history in a folder that is there; what a dead writer's store holds there counts as free."""
    held = sum(file.stat().st_size for file in folder.glob(f"*/{environment.DATA_FILE}"))
    return HistoryConfig().bound(shutil.disk_usage(folder).free + held, available_memory())
