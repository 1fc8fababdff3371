"""Free disk and memory of a node, next to other stores and within a cgroup."""

import io
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from verl_rhyme.history import share

GIB = 1 << 30


def cgroup(folder, version, limit, used, files):
    """Write the files of a cgroup's memory, sizes in GiB."""
    prefix = "" if version == 2 else "total_"
    names = ("memory.max", "memory.current")
    if version == 1:
        folder, names = folder / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        folder.mkdir()
    for name, size in zip(names, (limit, used), strict=True):
        (folder / name).write_text(f"{size if size == 'max' else int(size * GIB)}\n")
    lines = {"file": 9, f"{prefix}inactive_file": files * GIB // 4, f"{prefix}active_file": files * GIB * 3 // 4}
    (folder / "memory.stat").write_text("".join(f"{name} {size}\n" for name, size in lines.items()))


@pytest.fixture
def cgroups(tmp_path, monkeypatch):
    monkeypatch.setattr(share, "_CGROUPS", tmp_path)
    machine = f"MemTotal: 999 kB\nMemAvailable: {64 << 20} kB\n"
    monkeypatch.setattr(share, "open", lambda _: io.StringIO(machine), raising=False)
    return tmp_path


@pytest.mark.parametrize(("version", "limit", "free"), [(1, 32, 25), (2, 32, 25), (2, "max", 64)])
def test_free_memory_is_bounded_by_the_limit_and_includes_cached_files(cgroups, version, limit, free):
    """The page cache of a model's weight files can fill a container's memory to its limit."""
    assert share.available_memory() == 64 * GIB, "without a limit the machine's"
    cgroup(cgroups, version, limit, 31, 24)
    assert share.available_memory() == free * GIB


@pytest.fixture
def free(monkeypatch, request):
    """Free disk and memory, in GiB."""
    disk, memory = request.param
    monkeypatch.setattr(share.shutil, "disk_usage", lambda folder: SimpleNamespace(free=disk * GIB))
    monkeypatch.setattr(share, "available_memory", lambda: memory * GIB)
    return request.param


@pytest.mark.parametrize("free", [(1, 8), (8, 1)], indirect=True)
def test_a_history_takes_half_of_the_free_space(tmp_path, monkeypatch, free):
    monkeypatch.setattr(share, "in_memory", lambda folder: False)
    assert share.automatic(tmp_path, GIB) == GIB // 2, "Ray's object store takes none of the disk"
    file = tmp_path / "env-0001" / "data.mdb"
    file.parent.mkdir()
    file.write_bytes(bytes(8192))
    assert share.automatic(tmp_path, 0) == (GIB + 8192 * (free[0] < free[1])) // 2, "a killed writer's file"
    os.truncate(file, 9 * GIB)
    assert share.automatic(tmp_path, 0) == 9 * GIB, "its successor has the same room"


@pytest.mark.parametrize("free", [(8, 6), (6, 8)], indirect=True)
def test_a_history_in_memory_leaves_room_for_rays_object_store(free):
    assert share.in_memory(Path("/dev/shm/verl_rhyme-1/not/there/yet"))
    assert not share.in_memory(Path("/proc/self"))
    assert share.automatic(Path("/dev/shm"), 4 * GIB) == GIB
    assert share.automatic(Path("/dev/shm"), 100 * GIB) == 1 << 20
