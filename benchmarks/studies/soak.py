"""The real engine for a long time under a changing history: do drafts keep coming, does memory stay flat?

    python -m benchmarks.studies.soak [--json] [--quick] [--minutes 20]

One engine with drafting samples freely from the tiny world's model, with prefix caching, prompts prefilled in chunks,
and a KV cache so small that requests are preempted. Meanwhile every step's responses are appended to the store that it
drafts from, one request in twenty is aborted, and now and then the whole history is cleared or another one restored.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import typer

from benchmarks import traces
from benchmarks.machine import print_row
from benchmarks.rollout import ENVIRONMENT, MODEL_LEN, NAMESPACE
from verl_rhyme.history.record import Trajectory
from verl_rhyme.history.store import HistoryStore

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)

#: Requests of one step, and of it those that the engine holds at a time.
STEP, SLOTS = 64, 32


def start(folder: Path) -> Any:
    """An engine under pressure."""
    from vllm import LLM

    model = traces.FOLDER.parents[1] / "examples" / "tiny_world" / "models" / "qwen2"
    llm = LLM(
        model=str(model),
        dtype="float32",
        enforce_eager=True,
        max_model_len=MODEL_LEN,
        max_num_seqs=SLOTS,
        max_num_batched_tokens=640,
        num_gpu_blocks_override=48,
        skip_tokenizer_init=True,
        disable_log_stats=False,
        distributed_executor_backend="uni",
        worker_extension_cls="verl_rhyme.engine.extension.RhymeWorkerMethods",
        speculative_config={
            "method": "custom_class",
            "model": "verl_rhyme.engine.proposer.HistoryProposer",
            "num_speculative_tokens": 16,
        },
        additional_config={
            "rhyme": {
                "drafting": {"max_tokens": 16, "live_tokens": 1 << 16},
                "history_dir": str(folder),
                "namespace": NAMESPACE,
            }
        },
    )
    llm.collective_rpc("attach_proposer")
    return llm


def step(engine: Any, rng: np.random.Generator, prompts: list[Any], number: int, version: int) -> list[Trajectory]:
    """Sample eight responses to each of eight prompts, abort some, and give back the others as history."""
    from vllm import SamplingParams

    chosen = rng.choice(len(prompts), STEP // 8, replace=False)
    asked, found = {}, []
    for i in chosen:
        for sample in range(8):
            name = f"{number}-{i}-{sample}"
            params = SamplingParams(
                temperature=float(rng.choice([0.6, 1.0])),
                max_tokens=int(rng.integers(16, MODEL_LEN - 128)),
                stop_token_ids=[1],
                detokenize=False,
                logprobs=0,
                extra_args={"rhyme": {"key": prompts[i].key.hex(), "sample": sample, "id": name}},
            )
            engine.add_request(name, {"prompt_token_ids": prompts[i].prompt.tolist()}, params)
            asked[name] = (prompts[i].key, sample)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished and output.request_id in asked:
                key, sample = asked.pop(output.request_id)
                tokens = np.array(output.outputs[0].token_ids, dtype=np.int32)
                assert len(tokens) <= MODEL_LEN
                found.append(Trajectory(key, tokens, float(rng.random()), version, version // 8, sample))
        if asked and rng.random() < 0.01:
            victim = str(rng.choice(list(asked)))
            engine.abort_request([victim])
            del asked[victim]
    return found


@app.command()
def main(
    as_json: Annotated[bool, typer.Option("--json", help="one object")] = False,
    quick: Annotated[bool, typer.Option(help="half a minute")] = False,
    minutes: float = 20.0,
) -> None:
    """Run, watch the engine's memory, and fail if drafting does."""
    os.environ.update(ENVIRONMENT)
    rng = np.random.default_rng(0)
    steps = traces.load(traces.FOLDER / "qwen2-t1.parquet")
    prompts = [group for s in steps[:4] for group in s if group.sample == 0]
    with tempfile.TemporaryDirectory() as top:
        store = HistoryStore(Path(top) / "history", NAMESPACE, max_bytes=1 << 22, epochs=2)
        llm = start(Path(top) / "history")
        worker = max(psutil.Process().children(recursive=True), key=lambda p: p.memory_info().rss)
        memory: list[tuple[float, float]] = []
        responses = tokens = 0
        began = time.monotonic()
        limit = 30.0 if quick else 60 * minutes
        number = 0
        while (spent := time.monotonic() - began) < limit:
            found = step(llm.llm_engine, rng, prompts, number, number)
            store.append(found, step=number)
            if rng.random() < 0.02:
                store.clear()
            llm.collective_rpc("take_request_counts", args=([],))
            responses += len(found)
            tokens += sum(len(t.tokens) for t in found)
            memory.append((spent, worker.memory_info().rss / 1e6))
            number += 1
        totals = llm.collective_rpc("draft_totals")[0]
        preempted = sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
        store.close()
    at, megabytes = np.array(memory).T
    late = at > 0.25 * at[-1]
    slope = float(np.polyfit(at[late] / 3600, megabytes[late], 1)[0]) if late.sum() > 2 else float("nan")
    row = {
        "benchmark": "soak",
        "minutes": round(float(at[-1]) / 60, 1),
        "steps": number,
        "responses": responses,
        "tokens": tokens,
        "preemptions": int(preempted),
        "drafted": totals["drafted"],
        "accepted": totals["accepted"],
        "errors": totals["errors"],
        "history_errors": totals["history_errors"],
        "rss_mb_first": round(float(megabytes[0])),
        "rss_mb_at_quarter": round(float(megabytes[late][0])),
        "rss_mb_last": round(float(megabytes[-1])),
        "rss_mb_per_hour_after_quarter": round(slope, 1),
    }
    print_row(row, as_json)
    if totals["errors"] or not totals["accepted"]:
        raise SystemExit("drafting failed")


if __name__ == "__main__":
    app()
