"""Measure how much longer a decoding step takes than the device's part of it: what of the host's work is not hidden.

    python -m benchmarks.host_time [--json] [--quick] [--rows 64 ...] [--ms 9 ...] [--arm NAME ...] [--rounds 3]

vLLM's engine core, its worker process, the scheduler, the sampler and the drafter are real. The device is a clock
(:mod:`benchmarks.host_time.clock`). Each arm has an engine of its own. In each round they run the same requests one
after the other, in rotating order. A step is the time from the end of the
device's last step to the end of its own, in steps of all rows without prompts; drafts cost the device nothing.
``--parts`` shows what the device waits for in steps with drafts.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.host_time import PARTS, TEXT, TOKENS, text
from benchmarks.machine import about, print_row
from verl_rhyme.history.keys import prompt_key
from verl_rhyme.history.record import Trajectory
from verl_rhyme.history.store import HistoryStore

ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
#: Vocabulary of Qwen2.5, and positions of the model.
VOCABULARY, LENGTH = 151_936, 1024
PROMPT, RESPONSE, GROUP = 32, 160, 8
#: Most draft tokens of a row, and of a batch: about as many as a step of a GPU verifies at no cost.
LONGEST, MOST = 32, 256
#: Probability that a token is that of the prompt's text, and responses of its history.
FOLLOW, HISTORY = 0.85, 4
NAMESPACE = "host_time"
#: Seconds after which processes of an engine without requests no longer poll.
IDLE = 1.5
#: Steps of a run that are not counted.
WARM_UP = 4

#: Engine, and whether texts repeat, by arm. "Before" schedules synchronously, as this project did until 0.2.
ARMS: dict[str, tuple[str, bool]] = {
    "stock": ("stock", False),
    "stock, synchronous": ("stock synchronous", False),
    "our sampler": ("sampler", False),
    "before, drafts at rest": ("before", False),
    "before, drafts": ("before", True),
    "drafts at rest": ("now", False),
    "drafts": ("now", True),
}
#: Settings of engines that draft.
DRAFTING = {
    "speculative_config": {
        "method": "custom_class",
        "model": "verl_rhyme.engine.proposer.HistoryProposer",
        "num_speculative_tokens": LONGEST,
    }
}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)


def write_model(folder: Path) -> str:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return str(folder)


def prompt_of(group: int) -> list[int]:
    return np.random.default_rng(group).integers(0, TOKENS, PROMPT).tolist()


def write_history(folder: Path, groups: int) -> None:
    with HistoryStore(folder, NAMESPACE, max_bytes=1 << 26, epochs=4) as store:
        for group in range(groups):
            key = prompt_key(prompt_of(group))
            texts = [text(RESPONSE + 64, group, 10**9 + sample, FOLLOW) for sample in range(HISTORY)]
            store.append([Trajectory(key, t.astype(np.int32), 1.0, 0, 0, s) for s, t in enumerate(texts)], step=0)


class Engine:
    """An engine of one kind."""

    def __init__(self, kind: str, model: str, history: Path, slots: int, parts: bool) -> None:
        from vllm import LLM

        self._llm = LLM(
            model=model,
            dtype="float32",
            enforce_eager=True,
            max_model_len=LENGTH,
            max_num_seqs=slots,
            max_num_batched_tokens=8192,
            block_size=32,
            num_gpu_blocks_override=slots * 12,
            skip_tokenizer_init=True,
            distributed_executor_backend="mp",
            worker_extension_cls="benchmarks.host_time.clock.ClockWorker",
            logprobs_mode="processed_logprobs",
            **_settings(kind, history),
        )
        self._llm.collective_rpc("start_clock", args=(kind in ("sampler", "before", "now"), LENGTH, parts))
        self._sent = 0

    def run(self, rows: int, seconds: float, repeats: bool) -> dict[str, Any]:
        """Generate ``rows`` responses together; ``seconds`` of a forward pass. Return figures of steady steps."""
        from vllm import SamplingParams

        self._llm.collective_rpc("set_clock", args=(seconds,))
        engine = self._llm.llm_engine
        for row in range(rows):
            self._sent += 1
            group = row // GROUP if repeats else 10**6 + self._sent
            prompt, arguments = prompt_of(group), (group, self._sent, FOLLOW if repeats else 0.0)
            params = SamplingParams(
                temperature=1.0,
                max_tokens=RESPONSE,
                ignore_eos=True,
                detokenize=False,
                logprobs=0,
                extra_args={TEXT: arguments, "rhyme": {"key": prompt_key(prompt).hex()}},
            )
            engine.add_request(f"r{self._sent}", {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            engine.step()
        steps, parts = self._llm.collective_rpc("clock_steps")[0]
        time.sleep(IDLE)
        return figures(steps, parts, rows, repeats)


def _settings(kind: str, history: Path) -> dict[str, Any]:
    drafting = {"max_tokens": LONGEST, "max_batch_tokens": MOST, "wait_for_history": True}
    ours = {"drafting": drafting, "history_dir": str(history), "namespace": NAMESPACE}
    ahead = {"additional_config": {"rhyme": {}}}  # makes an engine asynchronous on a CPU, as stock's is on a GPU
    return {
        "stock": ahead,
        "stock synchronous": {"async_scheduling": False},
        "sampler": ahead,
        "before": {**DRAFTING, "additional_config": {"rhyme": ours}, "async_scheduling": False},
        "now": {**DRAFTING, "additional_config": {"rhyme": ours}},
    }[kind]


def figures(steps: list[Any], parts: list[Any], rows: int, repeats: bool) -> dict[str, Any]:
    """Return medians over the steps of all rows, in milliseconds; with drafts if texts repeat."""
    times, drafted, waits = [], [], defaultdict(list)
    for (_, before, earlier, _, _), (launched, done, width, drafts, prompt) in pairwise(steps[WARM_UP:]):
        if width == earlier == rows and not prompt and (drafts > 0 or not repeats):
            times.append(1e3 * (done - before))
            drafted.append(drafts)
            within = dict.fromkeys(PARTS, 0.0)
            for name, begun, ended in parts:
                within[name] += 1e3 * max(0.0, min(ended, launched) - max(begun, before))
            within["take in"] -= within["plan"]
            within["other"] = 1e3 * max(0.0, launched - before) - sum(within.values())
            for name, wait in within.items():
                waits[name].append(wait)
    return {
        "step_ms": statistics.median(times),
        "drafted": statistics.mean(drafted),
        "steps": len(times),
        "parts": {name: statistics.median(each) for name, each in waits.items()},
    }


@app.command()
def main(
    rows: Annotated[list[int], typer.Option(help="Running requests")] = [1, 16, 64, 256],  # noqa: B006
    ms: Annotated[list[float], typer.Option(help="Milliseconds of a forward pass")] = [2, 5, 9, 14, 30],  # noqa: B006
    arm: Annotated[list[str], typer.Option(help="Arms")] = list(ARMS),  # noqa: B006
    rounds: Annotated[int, typer.Option(help="Runs of each arm")] = 3,
    parts: Annotated[bool, typer.Option(help="Show what the device waits for; takes time")] = False,
    json: Annotated[bool, typer.Option(help="Print JSON")] = False,
    quick: Annotated[bool, typer.Option(help="One row of the table, one round")] = False,
) -> None:
    if quick:
        rows, ms, rounds, arm = [16], [9.0], 1, ["stock", "drafts"]
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    folder, engines = Path(tempfile.mkdtemp()), dict[str, Engine]()
    try:
        model = write_model(folder / "model")
        write_history(folder / "history", -(-max(rows) // GROUP))
        for each in arm:
            engines[each] = Engine(ARMS[each][0], model, folder / "history", max(rows), parts)
        for width in rows:
            for milliseconds in ms:
                runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
                for turn in range(rounds):
                    for each in arm[turn % len(arm) :] + arm[: turn % len(arm)]:
                        runs[each].append(engines[each].run(width, milliseconds / 1e3, ARMS[each][1]))
                for each in arm:
                    show(each, width, milliseconds, runs[each], parts, json)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def show(arm: str, rows: int, ms: float, runs: list[dict[str, Any]], parts: bool, json: bool) -> None:
    steps = [run["step_ms"] for run in runs]
    row = {
        **about("host_time"),
        "arm": arm,
        "rows": rows,
        "device_ms": ms,
        "step_ms": round(statistics.median(steps), 3),
        "step_ms_range": [round(min(steps), 3), round(max(steps), 3)],
        "drafted": round(statistics.mean(run["drafted"] for run in runs), 1),
        "steps": sum(run["steps"] for run in runs),
    }
    if parts:
        row["parts_ms"] = {
            name: round(statistics.median(r["parts"][name] for r in runs), 3) for name in runs[0]["parts"]
        }
    line = (
        f"{rows:4} rows, {ms:4} ms: {row['step_ms']:7.3f} ms ({steps_range(steps)}) {row['drafted']:6.1f} drafts  {arm}"
    )
    print_row(row, json, line + (f"  {row['parts_ms']}" if parts else ""))


def steps_range(steps: list[float]) -> str:
    return f"{min(steps):.3f} to {max(steps):.3f}"


if __name__ == "__main__":
    app()
