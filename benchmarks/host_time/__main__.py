"""Measure the host's time of a decoding step that the device does not hide, over stock vLLM's asynchronous scheduling.

    python -m benchmarks.host_time [--json] [--quick] [--rows 64 ...] [--ms 9 ...] [--rounds 3]
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import tempfile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.host_time.clock import TEXT, TOKENS, text
from benchmarks.machine import print_row
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
#: Vocabulary of Qwen, and positions of the model.
VOCABULARY, LENGTH = 151_936, 1024
PROMPT, RESPONSE, GROUP, LONGEST = 32, 160, 8, 32
#: Share of tokens that follow the prompt's text, and responses of its history.
FOLLOW, HISTORY = 0.85, 4
NAMESPACE = "host_time"

#: Arms: settings of the engine, our sampler, and whether texts repeat.
STOCK = "stock"
ARMS: dict[str, tuple[str, bool]] = {
    "stock": ("stock", False),
    "stock, synchronous": ("stock synchronous", False),
    "sampler": ("sampler", False),
    "before, drafts at rest": ("before", False),
    "before, drafts": ("before", True),
    "drafts at rest": ("now", False),
    "drafts": ("now", True),
}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)


def model(folder: Path) -> str:
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


def children() -> list[int]:
    import psutil

    return [each.pid for each in psutil.Process().children(recursive=True)]


def prompt_of(group: int) -> list[int]:
    return np.random.default_rng(group).integers(0, TOKENS, PROMPT).tolist()


class Engine:
    def __init__(self, kind: str, model: str, history: Path, slots: int, weigh: bool) -> None:
        from vllm import LLM

        drafting = {"max_tokens": LONGEST, "wait_for_history": True, "weigh_cost": weigh, "max_batch_tokens": 256}
        settings: dict[str, Any] = {}
        if kind in ("before", "now"):
            settings = {
                "speculative_config": {
                    "method": "custom_class",
                    "model": "verl_rhyme.engine.proposer.HistoryProposer",
                    "num_speculative_tokens": LONGEST,
                },
                "additional_config": {
                    "rhyme": {"drafting": drafting, "history_dir": str(history), "namespace": NAMESPACE}
                },
            }
        if kind in ("stock", "sampler"):
            settings["additional_config"] = {"rhyme": {}}  # asynchronous, as without it on a GPU
        if kind in ("stock synchronous", "before"):
            settings["async_scheduling"] = False
        before = set(children())
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
            **settings,
        )
        self._llm.collective_rpc("start_clock", args=(kind in ("sampler", "before", "now"), LENGTH))
        self._sent = 0
        self._processes = set(children()) - before
        self.signal(signal.SIGSTOP)

    def signal(self, number: int) -> None:
        """Stop or continue the engine's processes: they poll for a second after each message."""
        for process in self._processes:
            os.kill(process, number)

    def run(self, rows: int, seconds: float, repeats: bool) -> dict[str, float]:
        from vllm import SamplingParams

        self.signal(signal.SIGCONT)
        self._llm.collective_rpc("set_clock", args=(seconds,))
        engine = self._llm.llm_engine
        for row in range(rows):
            self._sent += 1
            group = row // GROUP if repeats else 1_000_000 + self._sent
            prompt = prompt_of(group)
            extra = {TEXT: (group, self._sent, FOLLOW if repeats else 0.0), "rhyme": {"key": prompt_key(prompt).hex()}}
            params = SamplingParams(
                temperature=1.0, max_tokens=RESPONSE, ignore_eos=True, detokenize=False, logprobs=0, extra_args=extra
            )
            engine.add_request(f"r{self._sent}", {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            engine.step()
        steps = self._llm.collective_rpc("clock_steps")[0]
        self.signal(signal.SIGSTOP)
        return steady(steps, rows, repeats)


def steady(steps: list[Any], rows: int, repeats: bool) -> dict[str, float]:
    """Return milliseconds of the steps of all rows, from the end of the device's step before to the end of its own."""
    times, drafted, idle = [], [], []
    for before, step in zip(steps[4:], steps[5:], strict=False):
        _, done, width, drafts, prompt = step
        if width == rows and before[2] == rows and not prompt and not before[4] and (not repeats or drafts):
            times.append(1e3 * (done - before[1]))
            drafted.append(drafts)
            idle.append(1e3 * (step[0] - before[1]))
    return {
        "step_ms": statistics.median(times),
        "drafted": float(np.mean(drafted)),
        "steps": len(times),
        "launched_ms": statistics.median(idle),
    }


@app.command()
def main(
    rows: Annotated[list[int], typer.Option(help="Running requests")] = [1, 16, 64, 256],  # noqa: B006
    ms: Annotated[list[float], typer.Option(help="Milliseconds of a forward pass")] = [2, 5, 9, 14, 30],  # noqa: B006
    arm: Annotated[list[str], typer.Option(help="Arms; all by default")] = list(ARMS),  # noqa: B006
    rounds: int = 3,
    json: bool = False,
    quick: bool = False,
    weigh: bool = True,
) -> None:
    if quick:
        rows, ms, rounds = [64], [9], 1
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    folder = Path(tempfile.mkdtemp())
    try:
        engines: dict[str, Engine] = {}
        path = model(folder / "model")
        with HistoryStore(folder / "history", NAMESPACE, max_bytes=1 << 26, epochs=4) as store:
            for group in range(max(rows) // GROUP + 1):
                key = prompt_key(prompt_of(group))
                store.append(
                    [
                        Trajectory(key, text(RESPONSE + 64, group, -1 - s, FOLLOW).astype(np.int32), 1.0, 0, 0, s)
                        if False
                        else Trajectory(key, text(RESPONSE + 64, group, 10**9 + s, FOLLOW).astype(np.int32), 1.0, 0, 0, s)
                        for s in range(HISTORY)
                    ],
                    step=0,
                )
        kinds = {ARMS[each][0] for each in arm}
        for kind in sorted(kinds):
            engines[kind] = Engine(kind, path, folder / "history", max(rows), weigh)
        for width in rows:
            for each_ms in ms:
                found: dict[str, list[dict[str, float]]] = {each: [] for each in arm}
                for turn in range(rounds):
                    for each in arm[turn % len(arm) :] + arm[: turn % len(arm)]:
                        kind, repeats = ARMS[each]
                        found[each].append(engines[kind].run(width, each_ms / 1e3, repeats))
                for each, runs in found.items():
                    step = [run["step_ms"] for run in runs]
                    row = {
                        "arm": each,
                        "rows": width,
                        "device_ms": each_ms,
                        "step_ms": round(statistics.median(step), 3),
                        "range": [round(min(step), 3), round(max(step), 3)],
                        "drafted": round(statistics.mean(run["drafted"] for run in runs), 1),
                        "steps": sum(int(run["steps"]) for run in runs),
                    }
                    print_row(row, json, f"{width:4} rows {each_ms:5} ms  {each:24} {row['step_ms']:8.3f} ms {row['range']} drafted {row['drafted']} n {row['steps']}")
    finally:
        for engine in engines.values():
            engine.signal(signal.SIGCONT)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    app()
