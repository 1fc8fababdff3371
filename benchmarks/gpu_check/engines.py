"""vLLM engines of the parts: bf16 and CUDA graphs on a GPU, the settings of the other benchmarks on a CPU."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.reporting import device

#: Environment of vLLM on a CPU; variables that are already set stay.
_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_COMPILE_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
}

#: Variable with the file that a process of :func:`each` creates when its engine is ready.
_GATE = "GPU_CHECK_GATE"
_GO = "go\n"
#: Seconds for several engines to start at the same time.
_START_S = 240.0


def prepare() -> None:
    """Set the environment before the import of vLLM, which then logs to standard error; standard output is for rows."""
    wanted = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_LOGGING_STREAM": "ext://sys.stderr", "HF_HUB_OFFLINE": "1"}
    wanted["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # this process has initialised CUDA
    if importlib.util.find_spec("flashinfer") is None:
        wanted["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    if device().type != "cuda":
        wanted |= _CPU
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


def settings(share: float, cache_gib: float | None = None) -> dict[str, Any]:
    """Return settings of an engine with a share of the GPU's memory, or with a fixed KV cache in GiB."""
    if device().type != "cuda":
        return {}
    chosen = {"dtype": "bfloat16", "enforce_eager": False, "load_format": "dummy", "gpu_memory_utilization": share}
    return chosen if cache_gib is None else {**chosen, "kv_cache_memory_bytes": int(cache_gib * 2**30)}


def each(module: str, arms: Mapping[str, Mapping[str, str]], report: Callable[..., object], at_once: int = 1) -> None:
    """Run ``module --one ARM`` per arm in a process with the arm's variables and this process's arguments.

    vLLM reads many variables at import. A failed process is reported and does not stop the others.

    Args:
        module: Name of the module.
        arms: Variables of each arm.
        report: Called with the arm and the reason of each failure.
        at_once: Engines that start at the same time; each measures alone after :func:`wait_for_turn`.

    Raises:
        SystemExit: All processes failed; standard error has the reasons.
    """
    names = list(arms)
    failed = sum(
        _run_group(module, {arm: arms[arm] for arm in names[first : first + at_once]}, report)
        for first in range(0, len(names), at_once)
    )
    if failed == len(arms):
        raise SystemExit(1)


def _run_group(module: str, arms: Mapping[str, Mapping[str, str]], report: Callable[..., object]) -> int:
    """Run the arms of a group and return the number of failures."""
    running: dict[str, tuple[Path, subprocess.Popen[bytes]]] = {}
    failed, until = 0, time.monotonic() + _START_S
    with tempfile.TemporaryDirectory() as top:
        try:
            for number, (arm, variables) in enumerate(arms.items()):
                gate = Path(top) / str(number)
                environment = {**os.environ, **variables, **({_GATE: str(gate)} if len(arms) > 1 else {})}
                command = [sys.executable, "-m", module, "--one", arm, *sys.argv[1:]]
                running[arm] = gate, subprocess.Popen(command, env=environment, stdin=subprocess.PIPE)
            while len(arms) > 1 and any(
                not gate.exists() and process.poll() is None for gate, process in running.values()
            ):
                time.sleep(0.1)
                if time.monotonic() > until:
                    break
            for arm, (gate, process) in running.items():
                if len(arms) > 1 and not gate.exists() and process.poll() is None:
                    process.kill()  # not ready in time
                process.communicate(_GO.encode())
                if process.returncode:
                    failed += 1
                    report(arm=arm, failed=f"exit status {process.returncode}, see standard error")
        finally:
            for _, process in running.values():
                process.kill()
    return failed


def wait_for_turn() -> None:
    """Report the engine as ready in a process of :func:`each`, and wait until no other process measures."""
    if gate := os.environ.get(_GATE):
        Path(gate).touch()
        if sys.stdin.readline() != _GO:
            raise SystemExit("the parent process of the engines has ended")


def free_memory() -> None:
    """Free unreferenced memory for the engine."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def recorded(size: str) -> Iterator[tuple[str, Any, str]]:
    """Yield a model's folder, a function from rows to a cell of ``benchmarks.rollout``, and the history's folder.

    On a GPU the cell is the second epoch of SmolLM2's 384 responses (0.4 nats per token) with random weights of this
    size; the recorded responses fix the tokens. On a CPU it is the fifth epoch of the tiny world with its model.
    """
    from benchmarks import rollout, traces

    gpu = device().type == "cuda"
    trace, epoch = ("smollm2-wide-t05", 2) if gpu else ("qwen2-t1", 5)
    steps = traces.load(traces.FOLDER / f"{trace}.parquet")
    if gpu:  # the largest batch needs more than one training step
        steps = [[r for step in steps if step[0].epoch == number for r in step] for number in range(epoch)]
    with tempfile.TemporaryDirectory() as top:
        model = traces.FOLDER.parents[1] / "examples" / "tiny_world" / "models" / "qwen2"
        if gpu:
            from benchmarks.gpu_check import models

            model = Path(models.described(size, Path(top) / "model"))
        history = Path(top) / "history"
        first = rollout.cell(trace, epoch - 1, 1, steps)
        rollout.write_history(history, first.history)
        yield str(model), lambda rows: rollout.cell(trace, epoch - 1, rows, steps, most=384), str(history)


def graphs(mode: str, slots: int) -> dict[str, Any]:
    """Return the ``compilation_config`` of a drafting engine with this ``cudagraph_mode``."""
    from verl_rhyme.engine import cuda_graphs

    return {"compilation_config": cuda_graphs.settings(json.dumps({"cudagraph_mode": mode}), False, slots, 8192)}
