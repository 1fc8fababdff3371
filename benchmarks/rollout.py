"""Measure what drafting gains in tokens per second in the real engine on a recorded epoch, with interleaved arms.

    python -m benchmarks.rollout [--json] [--quick] [--model DIR] [--trace qwen2-t1 ...] [--concurrency 1 ...]
    python -m benchmarks.rollout --world zipf --trace qwen2-t1 --concurrency 8 --concurrency 32 --responses 32

``--world`` selects the tiny Qwen2 with a vocabulary of real size (:mod:`examples.tiny_world.widen`). vLLM's sampler
then takes most of a step, so arms differ by their sampler. "stock, our sampler" and "suffix, our sampler" show what is
left for drafts to gain.

Each arm is a separate vLLM engine. In each round all engines generate the same recorded responses, one after the other
in rotating order, with the responses of the step before as a warm-up. The trace fixes the emitted tokens
(:mod:`benchmarks.engine_worker`), so only time is measured. Arms: vLLM as shipped; its ``ngram`` and ``suffix``
(arctic-inference, if installed); verl-rhyme, also in a synchronous engine; an oracle that knows the next tokens; and
the oracle limited to verl-rhyme's accepted tokens in each step, the upper bound for that acceptance. With ``--drafter
DIR`` also the model's own drafter as vLLM runs it, with three tokens a step, and with verl-rhyme.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks import traces
from benchmarks.machine import print_row
from benchmarks.traces import Response
from verl_rhyme.engine.model_drafter import speculation
from verl_rhyme.history.record import Trajectory
from verl_rhyme.history.store import HistoryStore

#: Environment of vLLM on a CPU; variables that are already set stay.
ENVIRONMENT = {
    name: os.environ.get(name, value)
    for name, value in {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCH_COMPILE_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }.items()
}
NAMESPACE = "benchmark"
LONGEST = 32
#: Positions of the model; the traces' longest response and prompt fit.
MODEL_LEN = 512
#: Oracle with the steps of ``rhyme``.
BOUND = "oracle, rhyme's steps"
STOCK, RHYME, ORACLE = "stock", "rhyme", "oracle"
#: Ours in an engine that schedules synchronously, as on a CPU stock vLLM does.
SYNCHRONOUS = "rhyme, synchronous"
#: Suffix of an arm with our sampler and another drafter, or none.
OUR_SAMPLER = ", our sampler"
#: The model's own drafter in vLLM, and as a source of ours.
MODEL, BOTH = "model", "rhyme and model"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)


@dataclass(frozen=True)
class Cell:
    """Work of all arms in a round.

    Attributes:
        concurrency: Concurrent requests; at most the measured responses.
        history: Responses of earlier epochs, and of this epoch's steps before the warm-up.
        warm_up, measured: Responses to generate.
        end: Token that ends every response that was not truncated.
    """

    trace: str
    epoch: int
    concurrency: int
    history: list[Response]
    warm_up: list[Response]
    measured: list[Response]
    end: int


def cell(name: str, epoch: int, concurrency: int, steps: Sequence[Sequence[Response]], most: int = 128) -> Cell:
    """Return a cell: an epoch's first step as warm-up and its second step to measure, each limited to seconds of work.

    For an epoch of one step, its first eighth is the warm-up.
    """
    first = next(i for i, step in enumerate(steps) if step[0].epoch == epoch)
    history = [r for step in steps[:first] for r in step]
    part = min(most, max(8, 4 * concurrency))
    if first + 1 < len(steps) and steps[first + 1][0].epoch == epoch:
        warm_up, measured = steps[first], steps[first + 1]
    else:
        begin = max(1, len(steps[first]) // 8)
        warm_up, measured = steps[first][:begin], steps[first][begin:]
    warm_up, measured = list(warm_up[-part:]), list(measured[:part])
    end, _ = Counter(int(r.tokens[-1]) for step in steps for r in step).most_common(1)[0]
    return Cell(name, epoch, min(concurrency, len(measured)), history, warm_up, measured, end)


def write_history(folder: Path, responses: Sequence[Response]) -> None:
    """Write a history as the recorder does, one step at a time."""
    store = HistoryStore(folder, NAMESPACE, max_bytes=1 << 28, epochs=4)
    for step in sorted({r.step for r in responses}):
        store.append(
            [
                Trajectory(r.key, r.tokens, r.reward, r.step, r.epoch, r.sample, r.logprobs)
                for r in responses
                if r.step == step
            ],
            step=step,
        )
    store.close()


class Engine:
    """Engine of one arm; ``settings`` override vLLM options."""

    def __init__(self, model: str, arm: str, folder: str, slots: int, drafter: str | None = None, **settings: Any):
        from vllm import LLM

        speculative, more = settings_of(arm, folder, drafter)
        self.arm = arm
        chosen = {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": MODEL_LEN,
            "max_num_seqs": slots,
            "max_num_batched_tokens": 8192,
            "block_size": 16,  # as on a GPU: EAGLE computes the last cached block of a prompt again
            "skip_tokenizer_init": True,
            "seed": 0,
            "distributed_executor_backend": "uni",
            "worker_extension_cls": "benchmarks.engine_worker.ReplayWorker",
            "speculative_config": speculative,
        }
        self._llm = LLM(model=model, **{**chosen, **more, **settings})
        self._llm.collective_rpc("follow", args=(arm.endswith(OUR_SAMPLER),))
        self._sent = 0

    def begin(self, cell: Cell, folder: str) -> None:
        paths = [r.tokens.tolist() for r in cell.warm_up + cell.measured]
        suffix = self.arm.startswith("suffix")
        texts = [[r.prompt.tolist(), r.tokens.tolist()] for r in cell.history] if suffix else []
        self._llm.collective_rpc("begin", args=(paths, folder, NAMESPACE, texts))

    def schedule(self, emissions: list[list[int]] | None) -> None:
        self._llm.collective_rpc("schedule", args=(emissions,))

    def run(self, cell: Cell, responses: Sequence[Response], first: int) -> float:
        """Generate the responses and return the seconds. ``first`` is the index of the first in the cell's paths."""
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        waiting = list(enumerate(responses, first))[::-1]
        longest = max(len(response.tokens) for response in responses)
        running = 0
        tokens = 0
        started = time.perf_counter()
        while waiting or running:
            while waiting and running < cell.concurrency:
                number, response = waiting.pop()
                params = SamplingParams(
                    temperature=1.0,
                    max_tokens=longest,
                    stop_token_ids=[cell.end],
                    detokenize=False,
                    logprobs=0,
                    extra_args={"path": number, "rhyme": {"key": response.key.hex(), "sample": response.sample}},
                )
                engine.add_request(f"r{self._sent}", {"prompt_token_ids": response.prompt.tolist()}, params)
                self._sent += 1
                running += 1
            for output in engine.step():
                if output.finished:
                    running -= 1
                    tokens += len(output.outputs[0].token_ids)
        seconds = time.perf_counter() - started
        expected = sum(len(r.tokens) for r in responses)
        if tokens != expected:
            raise RuntimeError(f"{self.arm} emitted {tokens} tokens, the trace has {expected}")
        return seconds

    def count(self) -> dict[str, Any]:
        return self._llm.collective_rpc("count")[0]


