"""verl's own CPU tests, which its wheel ships, give the same result with the plugin as without.

In two parts: ten of them start a Ray cluster each, take nearly all of the time, and run with RHYME_SLOW=1.
"""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from importlib.metadata import distribution

import pytest

from tests.conftest import ONLY_SLOW

VERL = distribution("verl")

#: (they start Ray, their number, how many of them may fail or be skipped, if they do so without the plugin, too)
PARTS = [
    pytest.param(True, 10, 5, id="Ray", marks=[pytest.mark.slow, ONLY_SLOW]),  # minutes; time limits of their own
    pytest.param(False, 307, 2, id="no Ray", marks=pytest.mark.slow),
]


def verls_tests(on_ray: bool) -> dict[str, str]:
    """Module to file."""
    files = sorted(str(path) for path in VERL.files or [] if path.match("*_on_cpu.py"))
    return {
        file.removesuffix(".py").replace("/", "."): str(VERL.locate_file(file))
        for file in files
        if file.startswith("tests/") and file.startswith("tests/single_controller/") == on_ray
    }


def outcomes(plugins, folder, on_ray, only=()):
    """Test name to outcome; ``only`` those of these names."""
    files = verls_tests(on_ray)
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


@pytest.mark.timeout(1300)
@pytest.mark.parametrize(("on_ray", "tests", "odd_ones"), PARTS)
def test_same_outcomes_with_and_without_the_plugin(tmp_path, on_ray, tests, odd_ones):
    """What passes with the plugin needs no comparison; all else has to end without it as it does with it."""
    folder = {name: tmp_path / name for name in ("all", "without", "with")}
    for path in folder.values():
        path.mkdir()
    found = outcomes("verl_rhyme", folder["all"], on_ray)
    assert len(found) == tests, f"verl 0.9.1 has {tests} such tests that need no GPU"
    assert list(found.values()).count("passed") >= tests - odd_ones, found
    if odd := {name for name, state in found.items() if state != "passed"}:
        # One after the other: on a busy machine verl's Ray tests run into their time limits.
        without = outcomes("none", folder["without"], on_ray, odd)
        with_plugin = outcomes("verl_rhyme", folder["with"], on_ray, odd)
        assert odd <= without.keys() == with_plugin.keys()
        assert {name: (with_plugin[name], state) for name, state in without.items() if with_plugin[name] != state} == {}
