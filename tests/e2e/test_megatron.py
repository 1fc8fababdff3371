"""verl's Megatron engine on gloo says and learns what its FSDP engine does, from the same weights and batches."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import ONLY_SLOW

pytestmark = pytest.mark.xdist_group("megatron_engine")

MODELS = Path(__file__).parents[2] / "examples/tiny_world/models"
STEPS, LR = 10, 3e-4


def run(world, script="engine_steps", **settings):
    """What a script of this folder reports, of so many ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        settings["port"] = free.getsockname()[1]
    command = [sys.executable, str(Path(__file__).with_name(f"{script}.py")), json.dumps(settings)]
    environment = os.environ | {"WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
    ranks = [
        subprocess.Popen(
            command,
            env=environment | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        outputs = [rank.communicate(timeout=400)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    lines = [line for output in outputs for line in output.splitlines() if line.startswith("RESULT")]
    assert len(lines) == 1, "\n".join(output[-3000:] for output in outputs)
    return json.loads(lines[0][len("RESULT") :])


def assert_same(found, expected):
    np.testing.assert_allclose(found["log_probs"], expected["log_probs"], atol=1e-4)
    for figure in ("losses", "grad_norms"):
        np.testing.assert_allclose(found[figure][0], expected[figure][0], rtol=1e-4)
        # Adam divides by the gradients' size: rounding of the smallest ones grows with every update.
        np.testing.assert_allclose(found[figure], expected[figure], rtol=0.05, atol=0.01)
    assert found["losses"][-1] < found["losses"][0] - 0.02, "it learns nothing"
    before, after = found["resumed"]
    np.testing.assert_allclose(after, before, rtol=1e-5)


@ONLY_SLOW  # test_streamed_update runs its pipeline every day, test_sorted the trainer on it
@pytest.mark.parametrize(
    ("model", "parallel"), [pytest.param("qwen2", {"tp": 2}, id="tp2"), pytest.param("llama", {"pp": 2}, id="pp2")]
)
def test_megatron_learns_what_fsdp_does(model, parallel, tmp_path):
    """Embeddings are tied as in the smallest Qwen2s, or untied: for a tied model mbridge has no pipeline."""
    folder = MODELS / model
    if "pp" in parallel:
        folder, tied = tmp_path / model, folder
        command = [sys.executable, "-m", "examples.tiny_world.untie", str(tied), str(folder)]
        subprocess.run(command, check=True, cwd=MODELS.parents[2])
    settings = {"model": str(folder), "steps": STEPS, "lr": LR}
    expected = run(1, engine="fsdp2", **settings)
    assert_same(run(2, engine="megatron", checkpoint=str(tmp_path / "checkpoint"), **settings, **parallel), expected)
