"""What verl-rhyme relies on in verl and vLLM is unchanged, and the doctor reports a patch that does not fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.contract.seams import SEAMS, current
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


@pytest.mark.parametrize(
    ("feature", "target", "known"),
    [
        pytest.param(feature, target, known, id=target.partition(":")[2])
        for feature, targets in SEAMS.items()
        for target, known in targets.items()
    ],
)
def test_objects_of_verl_and_vllm_are_the_known_ones(feature: str, target: str, known: str) -> None:
    assert current(target) == known, f"used for {feature}: read its new source, then run tests/contract/seams.py"
