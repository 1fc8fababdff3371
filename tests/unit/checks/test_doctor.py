"""The doctor's checks of the history folder, and of packages that only some runs need."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl_rhyme import plugin
from verl_rhyme.checks import doctor, engine_packages
from verl_rhyme.checks.preflight import machine


def test_a_missing_history_folder_passes(tmp_path):
    assert [check.status for check in doctor.history_folder(tmp_path / "not" / "yet")] == ["ok"]


def test_a_symbolic_link_as_the_users_folder_fails(tmp_path):
    base = tmp_path / f"verl_rhyme-{os.getuid()}"
    base.symlink_to(tmp_path)
    assert [(check.name, check.status) for check in doctor.history_folder(base)] == [("history folder", "fail")]


def test_a_network_file_system_warns(tmp_path, monkeypatch):
    mounts = tmp_path / "mounts"
    mounts.write_text(
        f"/dev/vda / ext4 rw 0 0\nhome:/a {tmp_path}/my\\040home nfs4 rw 0 0\n"
        f"tmpfs {tmp_path}/my\\040home/local tmpfs rw 0 0\nlustre {tmp_path}/my lustre rw 0 0\n"
    )
    kinds = {"my home/new": "nfs4", "my home": "nfs4", "my home/local/new": None, "my": "lustre", "my house": None}
    assert {name: machine.network_file_system(tmp_path / name, mounts) for name in kinds} == kinds
    assert machine.network_file_system(tmp_path, tmp_path / "none") is None
    monkeypatch.setattr(doctor, "network_file_system", lambda folder: "nfs4")
    assert [check.status for check in doctor.history_folder(tmp_path)] == ["warn", "ok"]


@pytest.mark.parametrize(
    ("module", "missing", "status"),
    [
        ("verl.workers.engine.megatron.transformer_impl", "megatron", "ok"),
        ("verl.workers.engine.megatron.transformer_impl", "verl.workers.engine.megatron", "fail"),
        ("verl.workers.engine.fsdp.transformer_impl", "peft", "fail"),
    ],
)
def test_only_packages_of_megatron_may_be_missing(monkeypatch, module, missing, status):
    def load(name):
        if name == module:
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr(importlib, "import_module", load)
    monkeypatch.setattr(plugin, "FAILURES", [])
    [check] = doctor._guarded("plugin", doctor._plugin_failures)
    assert (check.status, f"No module named {missing!r}" in check.detail) == (status, True)


@pytest.mark.parametrize(
    "missing", [(), engine_packages.BRIDGES[:1], engine_packages.BRIDGES[1:], engine_packages.BRIDGES]
)
def test_one_of_the_two_bridges_of_megatron_is_enough(monkeypatch, missing):
    monkeypatch.setattr(
        engine_packages, "missing", lambda packages: {each: each.module for each in missing if each in packages}
    )
    warned = [check.detail for check in doctor._engines() if check.status == "warn"]
    assert warned == (["megatron.bridge", "mbridge"] if len(missing) == 2 else [])


@pytest.mark.slow
@pytest.mark.parametrize("writable", [True, False])
def test_numbas_cache(tmp_path, writable):
    """Without a place for it, the doctor runs and the failing imports say the same words."""
    (tmp_path / "file").touch()
    folder = tmp_path / ("cache" if writable else "file/cache")  # root may write into any folder
    script = (
        "from verl_rhyme.checks import doctor\n"
        "print(*doctor._guarded('numba cache', doctor._numba_cache))\n"
        "import verl_rhyme.engine.draw"
    )
    found = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "NUMBA_CACHE_DIR": str(folder), "NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator"},
        capture_output=True,
        text=True,
    )
    if writable:
        assert (found.returncode, Path(found.stdout.removeprefix("numba cache: ").strip()).parent) == (0, folder)
        return
    words = f"numba's cache of compiled functions cannot be written: tried NUMBA_CACHE_DIR={folder}, "
    assert words in found.stdout
    assert " -> set NUMBA_CACHE_DIR to a folder that can be written" in found.stdout
    assert found.returncode == 1
    assert words in found.stderr.splitlines()[-1]
    assert "; set NUMBA_CACHE_DIR to a folder" in found.stderr.splitlines()[-1]
