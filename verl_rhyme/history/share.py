"""Value of ``history.max_bytes=null`` on a node: half of the free disk or memory, whichever is less."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from verl_rhyme.history import environment

_CGROUPS = Path("/sys/fs/cgroup")
#: Files of a cgroup's memory, versions 2 and 1: limit, usage, and the lines of ``memory.stat`` for cached files. Cached
#: files count as used, but the kernel frees them under pressure.
_MEMORY = (
    ("memory.max", "memory.current", ("active_file", "inactive_file")),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
)


def available_memory() -> int:
    """Return the free bytes of memory within the cgroup, including memory that the kernel can reclaim."""
    with open("/proc/meminfo") as meminfo:
        free = next(int(line.split()[1]) << 10 for line in meminfo if line.startswith("MemAvailable"))
    for limit, used, files in _MEMORY:
        with suppress(OSError, ValueError):  # files of the other version, or the limit "max"
            bound, taken = (int((_CGROUPS / name).read_text()) for name in (limit, used))
            lines = (_CGROUPS / limit).with_name("memory.stat").read_text().splitlines()
            cached = sum(int(size) for name, size in map(str.split, lines) if name in files)
            free = min(free, bound - max(0, taken - cached))
    return max(0, free)


def automatic(folder: Path, object_store: int) -> int:
    """Return the bytes for a history in a folder; a dead writer's store there counts as free space, and stays."""
    held = sum(file.stat().st_size for file in folder.glob(f"*/{environment.DATA_FILE}"))
    return max(held, bound(folder, shutil.disk_usage(folder).free + held, object_store))


def bound(folder: Path, free: int, object_store: int) -> int:
    """Return the bytes for a history in a folder, which may not exist yet, with ``free`` bytes on its disk.

    In memory the node's Ray object store of ``object_store`` bytes, which fills later, needs the same room.
    """
    room = min(free, available_memory())
    return max(1 << 20, (room - object_store if in_memory(folder) else room) // 2)


def in_memory(folder: Path) -> bool:
    """Return whether a folder, or its next existing parent, is on a disk in memory."""
    path = os.path.realpath(folder)
    with open("/proc/self/mounts") as mounts:
        kinds = {at: kind for _, at, kind, *_ in map(str.split, mounts)}
    at = max((at for at in kinds if Path(path).is_relative_to(at)), key=len, default="")
    return kinds.get(at) in ("tmpfs", "ramfs")
