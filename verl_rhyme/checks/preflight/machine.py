"""What this machine has: GPUs, host memory, disk."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

#: Taken for a GPU's memory, in bytes, where none is seen and ``GPU_MEMORY_GB`` is not set: an A100's or H100's.
ASSUMED_GPU = 80 << 30


@dataclass(frozen=True)
class Machine:
    """What the checks compare with; bytes.

    Attributes:
        gpus: Seen on this machine.
        gpu_bytes: Of the smallest one; of ``GPU_MEMORY_GB``, or :data:`ASSUMED_GPU`, where none is seen.
        gpu_source: Where ``gpu_bytes`` is from: "nvidia-smi", "GPU_MEMORY_GB" or "assumed".
        host_bytes, host_free: Memory that this process may use (its cgroup's limit counts), all and free.
    """

    gpus: int
    gpu_bytes: int
    gpu_source: str
    host_bytes: int
    host_free: int


def look() -> Machine:
    """This machine; imports no torch.

    Raises:
        ValueError: ``GPU_MEMORY_GB`` is no number above 0.
    """
    sizes = _nvidia_smi()
    asked = os.environ.get("GPU_MEMORY_GB")
    if asked is not None and not (asked.replace(".", "", 1).isdigit() and float(asked) > 0):
        raise ValueError(f"GPU_MEMORY_GB={asked!r} is no number of GiB: set it to, for example, 80")
    if sizes:
        memory, source = min(sizes), "nvidia-smi"
    elif asked is not None:
        memory, source = int(float(asked) * (1 << 30)), "GPU_MEMORY_GB"
    else:
        memory, source = ASSUMED_GPU, "assumed"
    return Machine(len(sizes), memory, source, *_host())


def free_disk(folder: Path) -> tuple[Path, int]:
    """The nearest existing parent of a folder that may not exist yet, and the bytes free there."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    return existing, shutil.disk_usage(existing).free


def can_write(folder: Path) -> bool:
    """A folder that may not exist yet can be made and written."""
    try:
        tempfile.TemporaryFile(dir=free_disk(folder)[0]).close()  # root has permission where nothing can be made
    except OSError:
        return False
    return True


def _nvidia_smi() -> list[int]:
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return []
    return [int(line) << 20 for line in found.stdout.split() if line.isdigit()]


def _host() -> tuple[int, int]:
    with open("/proc/meminfo") as meminfo:
        fields = {name: int(rest.split()[0]) << 10 for name, rest in (line.split(":", 1) for line in meminfo)}
    total, free = fields["MemTotal"], fields["MemAvailable"]
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and limit.read_text().strip() != "max":
        bound = int(limit.read_text())
        total, free = min(total, bound), min(free, bound - int(used.read_text()))
    return total, free
