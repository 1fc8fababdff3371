"""vLLM engines for the parts that need one: on a GPU in bf16 with its graphs, on a CPU as the other benchmarks do."""

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

#: For vLLM on a CPU; what is set already stays.
_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_COMPILE_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
}

#: Names the file that a process of :func:`each` makes when its engine is ready.
_GATE = "GPU_CHECK_GATE"
_GO = "go\n"
#: Seconds that engines which start side by side have for it.
_START_S = 240.0


def prepare() -> None:
    """Before vLLM is imported: nothing of it goes to standard output, where rows are told."""
    wanted = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_LOGGING_STREAM": "ext://sys.stderr", "HF_HUB_OFFLINE": "1"}
    wanted["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # CUDA was asked for in this process
    if importlib.util.find_spec("flashinfer") is None:
        wanted["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    if device().type != "cuda":
        wanted |= _CPU
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


def settings(share: float, cache_gib: float | None = None) -> dict[str, Any]:
    """Of an engine that may have this share of the GPU's memory; or, whatever others have, so much of KV cache."""
    if device().type != "cuda":
        return {}
    chosen = {"dtype": "bfloat16", "enforce_eager": False, "load_format": "dummy", "gpu_memory_utilization": share}
    return chosen if cache_gib is None else {**chosen, "kv_cache_memory_bytes": int(cache_gib * 2**30)}


def each(module: str, arms: Mapping[str, Mapping[str, str]], report: Callable[..., object], at_once: int = 1) -> None:
    """Run ``module`` once for each arm, in a process with the arm's variables (vLLM reads many when it is imported), as
    ``module --one ARM`` and with the arguments that this process has. A failed one is reported and stops no other.

    Args:
        module: Its name.
        arms: Variables of each.
        report: Called with the arm and the reason of each failure.
        at_once: Processes whose engines start side by side; each then measures alone, once it called :func:`my_turn`.

    Raises:
        SystemExit: All failed; why stands in standard error.
    """
    names = list(arms)
    failed = sum(
        _side_by_side(module, {arm: arms[arm] for arm in names[first : first + at_once]}, report)
        for first in range(0, len(names), at_once)
    )
    if failed == len(arms):
        raise SystemExit(1)


def _side_by_side(module: str, arms: Mapping[str, Mapping[str, str]], report: Callable[..., object]) -> int:
    """How many failed."""
    running: dict[str, tuple[Path, subprocess.Popen[bytes]]] = {}
    failed, until = 0, time.monotonic() + _START_S
    with tempfile.TemporaryDirectory() as top:
        try:
            for number, (arm, variables) in enumerate(arms.items()):
                gate = Path(top) / str(number)
                environment = {**os.environ, **variables, **({_GATE: str(gate)} if len(arms) > 1 else {})}
                command = [sys.executable, "-m", module, "--one", arm, *sys.argv[1:]]
                running[arm] = gate, subprocess.Popen(command, env=environment, stdin=subprocess.PIPE)
            while len(arms) > 1 and any(not gate.exists() and one.poll() is None for gate, one in running.values()):
                time.sleep(0.1)
                if time.monotonic() > until:
                    break
            for arm, (gate, one) in running.items():
                if len(arms) > 1 and not gate.exists() and one.poll() is None:
                    one.kill()  # it is still starting
                one.communicate(_GO.encode())
                if one.returncode:
                    failed += 1
                    report(arm=arm, failed=f"exit status {one.returncode}, see standard error")
        finally:
            for _, one in running.values():
                one.kill()
    return failed


def my_turn() -> None:
    """In a process of :func:`each`: the engine is ready; waits until no other measures."""
    if gate := os.environ.get(_GATE):
        Path(gate).touch()
        if sys.stdin.readline() != _GO:
            raise SystemExit("who starts the engines has ended")


def let_go() -> None:
    """Of the memory of what nobody holds any more: an engine is to have it."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def recorded(size: str) -> Iterator[tuple[str, Any, str]]:
    """A model's folder, a function of a number of rows that gives ``benchmarks.rollout``'s cell, and the folder of the
    history of its earlier epochs.

    On a GPU it is the second epoch of SmolLM2's 384 responses (0.4 nats per token) with random weights of this size:
    which token comes is the recorded responses' affair. On a CPU the fifth of the tiny world, by its model.
    """
    from benchmarks import rollout, traces

    gpu = device().type == "cuda"
    trace, epoch = ("smollm2-wide-t05", 2) if gpu else ("qwen2-t1", 5)
    steps = traces.load(traces.FOLDER / f"{trace}.parquet")
    if gpu:  # the widest batch takes more than one of its steps
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
    """``compilation_config`` of an engine that drafts, with this ``cudagraph_mode``."""
    from verl_rhyme.engine import cuda_graphs

    return {"compilation_config": cuda_graphs.settings(json.dumps({"cudagraph_mode": mode}), False, slots, 8192)}
