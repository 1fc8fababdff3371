"""Measure how long the engine waits for the planning of drafts, with histories as long as reasoning models write.

    python -m benchmarks.real_sizes planning [--json] [--quick]

256 rows over 128 prompts, each with a stored history of 16 responses and 500k tokens: the real proposer on the real
store, with a stand-in for vLLM's runner. Texts consist of phrases, most shared by a prompt's responses and some by all
prompts, with token ids from a Zipf distribution over 151,936. A request follows such a text, so drafts are accepted and
rejected as in an engine. Shorter phrases (``--phrase``, mean tokens) give fewer planned tokens per step. The step cost
is not learned: every draft above the minimum probability is planned, the maximum.

Figures are the total time of ``propose()``: ``us_a_row`` of steps with all histories loaded, by number of planning
threads, in turn; and the 99th percentile of such a step over its median. ``admission_ms`` is the excess over a median
step of a step that ends all requests and admits as many; ``worst_loading_ms`` the worst excess until all histories are
loaded. Between steps the engine sleeps, as it does while a GPU decodes. Needs about 2.5 GiB of memory and 1 GiB of
disk; ``--scale 0.25`` takes a quarter of the tokens.
"""

from __future__ import annotations

import gc
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.machine import print_row

VOCABULARY = 151_936
NAMESPACE = "planning"
RESPONSES = 16
#: Tokens of a prompt, of a live response, and of the model's maximum length.
PROMPT, LIVE, WIDTH = 200, 2400, 2700
#: Number of a prompt's phrases and of common phrases, and the share of the latter.
OWN, COMMON, SHARED = 3000, 3000, 0.3
#: Seconds of decoding between two steps.
DECODING = 0.01


def phrases(rng: np.random.Generator, count: int, tokens: int) -> list[np.ndarray]:
    """Return phrases, int32[k] each, with a mean of 1 + ``tokens`` tokens."""
    lengths = 1 + rng.geometric(1 / tokens, count)
    ranks = (VOCABULARY ** rng.random(lengths.sum())).astype(np.int32) - 1  # Zipf's: density 1 / rank
    return np.split(ranks, np.cumsum(lengths)[:-1])


class Texts:
    """Responses to a prompt, regenerated from its number at each use, so that none is stored."""

    def __init__(self, phrase: int) -> None:
        self._phrase, self._common = phrase, phrases(np.random.default_rng(1 << 32), COMMON, phrase)

    def of(self, prompt: int, count: int, length: int, seed: int) -> Iterator[np.ndarray]:
        """Yield ``count`` responses of ``length`` tokens, int32."""
        own = phrases(np.random.default_rng(prompt), OWN, self._phrase)
        rng = np.random.default_rng((prompt, seed))
        for _ in range(count):
            wanted = 2 * length // self._phrase
            common = rng.random(wanted) < SHARED
            which = (OWN ** rng.random(wanted)).astype(int) - 1
            parts = [self._common[i] if c else own[i] for i, c in zip(which.tolist(), common.tolist(), strict=True)]
            yield np.concatenate(parts)[:length]


