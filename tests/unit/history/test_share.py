"""What a node's disk and memory have free, beside others and within a cgroup."""

import io
import os
import shutil

import pytest

from verl_rhyme.history import share

GIB = 1 << 30


def cgroup(folder, version, limit, used, files):
    """A cgroup's memory as the kernel tells it, GiB."""
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


@pytest.mark.parametrize("version", [1, 2])
def test_files_that_the_kernel_keeps_in_memory_are_not_taken(cgroups, version):
    """A model's weights, read from files, fill a container's memory to its limit."""
    cgroup(cgroups, version, 32, 31, 24)
    assert share.available_memory() == 25 * GIB


def test_without_a_limit_it_is_the_machines(cgroups):
    assert share.available_memory() == 64 * GIB
    cgroup(cgroups, 2, "max", 31, 24)
    assert share.available_memory() == 64 * GIB


def test_a_store_that_is_just_replaced_by_its_writer_is_no_error(tmp_path, monkeypatch):
    for name in ("env-0001", "env-0002"):
        (tmp_path / "a" / name).mkdir(parents=True)
        (tmp_path / "a" / name / "data.mdb").write_bytes(b"x" * 4096)
    for call in ("scandir", "stat"):
        original, first = getattr(os, call), tmp_path / "a" / "env-0001"

        def vanishing(path, *args, original=original, first=first, **kwargs):
            if str(path).startswith(str(first)):
                shutil.rmtree(first, ignore_errors=True)
            return original(path, *args, **kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(os, call, vanishing)
            bound, told = share.automatic(tmp_path / "a", {tmp_path / "a"})
        assert bound > 1 << 20
        assert "shared by 1" in told
        first.mkdir(exist_ok=True)
        (first / "data.mdb").write_bytes(b"x" * 4096)


def test_what_else_lies_in_the_users_own_folder_takes_no_part(tmp_path, monkeypatch):
    """``history.dir`` may hold data sets and other runs' left-overs."""
    monkeypatch.setattr(share, "available_memory", lambda: 1 << 50)
    (tmp_path / "node").mkdir()
    (tmp_path / "photos" / "2024").mkdir(parents=True)
    walked, walk = [], os.walk
    monkeypatch.setattr(os, "walk", lambda folder: walked.append(folder) or walk(folder))
    alone, _ = share.automatic(tmp_path / "node", ())
    bound, told = share.automatic(tmp_path / "node", list(tmp_path.iterdir()))
    assert bound == pytest.approx(alone, rel=0.01)
    assert "shared by 1" in told
    assert set(walked) == {tmp_path / "node"}
