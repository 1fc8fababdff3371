"""``benchmarks.rollout`` end to end: engines of every kind follow a trace token for token, and drafting saves steps."""

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.timeout(400)
def test_arms_emit_the_trace_in_fewer_steps():
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    command = [sys.executable, "-m", "benchmarks.rollout", "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]  # it fails by itself where an arm emits other tokens
    rows = {row["arm"]: row for row in map(json.loads, done.stdout.splitlines())}
    stock, ours, oracle, bound = (rows[arm] for arm in ("stock", "rhyme", "oracle", "oracle, rhyme's steps"))
    assert stock["tokens_per_row_step"] == pytest.approx(1, abs=0.02)
    assert ours["steps"] < stock["steps"] / 2
    assert ours["tokens_per_row_step"] > 2.5
    assert oracle["steps"] < ours["steps"] / 2
    assert oracle["verified_per_token"] == pytest.approx(1, abs=0.02), "the oracle drafts only what will be accepted"
    assert bound["steps"] == pytest.approx(ours["steps"], rel=0.05)
    assert bound["verified_per_token"] == pytest.approx(1, abs=0.02)
    assert len(ours["step_cost_us"]) == 4
