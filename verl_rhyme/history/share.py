"""What ``history.max_bytes=null`` stands for on a node: its part of what disk and memory have free."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

from verl_rhyme.config import AUTOMATIC_HISTORY_SHARE
from verl_rhyme.history import environment
from verl_rhyme.history.owner import Owner


def available_memory() -> int:
    """Bytes that processes here may still take, within the cgroup; what the kernel would give back counts."""
    with open("/proc/meminfo") as meminfo:
        free = next(int(line.split()[1]) << 10 for line in meminfo if line.startswith("MemAvailable"))
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and limit.read_text().strip() != "max":
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return max(0, free)


def automatic(folder: Path, living: Collection[Path]) -> tuple[int, str]:
    """Bytes for the store in ``folder``, at least 1 MiB, and how they came about, in words.

    The stores that are seen from here lie on one file system, and those of this kernel in one memory: together they
    take :data:`AUTOMATIC_HISTORY_SHARE` of each, in equal parts. What they hold already counts as free disk, so that
    the answer is the same for the first and for the last that asks.

    Args:
        folder: This node's, which is there.
        living: Those of all nodes, this one among them or not.
    """
    seen = {folder, *(other for other in living if other.is_dir())}
    held = sum(file.stat().st_size for other in seen for file in other.rglob(environment.DATA_FILE))
    boot = Owner.here("").boot
    near = sum(other == folder or ((owner := Owner.of(other)) is not None and owner.boot == boot) for other in seen)
    disk, memory = shutil.disk_usage(folder).free + held, available_memory()
    bound = max(1 << 20, int(AUTOMATIC_HISTORY_SHARE * min(disk / len(seen), memory / near)))
    told = (
        f"{bound / (1 << 30):.2f} GiB, {AUTOMATIC_HISTORY_SHARE:.0%} of the smaller of {disk / (1 << 30):.1f} GiB of "
        f"free disk, shared by {len(seen)}, and {memory / (1 << 30):.1f} GiB of free memory, shared by {near}"
    )
    return bound, told