def settings_of(arm: str, folder: str, drafter: str | None = None) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Return ``speculative_config`` and further vLLM options of an arm."""
    custom = {"method": "custom_class", "num_speculative_tokens": LONGEST}
    arm, ours = arm.removesuffix(OUR_SAMPLER), arm.endswith(OUR_SAMPLER)
    if arm == STOCK and not ours:
        return None, {}
    if arm == STOCK:
        return None, {"async_scheduling": False}
    if arm == "ngram":
        return {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 5}, {}
    if arm == "suffix":
        return {"method": "suffix"}, {}
    if arm == MODEL:
        return {"model": drafter, "num_speculative_tokens": 3}, {"async_scheduling": False}
    if arm.startswith(RHYME):
        options = json.loads(arm.removeprefix(RHYME) or "{}") if arm not in (BOTH, SYNCHRONOUS) else {}
        options |= {"model": drafter} if arm == BOTH else {}
        drafting = {"max_tokens": LONGEST, **options}
        extra = {"rhyme": {"drafting": drafting, "history_dir": folder, "namespace": NAMESPACE}}
        if arm == BOTH and drafter is not None:
            return speculation(drafter, LONGEST), {"additional_config": extra, "async_scheduling": False}
        replay = {**custom, "model": "benchmarks.engine_worker.ReplayProposer"}
        return replay, {"additional_config": extra, "async_scheduling": arm != SYNCHRONOUS}
    return {**custom, "model": "benchmarks.engine_worker.OracleProposer"}, {}


def arms(quick: bool, world: str | None = None) -> list[str]:
    """Return the arms with an engine on this machine; :data:`BOUND` uses the oracle's."""
    if quick:
        return [STOCK, RHYME, ORACLE]
    suffix = ["suffix"] if importlib.util.find_spec("arctic_inference") else []
    if world is None:
        return [STOCK, "ngram", *suffix, SYNCHRONOUS, RHYME, ORACLE]
    return [STOCK, STOCK + OUR_SAMPLER, "ngram", *suffix, *(s + OUR_SAMPLER for s in suffix), RHYME, ORACLE]


