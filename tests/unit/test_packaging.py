"""Each way of installing finds every patch and hydra group; checkout and wheel keep patches in different folders."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from verl_rhyme import patches

pytestmark = pytest.mark.slow  # each way of installing starts a separate Python

ROOT = Path(__file__).parents[2]
TESTING = {path.stem for path in (ROOT / "verl_rhyme" / "testing").glob("*.py")}
LEFT_OUT = (".git", ".venv*", ".*_cache", "__pycache__", "runs", "tests", "benchmarks", "examples", "docs")

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
    "groups": groups.get_path()[-1].path.removeprefix("file://"),
}))
"""


def build(what: str, source: Path, folder: Path) -> Path:
    """Build the wheel or editable wheel of ``source`` with the backend that ``pip install`` calls."""
    pytest.importorskip("hatchling", reason="the build backend is not installed (extra dev)")
    code = f"from hatchling import build; print(build.build_{what}({str(folder)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.split()[-1]


@pytest.mark.parametrize("kind", ["editable", "wheel"])
def test_every_patch_and_group_is_found(kind: str, tmp_path: Path) -> None:
    checkout, env = tmp_path / "checkout", tmp_path / "env"
    shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(*LEFT_OUT))
    venv.create(env, with_pip=False, symlinks=True)
    [site] = env.glob("lib/python*/site-packages")
    # Python ignores the .pth files in a folder that a .pth file adds, including that of verl-rhyme
    (site / "zz_dependencies.pth").write_text(sysconfig.get_path("purelib"))
    (site / "patches").mkdir()  # of another project
    (site / "patches" / "verl_gloo_backend.py").write_text("raise ImportError('another project')")
    with zipfile.ZipFile(build(kind, checkout, tmp_path)) as archive:
        archive.extractall(site)
    if kind == "wheel":
        shutil.rmtree(checkout)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [env / "bin" / "python", "-c", LOOK]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    package = (site if kind == "wheel" else checkout) / "verl_rhyme"
    folder = package / "patches" if kind == "wheel" else checkout / "patches"
    assert seen["patches"] == {
        patch.name: str((package / "testing" if patch.name in TESTING else folder) / f"{patch.name}.py")
        for patch in patches.ALL
    }
    assert seen["groups"] == str(package / "conf")
    shipped = {
        path.relative_to(ROOT) for kind in ("css", "js", "yaml") for path in ROOT.glob(f"verl_rhyme/**/*.{kind}")
    }
    assert {path for path in shipped if not (package.parent / path).is_file()} == set()
