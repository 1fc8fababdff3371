"""Every patch applies to the installed packages, fixes its fault, and is refused for changed packages.

Patched and unpatched behaviour come from separate processes, because a patch cannot be undone. Without the patches of
process groups and of linear layers no training run and no weight update of tests/e2e would pass.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl_rhyme import patches
from verl_rhyme.patches.conditions import vllm_runs_on_cpu

PROBE = Path(__file__).with_name("patch_probe.py")
EXPANDED = [1, 1, 2, 2, 2, -9, -9]  # 0 becomes 1; the second request has no tokens; the rest stays untouched

pytestmark = [
    pytest.mark.skipif(not vllm_runs_on_cpu(), reason="these patches are for vLLM's CPU platform"),
    pytest.mark.xdist_group("patches"),  # all tests share the probes
    pytest.mark.slow,  # a probe takes 15 seconds
]


@pytest.fixture(scope="module")
def probe():
    outcomes = {}

    def run(mode):
        if mode not in outcomes:
            env = {**os.environ, "VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
            done = subprocess.run(
                [sys.executable, str(PROBE), mode], env=env, capture_output=True, text=True, timeout=300
            )
            assert done.returncode == 0, done.stderr[-4000:]
            outcomes[mode] = json.loads(done.stdout.splitlines()[-1])
            outcomes[mode]["stderr"] = done.stderr
        return outcomes[mode]

    return run


@pytest.mark.parametrize("name", [patch.name for patch in patches.ALL])
def test_applies_and_reads_back(probe, name):
    assert probe("patched")["statuses"][name] == "applied"
    assert probe("unpatched")["statuses"][name] != "applied"


@pytest.mark.parametrize("dtype", ["float32", "int32", "int64"])
def test_expand(probe, dtype):
    assert probe("patched")["expand"][dtype] == EXPANDED
    if dtype != "int64":  # the fault does not affect this type
        assert probe("unpatched")["expand"][dtype] != EXPANDED


def test_recovered_tokens(probe):
    recovered = probe("patched")["recover"]
    assert recovered["got"] == recovered["expected"]
    assert "float64" in probe("patched")["recover_fp64"]
    assert "USE_FP64_GUMBEL" in probe("unpatched")["recover"]


def test_logger_accepts_flush(probe):
    assert probe("patched")["log"] == "trainer_separate_async:log_with_flush:hybrid replicas disabled"
    assert "flush" in probe("unpatched")["log"]
    assert "TypeError" in probe("unpatched")["log"]


def test_a_resumed_run_continues_its_metrics(probe):
    assert probe("patched")["metrics"] == [[1, 2], [2]]
    assert probe("unpatched")["metrics"] == [[2], [2]]


def test_options_are_checked_between_hydra_and_the_command(probe):
    assert probe("patched")["run_misspelt"].startswith("SystemExit: verl-rhyme: ")
    assert "did you mean" in probe("patched")["run_misspelt"]
    assert (
        probe("patched")["run_stock"] == probe("unpatched")["run_stock"] == probe("unpatched")["run_misspelt"] == "ran"
    )


def test_a_changed_original_is_refused(probe):
    changed = probe("unpatched")["changed"]
    state, detail = changed["statuses"]["vllm_cpu_expand"]
    assert state == "refused"
    assert "has changed" in detail
    assert changed["kernel"] == "another_kernel"
    assert changed["statuses"]["vllm_cpu_recovered_tokens"][0] == "applied"
    assert changed["refused"] == 1
    assert "patch vllm_cpu_expand REFUSED" in probe("unpatched")["stderr"]
