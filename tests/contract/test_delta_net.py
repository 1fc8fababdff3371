"""vLLM's kernels of gated delta nets with our patches: each request resumes from its last accepted token."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ONLY_SLOW

PATCHES = ["vllm_gdn_counts", "vllm_gdn_steps", "vllm_gdn_gates"]


def error(*patches):
    """The largest error of 40 random steps, in a process of its own: Triton reads at import that it interprets."""
    script = Path(__file__).with_name("delta_net_kernels.py")
    command = [sys.executable, str(script), "1", "40", *patches]
    return float(subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout.split()[0])


def test_outputs_are_the_recurrences():
    assert error(*PATCHES) < 1e-3  # prompts are computed in float16


@ONLY_SLOW
@pytest.mark.parametrize("missing", PATCHES)
def test_outputs_are_wrong_without_each_patch(missing):
    assert error(*(name for name in PATCHES if name != missing)) > 0.05
