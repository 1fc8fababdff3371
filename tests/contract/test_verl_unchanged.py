"""verl's own CPU tests, which its wheel ships, give the same result with the plugin as without."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from importlib.metadata import distribution

import pytest

VERL = distribution("verl")

#: Without those that start a Ray cluster each.
TESTS, ODD_ONES = 307, 2  # how many may fail or be skipped, if they do so without the plugin, too


def verls_tests() -> dict[str, str]:
    """Module to file."""
    files = sorted(str(path) for path in VERL.files or [] if path.match("*_on_cpu.py"))
    return {
        file.removesuffix(".py").replace("/", "."): str(VERL.locate_file(file))
        for file in files
        if file.startswith("tests/") and not file.startswith("tests/single_controller/")
    }


def outcomes(plugins, folder, only=()):
    """Test name to outcome; ``only`` those of these names."""
    files = verls_tests()
    if only:
        files = {module: file for module, file in files.items() if any(name.startswith(module) for name in only)}
    names = {name.split("::")[-1].split("[")[0] for name in only}
    report = folder / f"{plugins}.xml"
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull),
        # Relative to verl's own root, or the names of the tests lose their modules and hide each other.
        *("--rootdir", str(VERL.locate_file("")), "--import-mode=importlib"),
        *("--timeout=300", f"--junit-xml={report}", *files.values()),
        *(("-k", " or ".join(names)) if names else ()),
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


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_same_outcomes_with_and_without_the_plugin(tmp_path):
    """What passes with the plugin needs no comparison; all else has to end without it as it does with it."""
    folder = {name: tmp_path / name for name in ("all", "without", "with")}
    for path in folder.values():
        path.mkdir()
    found = outcomes("verl_rhyme", folder["all"])
    assert len(found) == TESTS, f"verl 0.9.1 has {TESTS} such tests that need no GPU"
    assert list(found.values()).count("passed") >= TESTS - ODD_ONES, found
    if odd := {name for name, state in found.items() if state != "passed"}:
        without = outcomes("none", folder["without"], odd)
        with_plugin = outcomes("verl_rhyme", folder["with"], odd)
        assert odd <= without.keys() == with_plugin.keys()
        assert {name: (with_plugin[name], state) for name, state in without.items() if with_plugin[name] != state} == {}