def measure(cell: Cell, engines: dict[str, Engine], folder: str, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Return counts and seconds of each arm in each round."""
    bound = [BOUND] if engines.keys() >= {RHYME, ORACLE} else []
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in [*engines, *bound]}
    names = list(engines)
    for turn in range(rounds):
        for arm in names[turn % len(names) :] + names[: turn % len(names)]:
            found[arm].append(once(cell, engines[arm], folder))
        if bound:  # it uses rhyme's steps of the same round
            found[BOUND].append(once(cell, engines[ORACLE], folder, found[RHYME][-1]["emissions"]))
    return found


def once(cell: Cell, engine: Engine, folder: str, schedule: list[list[int]] | None = None) -> dict[str, Any]:
    engine.begin(cell, folder)
    if engine.arm == ORACLE:
        engine.schedule(schedule)
    engine.run(cell, cell.warm_up, 0)
    engine.count()
    seconds = engine.run(cell, cell.measured, len(cell.warm_up))
    counts = engine.count()
    return {**counts, "seconds": seconds, "tokens": sum(len(r.tokens) for r in cell.measured)}


def summarise(cell: Cell, found: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return a row per arm: medians over the rounds, ratios paired by round."""
    rows = []
    for arm, runs in found.items():
        speeds = np.array([run["tokens"] / run["seconds"] for run in runs])
        ratios = speeds / [run["tokens"] / run["seconds"] for run in found[STOCK]]
        q1, median, q3 = np.quantile(ratios, [0.25, 0.5, 0.75])
        run = runs[-1]
        rows.append(
            {
                "benchmark": "rollout",
                "arm": arm,
                "trace": cell.trace,
                "epoch": cell.epoch + 1,
                "concurrency": cell.concurrency,
                "tokens_per_s": round(float(np.median(speeds)), 1),
                "ratio_to_stock": round(float(median), 3),
                "q1": round(float(q1), 3),
                "q3": round(float(q3), 3),
                "steps": run["steps"],
                "tokens_per_row_step": round(run["tokens"] / run["rows"], 3),
                "verified_per_token": round((run["rows"] + run["drafted"]) / run["tokens"], 3),
                "draft_ms_per_step": round(1e3 * run["draft_seconds"] / run["steps"], 3),
                "rounds": len(runs),
            }
            | ({"model_passes_per_step": round(run["passes"] / run["steps"], 3)} if arm == BOTH else {})
            | ({"step_ms_drafting_0_1_4_a_row": [round(1e3 * x, 1) for x in run["cost"]]} if run.get("cost") else {})
        )
        if run.get("errors"):
            raise RuntimeError(f"{arm}: {run['errors']} errors in the drafter")
    return rows


@app.command()
def main(
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per line")] = False,
    quick: Annotated[bool, typer.Option(help="one trace, one width, one round")] = False,
    model: Annotated[Path | None, typer.Option(help="default: the tiny world's Qwen2")] = None,
    world: Annotated[str | None, typer.Option(help="silent or zipf: Qwen2 with a larger vocabulary")] = None,
    vocabulary: Annotated[int, typer.Option(help="vocabulary size with --world")] = 151_936,
    trace: Annotated[list[str] | None, typer.Option(help="names of traces in benchmarks/traces")] = None,
    concurrency: Annotated[list[int] | None, typer.Option(help="concurrent requests")] = None,
    epoch: Annotated[list[int] | None, typer.Option(help="counted from 1")] = None,
    arm: Annotated[
        list[str] | None, typer.Option(help="next to stock; default: all. Five engines of SmolLM2 need 20 GB")
    ] = None,
    variant: Annotated[list[str] | None, typer.Option(help="additional arm: rhyme with these options, as JSON")] = None,
    drafter: Annotated[str | None, typer.Option(help="folder of the model's own drafter")] = None,
    responses: Annotated[int, typer.Option(min=1, help="maximum responses to measure per cell and round")] = 128,
    rounds: int = 3,
) -> None:
    """Measure every arm in every cell."""
    os.environ.update(ENVIRONMENT)
    names = trace or (["qwen2-t1"] if quick else ["qwen2-t1", "qwen2-t06"])
    widths = concurrency or ([32] if quick else [1, 8, 32, 128])
    epochs = epoch or ([5] if quick else [1, 5])
    available = arms(quick, world) + ([MODEL, BOTH] if drafter is not None else [])
    if unknown := set(arm or ()) - set(available):
        raise typer.BadParameter(f"no arm {', '.join(unknown)}: choose of {', '.join(available)}")
    wanted = [a for a in available if not arm or a in (STOCK, *arm)]
    wanted += [f"{RHYME} {options}" for options in variant or []]
    path = str(model or traces.FOLDER.parents[1] / "examples" / "tiny_world" / "models" / "qwen2")
    if world is not None:
        from examples.tiny_world import widen  # imports torch, which needs the environment

        if model is not None or world not in widen.VARIANTS:
            raise typer.BadParameter(f"--world is {' or '.join(widen.VARIANTS)}, and excludes --model")
        path = str(widen.cached(world, vocabulary))
    with tempfile.TemporaryDirectory() as top:
        cells, folders = [], {}
        for name in names:
            steps = traces.load(traces.FOLDER / f"{name}.parquet")
            for number in epochs:
                for width in widths:
                    cells.append(cell(name, number - 1, width, steps, responses))
                folders[name, number - 1] = f"{top}/{name}-{number}"
                write_history(Path(folders[name, number - 1]), cells[-1].history)
        folder = next(iter(folders.values()))
        engines = {a: Engine(path, a, folder, max(widths), drafter) for a in wanted}
        for each in cells:
            found = measure(each, engines, folders[each.trace, each.epoch], 1 if quick else rounds)
            for row in summarise(each, found):
                row |= {"world": world, "vocabulary": vocabulary} if world else {}
                print_row(row, as_json)
    if not quick and "suffix" not in arms(quick):
        print("skipped, arctic_inference is not installed: suffix", file=sys.stderr)


if __name__ == "__main__":
    app()
