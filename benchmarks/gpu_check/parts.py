"""Parts of the GPU check: command, needs, purpose and time limit."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One process of the check.

    Attributes:
        name: Name of the part.
        command: Arguments of Python; the process prints one JSON object per line to standard output.
        limit_s: Time limit in seconds. Rows printed until then are kept; the part runs again the next time.
        decides: Decision that depends on the figures.
        needs: Required packages; the part is skipped without them.
        gpu_only: Reason why the part is useless on a CPU, or ``""``.
        quick: Further arguments on a CPU, or with ``--quick``.
        environment: Further variables.
        quick_environment: Further variables on a machine without a GPU.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float
    decides: str
    needs: tuple[str, ...] = ("torch",)
    gpu_only: str = ""
    quick: tuple[str, ...] = ("--quick",)
    environment: tuple[tuple[str, str], ...] = ()
    quick_environment: tuple[tuple[str, str], ...] = ()

    def missing(self) -> list[str]:
        """Return the required packages and modules that are missing."""
        own = [self.command[1]] if self.command[:1] == ("-m",) else []
        return [name for name in (*self.needs, *own) if not _available(name)]


def _available(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def _own(module: str, *arguments: str) -> tuple[str, ...]:
    return ("-m", f"benchmarks.gpu_check.{module}", *arguments)


#: Without the package's command, which imports all of its parts.
_PLANNING = "import typer; from benchmarks.real_sizes import planning; typer.run(planning.main)"
_ENGINE = ("torch", "vllm", "verl", "numba", "lmdb", "typer", "pyarrow")
_SYNCHRONOUS = "on a CPU the host's work is the device's"
_NO_GRAPHS = "a CPU has no CUDA graphs"

#: Parts in order: those with the fewest needs first, those that depend on other results last.
PARTS: tuple[Part, ...] = (
    Part(
        "kernel",
        _own("kernel"),
        60,
        "whether the Triton kernel may draw tokens: it compiles, and its draws follow the noise (`same` is all rows "
        "except one in a million; `behind` at most 1e-4)",
        needs=("torch", "triton"),
        quick_environment=(("TRITON_INTERPRET", "1"),),
    ),
    Part(
        "sampling",
        _own("sampling"),
        30,
        "whether the sampler's kernel needs work: yes if over 1 ms at 256 rows of 152,064",
        needs=("torch", "triton"),
        quick_environment=(("TRITON_INTERPRET", "1"),),
    ),
    Part(
        "logits",
        _own("logits"),
        240,
        "what coupling can keep in bf16: the share of draws that change with the batch shape bounds the acceptance of "
        "on-policy regeneration; near 0, batch invariance is not needed",
        needs=("torch", "transformers"),
    ),
    Part(
        "planning",
        ("-c", _PLANNING, "--json", "--threads", "1", "--threads", "4", "--rounds", "2"),
        240,
        "the default of planning threads, and whether planning must leave the critical path: yes if over 4 us per row, "
        "or 1 ms per step of 256 rows",
        needs=("numba", "lmdb", "msgpack", "typer", "benchmarks.real_sizes.planning"),
    ),
    Part(
        "asynchronous",
        _own("asynchronous"),
        300,
        "whether drafts at rest and the sampler cost nothing: at each batch size the milliseconds of a step of our "
        "engines, divided by stock's",
        needs=("torch", "vllm", "transformers"),
        gpu_only=_SYNCHRONOUS,
    ),
    Part(
        "graphs",
        _own("graphs"),
        420,
        "the default of cudagraph_mode with ragged drafts: PIECEWISE, FULL, or full graphs for undrafted steps by the "
        "patched query length",
        needs=_ENGINE,
        gpu_only=_NO_GRAPHS,
    ),
    Part(
        "replay",
        _own("replay"),
        400,
        "whether drafting is profitable at this batch size, and its cost: tokens per second relative to stock, and "
        "milliseconds of a step and of its drafts",
        needs=_ENGINE,
    ),
    Part(
        "coupled",
        _own("coupled"),
        300,
        "whether coupled runs set VLLM_BATCH_INVARIANT=1: tokens with the same draw with and without it, and its cost",
        needs=_ENGINE,
    ),
    Part(
        "sleep",
        _own("sleep"),
        150,
        "whether elastic replicas may sleep at level 2: greedy text is the same before sleep and after reloading",
        needs=("torch", "vllm", "transformers"),
        gpu_only="vLLM's sleep frees device memory, and its CPU platform has none",
    ),
    Part(
        "recurrent",
        _own("recurrent"),
        300,
        "whether drafts for gated delta nets are right on a GPU, with patched metadata and vLLM's own kernels: none of "
        "the tokens is over 1 behind the most probable",
        needs=("torch", "vllm", "transformers"),
        gpu_only="vLLM's CPU build verifies no drafts of recurrent models; tests bring an op of their own",
    ),
    Part(
        "model_drafter",
        _own("model_drafter"),
        300,
        "what a chain of three tokens of an EAGLE-3 head takes (`drafter_ms`) beside a step (`step_ms` of stock)",
        needs=("torch", "vllm", "transformers"),
    ),
)
