"""Every seam matches the installed packages, and the doctor reports a patch that does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.conftest import ONLY_SLOW
from tests.contract.seam_check import Seam, check
from tests.contract.seams import SEAMS
from verl_rhyme.patches.conditions import vllm_runs_on_cpu

# The doctor in a separate process, after code that may break something.
DOCTOR = "{before}\nfrom verl_rhyme.cli import app\napp({arguments!r})"

# verl's platform must match the installed vLLM. verl detects a GPU, but not the CPU.
PLATFORM = "cpu" if vllm_runs_on_cpu() else ""

pytestmark = pytest.mark.xdist_group("doctor")  # each start of it takes seconds

BREAKAGE = "import hydra._internal.utils as m; m._run_app = lambda **_: None"


def run_doctor(before: str = "", arguments: tuple[str, ...] = ("doctor", "--json"), **env: str) -> Any:
    return subprocess.run(
        [sys.executable, "-c", DOCTOR.format(before=before, arguments=list(arguments))],
        env={**os.environ, "VERL_PLATFORM": PLATFORM, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", **env},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def healthy() -> Any:
    return run_doctor()


@pytest.mark.slow
def test_doctor_passes_here(healthy: Any) -> None:
    report = json.loads(healthy.stdout)
    failed = [check for check in report["checks"] if check["status"] == "fail"]
    assert failed == []
    assert healthy.returncode == 0
    assert report["ok"] is True
    assert sum(check["name"].startswith("patch ") and check["status"] == "ok" for check in report["checks"]) >= 6


@pytest.mark.slow
def test_doctor_names_what_is_broken() -> None:
    done = run_doctor(BREAKAGE)
    report = json.loads(done.stdout)
    assert done.returncode == 1
    assert report["ok"] is False
    [failed] = [check for check in report["checks"] if check["status"] == "fail"]
    assert failed["name"] == "patch hydra_run"
    assert failed["remedy"]


@pytest.mark.slow
@ONLY_SLOW
def test_doctor_without_the_plugin() -> None:
    done = run_doctor(arguments=("doctor",), VERL_USE_EXTERNAL_PLUGINS="none", COLUMNS="200")
    assert done.returncode == 1
    assert "VERL_USE_EXTERNAL_PLUGINS" in done.stdout
    assert "failures" in done.stdout


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.name)
def test_seams_have_their_known_shapes(seam: Seam) -> None:
    assert check(seam) is None, f"used for {seam.used_for}: adapt verl-rhyme, then this table"


def test_seams_are_named_once() -> None:
    assert len({seam.target for seam in SEAMS}) == len(SEAMS)


@pytest.mark.parametrize(
    ("target", "expected", "problem"),
    [
        ("json:loads", (), None),
        ("json:dumps", ("(obj, indent, ...)",), None),
        ("json:dumps", ("(obj, colour, ...)",), "takes no 'colour'"),
        ("json:load_all", (), "AttributeError"),
        ("no_such_module:x", (), "ModuleNotFoundError"),
        ("json.decoder:JSONDecoder.decode", ("(self, s, _w)",), None),
        ("json.decoder:JSONDecoder.decode", ("(self, s)",), "expected (self, s)"),
        ("json.decoder:JSONDecoder.decode", ("obj,end = self.raw_decode(",), None),
        ("json.decoder:JSONDecoder.decode", ("raw_decode", "raw_encode"), "does not contain 'raw_encode'"),
    ],
)
def test_a_seam_that_differs_is_reported(target: str, expected: tuple[str, ...], problem: str | None) -> None:
    found = check(Seam(target, "a test", expected))
    assert found is None if problem is None else problem in str(found)
