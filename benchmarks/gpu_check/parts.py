"""The parts of a check on a GPU: what each runs, needs and decides, and how long it may take."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One process.

    Attributes:
        name: Its own.
        command: Arguments of Python; what it prints to standard output is a JSON object a line.
        limit_s: Seconds after which it is ended. What it told by then is kept; it runs again the next time.
        decides: What hangs on its figures.
        needs: Packages without which it is skipped.
        gpu_only: Why it makes no sense on a CPU; empty where it does.
        quick: Further arguments on a CPU, or with ``--quick``.
        environment: Further variables.
        quick_environment: Those of ``quick`` on a machine without a GPU.
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
        """Packages, and modules of ours, that it needs and that are not here."""
        own = [self.command[1]] if self.command[:1] == ("-m",) else []
        return [name for name in (*self.needs, *own) if not _there(name)]


def _there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of what it lies in
        return False


def _own(module: str, *arguments: str) -> tuple[str, ...]:
    return ("-m", f"benchmarks.gpu_check.{module}", *arguments)


#: Not by the package's command, which imports all of its parts.
_PLANNING = "import typer; from benchmarks.real_sizes import planning; typer.run(planning.main)"
_ENGINE = ("torch", "vllm", "verl", "numba", "lmdb", "typer", "pyarrow")
_SYNCHRONOUS = "vLLM's CPU platform always turns asynchronous scheduling off: both arms would be one"
_NO_GRAPHS = "there are no CUDA graphs on a CPU"

#: In their order: what needs least comes first, and what hangs on others' answers last.
PARTS: tuple[Part, ...] = (
    Part(
        "kernel",
        _own("kernel"),
        60,
        "whether the Triton kernel may draw tokens at all: it compiles, and draws what the noise says (`same` is all "
        "rows but one in a million; `behind` at most 1e-4)",
        needs=("torch", "triton"),
        quick_environment=(("TRITON_INTERPRET", "1"),),
    ),
    Part(
        "sampling",
        _own("sampling"),
        30,
        "whether the sampler's kernel is to be worked on: over 1 ms at 256 rows of 152,064, yes",
        needs=("torch", "triton"),
        quick_environment=(("TRITON_INTERPRET", "1"),),
    ),
    Part(
        "draft_head",
        _own("draft_head"),
        60,
        "whether the draft head's positions may stay one after another: four of them over a tenth of a step, no; and "
        "what a twentieth of the time affords of its training",
    ),
    Part(
        "logits",
        _own("logits"),
        240,
        "what coupling can keep in bf16: the share of draws that batches of other shapes change bounds what on-policy "
        "regeneration accepts; near 0, batch invariance is not needed",
        needs=("torch", "transformers"),
    ),
    Part(
        "planning",
        ("-c", _PLANNING, "--json", "--threads", "1", "--threads", "4", "--rounds", "2"),
        240,
        "planning threads' default, and whether planning must leave the critical path: over 4 us a row, or 1 ms a step "
        "of 256 rows, yes",
        needs=("numba", "lmdb", "msgpack", "typer", "benchmarks.real_sizes.planning"),
    ),
    Part(
        "asynchronous",
        _own("asynchronous"),
        300,
        "the tokens a step that drafting must reach: at each width the milliseconds of a step without asynchronous "
        "scheduling over those with it",
        needs=("torch", "vllm", "transformers"),
        gpu_only=_SYNCHRONOUS,
    ),
    Part(
        "graphs",
        _own("graphs"),
        420,
        "the default of cudagraph_mode where drafts are ragged: PIECEWISE, FULL, or full graphs for undrafted steps by "
        "the patched query length",
        needs=_ENGINE,
        gpu_only=_NO_GRAPHS,
    ),
    Part(
        "replay",
        _own("replay"),
        400,
        "whether drafting is profitable at this width, and what it takes: tokens a second over stock's, milliseconds "
        "of a step and of its drafts",
        needs=_ENGINE,
    ),
    Part(
        "coupled",
        _own("coupled"),
        300,
        "whether coupled runs set VLLM_BATCH_INVARIANT=1: tokens that keep their draw with it and without, and what it "
        "costs",
        needs=_ENGINE,
    ),
    Part(
        "sleep",
        _own("sleep"),
        150,
        "whether elastic replicas may sleep at level 2: greedy text after sleep, wake and load is the text before",
        needs=("torch", "vllm", "transformers"),
        gpu_only="vLLM's sleep gives back device memory; its CPU platform has none to give",
    ),
    Part(
        "recurrent",
        _own("recurrent"),
        180,
        "whether drafts stay refused for models with recurrent layers: with vLLM's own, tokens are over 1 behind the "
        "likeliest; and whether all else works with them: of ours undrafted none is",
        needs=("torch", "vllm", "transformers"),
        gpu_only="vLLM's CPU build verifies no drafts of recurrent models",
    ),
)
