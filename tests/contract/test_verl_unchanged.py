"""verl's own CPU tests, which its wheel ships, give the same result with the plugin as without."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distribution
from pathlib import Path

import pytest


def verls_tests():
    wheel = distribution("verl")
    return sorted(
        str(wheel.locate_file(path))
        for path in wheel.files or []
        if str(path).startswith("tests/") and path.match("*_on_cpu.py")
    )


def outcomes(plugins, folder):
    """Test name to outcome."""
    report = folder / f"{plugins}.xml"
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(folder)),
        *("--import-mode=importlib", "--timeout=300", f"--junit-xml={report}", *verls_tests()),
    ]
    env = {name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"}  # as verl runs them
    subprocess.run(
        command,
        cwd=folder,
        env={**env, "VERL_USE_EXTERNAL_PLUGINS": plugins},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=1200,
    )
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        states = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        found[f"{case.get('classname')}::{case.get('name')}"] = states[0] if states else "passed"
    return found


@pytest.mark.timeout(1300)
def test_same_outcomes_with_and_without_the_plugin(tmp_path):
    folders = {plugins: tmp_path / plugins for plugins in ("none", "verl_rhyme")}
    for folder in folders.values():
        Path(folder).mkdir()
    with ThreadPoolExecutor(2) as pool:
        without, with_plugin = pool.map(lambda item: outcomes(*item), folders.items())
    assert sum(state == "passed" for state in without.values()) > 400, "verl's tests did not run"
    changed = {
        name: (state, with_plugin.get(name)) for name, state in without.items() if with_plugin.get(name) != state
    }
    assert changed == {}
    assert with_plugin.keys() == without.keys()
