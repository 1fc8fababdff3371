"""Each way of installing finds every patch and hydra group; checkout and wheel keep patches in different folders."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from verl_rhyme import patches

pytestmark = pytest.mark.slow  # each way of installing starts a separate Python

ROOT = Path(__file__).parents[2]
TESTING = {path.stem for path in (ROOT / "verl_rhyme" / "testing").glob("*.py")}
SHIPPED = ("verl_rhyme", "hydra_plugins", "patches", "pyproject.toml", "README.md", "LICENSE", ".gitignore")

LOOK = """
import json, sys
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra_plugins.verl_rhyme.search_path import VerlRhymeSearchPath
from verl_rhyme import patches
found = {module.PATCH.name: module for module in list(sys.modules.values()) if hasattr(module, "PATCH")}
groups = ConfigSearchPathImpl()
VerlRhymeSearchPath().manipulate_search_path(groups)
print(json.dumps({
    "patches": {name: module.__file__ for name, module in found.items()},
    "searched": list(patches.__path__),
    "groups": groups.get_path()[-1].path.removeprefix("file://"),
}))
"""


def build(what: str, source: Path, folder: Path) -> Path:
    """Build the wheel, editable wheel or sdist of ``source`` with the backend that ``pip install`` calls."""
    pytest.importorskip("hatchling", reason="the build backend is not installed (extra dev)")
    code = f"from hatchling import build; print(build.build_{what}({str(folder)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.split()[-1]


class Machine:
    """A checkout of verl-rhyme, and an environment with its dependencies, but without verl-rhyme."""

    def __init__(self, folder: Path) -> None:
        self.checkout, self.folder = folder / "checkout", folder
        self.checkout.mkdir()
        for name in SHIPPED:
            source, copy = ROOT / name, self.checkout / name
            if source.is_dir():
                shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, copy)
        venv.create(folder / "env", with_pip=False, symlinks=True)
        [self.site] = (folder / "env").glob("lib/python*/site-packages")
        # Python ignores the .pth files in a folder that a .pth file adds, including that of verl-rhyme
        (self.site / "zz_dependencies.pth").write_text(sysconfig.get_path("purelib"))
        (self.site / "patches").mkdir()  # of another project
        (self.site / "patches" / "verl_gloo_backend.py").write_text("raise ImportError('another project')")

    def install(self, wheel: Path) -> None:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(self.site)

    def look(self, **environment: str) -> dict:
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
        command = [self.folder / "env" / "bin" / "python", "-c", LOOK]
        done = subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


def from_path(machine: Machine) -> dict:
    return machine.look(PYTHONPATH=str(machine.checkout))


def editable(machine: Machine) -> dict:
    machine.install(build("editable", machine.checkout, machine.folder))
    assert not (machine.site / "verl_rhyme").exists(), "copies would become outdated"
    return machine.look()


def wheel(machine: Machine) -> dict:
    machine.install(build("wheel", machine.checkout, machine.folder))
    shutil.rmtree(machine.checkout)
    return machine.look()


def sdist(machine: Machine) -> dict:
    with tarfile.open(build("sdist", machine.checkout, machine.folder)) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)  # from 3.11.4 on
        archive.extractall(machine.folder / "sdist")
    [source] = (machine.folder / "sdist").iterdir()
    machine.install(build("wheel", source, machine.folder))
    shutil.rmtree(machine.checkout)
    shutil.rmtree(source)
    return machine.look()


@pytest.mark.parametrize("way", [from_path, editable, wheel, sdist])
def test_every_patch_and_group_is_found(way: Callable[[Machine], dict], tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    checkout = way in (from_path, editable)
    package = (machine.checkout if checkout else machine.site) / "verl_rhyme"
    seen = way(machine)
    lie = machine.checkout / "patches" if checkout else package / "patches"
    assert seen["patches"] == {
        patch.name: str((package / "testing" if patch.name in TESTING else lie) / f"{patch.name}.py")
        for patch in patches.ALL
    }
    assert seen["searched"] == [str(package / "patches"), *([str(lie)] if checkout else [])]
    assert seen["groups"] == str(package / "conf")
    assert {path.name for path in (package / "observability" / "page").glob("page.*")} == {"page.css", "page.js"}
    assert {path.stem for path in Path(seen["groups"]).glob("rhyme/*.yaml")} == {
        path.stem for path in ROOT.glob("verl_rhyme/conf/rhyme/*.yaml")
    }


def test_the_checkout_has_no_links() -> None:
    """Some file systems turn each link of a checkout into a text file."""
    tracked = subprocess.run(["git", "-C", ROOT, "ls-files", "-s"], capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    assert [line for line in tracked.stdout.splitlines() if line.startswith("120000")] == []
