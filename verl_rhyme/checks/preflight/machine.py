"""GPUs, host memory and disk of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from verl_rhyme.history.share import available_memory

#: Assumed bytes of a GPU (A100 or H100) where no GPU is found and ``GPU_MEMORY_GB`` is not set.
ASSUMED_GPU = 80 << 30

#: Key of verl's config with the address of a Ray cluster.
ADDRESS = "ray_kwargs.ray_init.address"

#: Key of verl's config with the bytes of Ray's object store.
OBJECT_STORE = "ray_kwargs.ray_init.object_store_memory"

#: Types of file systems that several machines mount.
_NETWORK = {"afs", "beegfs", "ceph", "cifs", "gpfs", "lustre", "nfs", "nfs4", "orangefs", "panfs", "smb3", "wekafs"}
_NETWORK |= {"9p", "cpfs", "gfs2", "ocfs2", "virtiofs"}
#: FUSE's local ones; others, such as fuse.s3fs, have a network behind them.
_LOCAL_FUSE = {"fuse.fuse-overlayfs", "fuse.lxcfs", "fuse.mergerfs", "fuse.ntfs-3g", "fuse.squashfuse", "fuse.unionfs"}


@dataclass(frozen=True)
class Machine:
    """Resources of this machine."""

    gpus: int  # that CUDA_VISIBLE_DEVICES does not hide
    gpu_bytes: int  # of the smallest GPU; without one, of ``GPU_MEMORY_GB`` or :data:`ASSUMED_GPU`
    gpu_source: str  # "nvidia-smi", "GPU_MEMORY_GB" or "assumed"
    host_bytes: int  # memory of this process, within its cgroup's limit
    host_free: int


def detect_machine() -> Machine:
    """Does not import torch. Raises ValueError if ``GPU_MEMORY_GB`` is not a number above 0."""
    sizes = _nvidia_smi()
    given = os.environ.get("GPU_MEMORY_GB")
    if given is not None and not (given.replace(".", "", 1).isdigit() and float(given) > 0):
        raise ValueError(f"GPU_MEMORY_GB={given!r} is not a number of GiB above 0: set it to, for example, 80")
    if sizes:
        memory, source = min(sizes), "nvidia-smi"
    elif given is not None:
        memory, source = int(float(given) * (1 << 30)), "GPU_MEMORY_GB"
    else:
        memory, source = ASSUMED_GPU, "assumed"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = len(sizes) if visible is None else len([each for each in visible.split(",") if each.strip()])
    return Machine(min(len(sizes), shown), memory, source, _host_bytes(), available_memory())


def in_cluster(address: str | None) -> bool:
    """Whether ``ray.init(address)`` connects to a running cluster, whose nodes may differ from this machine."""
    # Ray's file of a cluster that ``ray start`` made on this machine (``ray._common.utils``)
    file = Path(os.environ.get("RAY_TMPDIR", os.environ.get("TMPDIR", "/tmp")), "ray", "ray_current_cluster")
    return bool(address or os.environ.get("RAY_ADDRESS")) or file.exists()


def network_file_system(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> str | None:
    """Return the type of the network file system of a folder, which may not exist yet; ``None`` if it is local."""
    path, kind = folder.expanduser().resolve(), ""
    for line in mounts.read_text().splitlines() if mounts.is_file() else ():
        if len(fields := line.split()) < 3:
            continue
        at = Path(fields[1].replace("\\040", " "))
        if path.is_relative_to(at):  # a later mount hides earlier ones
            kind = fields[2]
    return kind if kind in _NETWORK or (kind.startswith("fuse.") and kind not in _LOCAL_FUSE) else None


def free_disk(folder: Path) -> tuple[Path, int]:
    """Return the nearest existing parent of a folder that may not exist yet, and its free bytes."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    return existing, shutil.disk_usage(existing).free


def write_into(folder: Path) -> None:
    """Write a temporary file, because ``os.access`` passes root where no file can be created. Raises OSError."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"verl-rhyme")
        file.flush()


def can_write(folder: Path) -> bool:
    folder = folder.absolute()
    try:
        write_into(next(path for path in (folder, *folder.parents) if os.path.lexists(path)))  # fails for a file
    except OSError:
        return False
    return True


def object_store(given: int | None = None, host_bytes: int | None = None) -> int:
    """Return the bytes of Ray's object store; ``None``: Ray's default for so much memory, or for this machine's."""
    return int(given) if given else min(int(0.3 * (host_bytes or _host_bytes())), 200_000_000_000)


def _nvidia_smi() -> list[int]:
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return []
    return [int(line) << 20 for line in found.stdout.split() if line.isdigit()]


def _host_bytes() -> int:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    bound = limit.read_text().strip() if limit.is_file() else "max"
    return total if bound == "max" else min(total, int(bound))
