"""The GPU kernel in Triton's interpreter draws the same tokens as the CPU path, and it compiles for GPUs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = [pytest.mark.xdist_group("draw kernel"), pytest.mark.slow]  # one probe, which compiles
PROBE = Path(__file__).parent / "draw_kernel_probe.py"


def python(*arguments, **environment):
    command, environment = [sys.executable, *map(str, arguments)], {**os.environ, **environment}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout.splitlines()


def test_kernel_draws_as_the_cpu_path():
    # In a separate process, because Triton reads the variable on import.
    *drawn, masked = [json.loads(line) for line in python(PROBE, TRITON_INTERPRET="1") if line.startswith("{")]
    assert len(drawn) == 12
    for case in drawn:
        assert case["behind"] < 1e-4, case
        assert case["logprob_error"] < 5e-5, case
        assert case["ranks"], case
    assert sum(case["same"] for case in drawn) >= sum(case["rows"] for case in drawn) - 1
    assert masked["tokens"][:2] == [4321, 17]
    assert 0 <= masked["tokens"][2] < 5000
    assert masked["logprobs"] == pytest.approx([0, 0], abs=1e-6)


_COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from verl_rhyme.engine import draw_kernel as k

floats = {n: "*fp32" for n in "temperatures scores chosen highest sums".split()}
draw = {"logits": "*bf16", "stride": "i32", "keys": "*i64", "positions": "*i64", "vocabulary": "i32",
        "part_size": "i32", "parts": "i32", "tokens": "*i32", **floats, "RAW": "constexpr", "BLOCK": "constexpr"}
combine = {n: "*fp32" for n in "scores chosen highest sums out_logprobs".split()}
combine |= {"tokens": "*i32", "out_tokens": "*i64", "parts": "i32", "PARTS": "constexpr"}
rank = {"logits": "*bf16", "stride": "i32", "tokens": "*i64", "vocabulary": "i32", "part_size": "i32",
        "ranks": "*i32", "BLOCK": "constexpr"}
for kernel, signature, constants in (
    (k._draw, draw, {"RAW": False, "BLOCK": k._BLOCK}), (k._combine, combine, {"PARTS": 16}),
    (k._rank, rank, {"BLOCK": k._BLOCK}),
):
    ordered = {name: signature[name] for name in kernel.arg_names}
    source = ASTSource(kernel, ordered, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32), options={"num_warps": 8})
    print(kernel.__name__, len(made.asm["cubin"]))
"""


@pytest.mark.parametrize("capability", [80, 90])
def test_kernel_compiles_for_an_absent_gpu(capability, tmp_path):
    compiled = python("-c", _COMPILE, capability, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert [line.split()[0] for line in compiled] == ["_draw", "_combine", "_rank"]


def test_batch_width_triggers_no_recompilation(monkeypatch):
    """A compilation would take seconds on each rank while requests wait."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import create_function_from_signature

    from verl_rhyme.engine import draw_kernel

    compiled = {}

    def recorder(kernel):
        bind = create_function_from_signature(kernel.signature, kernel.params, CUDABackend(GPUTarget("cuda", 90, 32)))

        class Recorder:
            def __getitem__(self, grid):
                return lambda *args, **named: compiled.setdefault(kernel.__name__, set()).add(
                    str(bind(*args, **named)[1])
                )

        return Recorder()

    for name in ("_draw", "_combine", "_rank"):
        monkeypatch.setattr(draw_kernel, name, recorder(getattr(draw_kernel, name)))
    for rows in (1, 2, 3, 15, 16, 17, 63, 64, 255, 256, 257, 1023, 1024, 1025):
        logits = torch.empty((rows, 151_936), dtype=torch.bfloat16)  # never touched
        keys, positions, bits = torch.zeros((3, rows), dtype=torch.int64)
        tokens, _ = draw_kernel.draw(logits, keys, positions, bits.float())
        draw_kernel.ranks(logits, tokens)
    assert {name: len(found) for name, found in compiled.items()} == {"_draw": 1, "_combine": 1, "_rank": 1}