def record(folder: Path, texts: Texts, prompts: list[list[int]], tokens: int) -> None:
    """Write the store."""
    from verl_rhyme.history.keys import prompt_key
    from verl_rhyme.history.record import Trajectory
    from verl_rhyme.history.store import HistoryStore

    room = max(1 << 26, 2 * 9 * tokens * len(prompts))
    with HistoryStore(folder, NAMESPACE, max_bytes=room, epochs=4) as store:
        for i, prompt in enumerate(prompts):
            logprobs = np.full(tokens // RESPONSES, -0.1, np.float32)
            made = texts.of(i, RESPONSES, tokens // RESPONSES, 0)
            key = prompt_key(prompt)
            store.append([Trajectory(key, r, 1.0, 0, 0, n, logprobs) for n, r in enumerate(made)], i)


class Engine:
    """The part of vLLM that a proposer uses: rows of tokens, requests that follow texts, and verified drafts."""

    def __init__(self, folder: Path, texts: Texts, prompts: list[list[int]], rows: int, threads: int) -> None:
        import torch

        from verl_rhyme.engine.proposer import HistoryProposer

        drafting = {"weigh_cost": False, "plan_threads": threads}
        self.proposer = HistoryProposer(
            SimpleNamespace(
                additional_config={"rhyme": {"drafting": drafting, "history_dir": str(folder), "namespace": NAMESPACE}},
                model_config=SimpleNamespace(
                    max_model_len=WIDTH, get_vocab_size=lambda: VOCABULARY, dtype=torch.bfloat16
                ),
                scheduler_config=SimpleNamespace(
                    max_num_batched_tokens=8192, max_num_scheduled_tokens=8192, max_num_seqs=rows
                ),
                parallel_config=SimpleNamespace(tensor_parallel_size=1),
            )
        )
        self._batch = SimpleNamespace(
            req_ids=[""] * rows,
            spec_token_ids=[[] for _ in range(rows)],
            num_prompt_tokens=np.full(rows, PROMPT, np.int32),
        )
        self._requests: dict[str, Any] = {}
        ends = SimpleNamespace(np=np.zeros(rows + 1, np.int32))  # nothing is prefilled
        self.proposer._runner = SimpleNamespace(input_batch=self._batch, requests=self._requests, query_start_loc=ends)
        self.proposer._start()
        gc.collect()  # as vLLM's workers do after their start
        gc.freeze()
        self._texts, self._prompts, self._rows = texts, prompts, rows
        self._tokens = np.zeros((rows, WIDTH), np.int32)
        self._lengths = np.full(rows, PROMPT, np.int32)
        self._paths: list[np.ndarray] = []
        self._generation = 0
        self.emitted = 0

    def admit(self) -> None:
        """End all requests and start as many; siblings are adjacent."""
        from vllm import SamplingParams

        from verl_rhyme.history.keys import prompt_key
        from verl_rhyme.processes.request import RequestMeta

        self._generation += 1
        each = self._rows // len(self._prompts)
        self._requests.clear()
        self._paths = []
        for i, prompt in enumerate(self._prompts):
            for sample, path in enumerate(self._texts.of(i, each, LIVE, self._generation)):
                row, name = i * each + sample, f"{self._generation}-{i}-{sample}"
                meta = RequestMeta(id=name, key=prompt_key(prompt).hex())
                params = SamplingParams(max_tokens=LIVE, **meta.put({}))
                self._requests[name] = SimpleNamespace(sampling_params=params, prompt_token_ids=prompt)
                self._batch.req_ids[row] = name
                self._tokens[row, :PROMPT] = prompt
                self._paths.append(path)
        self._lengths[:] = PROMPT
        self._batch.spec_token_ids = [[] for _ in range(self._rows)]

    @property
    def left(self) -> int:
        """Remaining tokens of the longest request."""
        return LIVE + PROMPT - int(self._lengths.max())

    def step(self, accepting: bool = True) -> float:
        """Verify the drafts and propose new ones; return the proposer's seconds.

        Args:
            accepting: Accept drafts; else steps advance slowly.
        """
        sampled = []
        for row, (path, draft) in enumerate(zip(self._paths, self._batch.spec_token_ids, strict=True)):
            done = int(self._lengths[row]) - PROMPT
            future = path[done : done + len(draft) + 1].tolist()
            accepted = 0
            while accepting and accepted < len(draft) and draft[accepted] == future[accepted]:
                accepted += 1
            new = future[: accepted + 1]
            self._tokens[row, PROMPT + done : PROMPT + done + len(new)] = new
            self._lengths[row] += len(new)
            self.emitted += len(new)
            sampled.append(new)
        started = time.perf_counter()
        drafts = self.proposer.propose(sampled, self._lengths, self._tokens)
        seconds = time.perf_counter() - started
        self._batch.spec_token_ids = drafts
        return seconds

    def loading(self) -> list[float]:
        """Run steps until all histories are loaded; return their seconds."""
        seconds = [self.step()]
        while self.proposer._history.pending:
            time.sleep(DECODING)
            seconds.append(self.step(accepting=False))
        return seconds


def main(
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per line")] = False,
    quick: Annotated[bool, typer.Option(help="32 rows, 16 prompts of 20k tokens")] = False,
    scale: Annotated[float, typer.Option(help="share of the tokens")] = 1.0,
    phrase: Annotated[int, typer.Option(help="mean tokens of a phrase")] = 12,
    threads: Annotated[list[int] | None, typer.Option(help="planning threads; default: 1 and 2")] = None,
    rounds: Annotated[int, typer.Option(help="number of admissions of all requests")] = 4,
    steps: Annotated[int, typer.Option(help="steps per round with all histories loaded")] = 150,
) -> None:
    """Measure steps with planning, and steps with admissions."""
    rows, count, tokens = (32, 16, 20_000) if quick else (256, 128, int(500_000 * scale))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCABULARY, PROMPT).tolist() for _ in range(count)]
    texts = Texts(phrase)
    with tempfile.TemporaryDirectory() as folder:
        record(Path(folder) / "history", texts, prompts, tokens)
        # One engine at a time: two would hold all histories twice.
        for number in threads or (1, 2):
            engine = Engine(Path(folder) / "history", texts, prompts, rows, number)
            steady: list[float] = []
            admitting, loading, drafted = [], [], []
            for turn in range(1 if quick else rounds + 1):
                engine.admit()
                waits = engine.loading()
                for _ in range(20):
                    engine.step()
                engine.emitted = 0
                found: list[float] = []
                while len(found) < steps and engine.left > 40:
                    found.append(engine.step())
                if turn or quick:  # the first round touches fresh memory
                    admitting.append(waits[0])
                    loading += waits[1:]
                    steady += found
                    drafted.append(engine.emitted / len(found) / rows)
            q1, median, q3, last = np.quantile(steady, [0.25, 0.5, 0.75, 0.99]).tolist()
            row = {
                "benchmark": "real_sizes planning",
                "arm": f"{number} threads" if number > 1 else "1 thread",
                "rows": rows,
                "prompts": count,
                "history_tokens": tokens,
                "phrase": phrase,
                "us_a_row": round(1e6 * median / rows, 2),
                "us_a_row_q1": round(1e6 * q1 / rows, 2),
                "us_a_row_q3": round(1e6 * q3 / rows, 2),
                "p99_to_median": round(last / median, 2),
                "admission_ms": round(1e3 * (float(np.median(admitting)) - median), 2),
                "admission_ms_most": round(1e3 * (max(admitting) - median), 2),
                "worst_loading_ms": round(1e3 * (max(loading, default=median) - median), 2),
                "loading_steps": round(len(loading) / len(admitting), 1),
                "tokens_a_row": round(float(np.mean(drafted)), 2),
                "steps": len(steady),
                "errors": engine.proposer.totals()["errors"] + engine.proposer.totals()["history_errors"],
                "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
            }
            print_row(row, as_json)
            del engine


if __name__ == "__main__":
    typer.run(main)
