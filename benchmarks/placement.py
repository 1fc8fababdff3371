"""Which replica serves which request: verl's least loaded against a prompt's requests together, at real sizes.

    python -m benchmarks.placement [--json] [--quick] [--prompts N]

The real placement objects, without engines: 17,398 prompts x 16 samples (DAPO-Math) in steps of 512 prompts and then,
reshuffled, the first 12 steps of another epoch, sent by 16 agent loop workers at once, on 2 to 1,024 replicas. Response
lengths are log-normal, among prompts and within each: 4,000 tokens on average, 20,480 at most. "sync": all samples
of a step are sent at once, loads are read when all of them run. "stream": a prompt is sent as soon as 16 samples ended,
so that 8,192 always run; loads are read at every 512th prompt after the first 512. A sample runs for as long as it has
tokens, whatever its replica carries.

Arms: `least_loaded`; `sticky_group`, told all that client and scheduler can tell (key, group, in "sync" how many will
come); `untold`, the key alone; `tokens`, with a prediction of each response's length besides, log-normally off by 0.3.

Figures are medians over steps, and the greatest where it is named. Microseconds are processor time of one thread.
"pairs": share of all sibling pairs that are on one replica. "home": share of the second epoch's samples that come to
the replica where most of their prompt's samples were in the first.
"""

from __future__ import annotations

import heapq
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.machine import commit, describe
from verl_rhyme.placement import Placement, Request

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)

SAMPLES, BATCH, WORKERS = 16, 512, 16
PROMPT_TOKENS, MEAN_TOKENS, MOST_TOKENS = 200, 4000, 20480
ARMS = {
    "least_loaded": "least_loaded",
    "sticky_group": "sticky_group",
    "untold": "sticky_group",
    "tokens": "sticky_group",
}


def lengths(prompts: int, epoch: int) -> np.ndarray:
    """int[prompts, SAMPLES], tokens of each response."""
    hard = np.random.default_rng(7).lognormal(0.0, 0.7, (prompts, 1))
    drawn = hard * np.random.default_rng(100 + epoch).lognormal(0.0, 0.4, (prompts, SAMPLES))
    return np.clip(drawn / np.exp(0.7**2 / 2 + 0.4**2 / 2) * MEAN_TOKENS, 1, MOST_TOKENS).astype(int)


@dataclass
class Figures:
    acquire: list[float] = field(default_factory=list)
    release: list[float] = field(default_factory=list)
    requests: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    pairs: list[float] = field(default_factory=list)
    home: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        return {
            "acquire_us": round(float(np.median(self.acquire)), 1),
            "acquire_us_p95": round(float(np.percentile(self.acquire, 95)), 1),
            "release_us": round(float(np.median(self.release)), 1),
            "requests_to_mean": round(float(np.median(self.requests)), 3),
            "requests_to_mean_greatest": round(max(self.requests), 3),
            "tokens_to_mean": round(float(np.median(self.tokens)), 3),
            "tokens_to_mean_greatest": round(max(self.tokens), 3),
            "pairs": round(float(np.mean(self.pairs)), 4),
            "home": round(float(np.mean(self.home)), 4),
        }


class Run:
    """One arm over one fleet."""

    def __init__(self, arm: str, replicas: int, prompts: int) -> None:
        self.arm, self.prompts, self.figures = arm, prompts, Figures()
        self.placement = Placement(ARMS[arm], {"seed": 1} if arm == "least_loaded" else None)
        for i in range(replicas):
            self.placement.add(f"10.0.{i // 256}.{i % 256}:{40000 + 7 * i % 9973}")
        self.homes: dict[int, str] = {}
        self.carried: Counter[str] = Counter()  # true tokens by replica
        self.replicas = replicas

    def requests(self, prompts: np.ndarray, length: np.ndarray, epoch: int) -> list[tuple[Request, int, int]]:
        """(request, prompt, tokens) as the workers send them: each its prompts, one after another."""
        off = np.random.default_rng(epoch).lognormal(0.0, 0.3, length.shape)
        queues = []
        for part in np.array_split(prompts, WORKERS):
            queues.append(
                [
                    (
                        Request(
                            f"{epoch}/{p}/{s}",
                            f"{p:032x}",
                            s,
                            group=SAMPLES if self.arm in ("sticky_group", "tokens") else 0,
                            prompt_tokens=PROMPT_TOKENS,
                            response_tokens=int(length[p, s] * off[p, s]) if self.arm == "tokens" else None,
                        ),
                        p,
                        int(length[p, s]),
                    )
                    for p in part.tolist()
                    for s in range(SAMPLES)
                ]
            )
        return [queue[i] for i in range(max(map(len, queues))) for queue in queues if i < len(queue)]

    def send(self, wave: list[tuple[Request, int, int]], epoch: int) -> list[tuple[int, str, str]]:
        """(tokens, request, replica) of each."""
        acquire = self.placement.acquire
        started = time.thread_time()
        where = [acquire(request) for request, _, _ in wave]
        self.figures.acquire.append((time.thread_time() - started) / len(wave) * 1e6)
        groups: dict[int, Counter[str]] = {}
        for (_, p, tokens), replica in zip(wave, where, strict=True):
            groups.setdefault(p, Counter())[replica] += 1
            self.carried[replica] += PROMPT_TOKENS + tokens
        for p, on in groups.items():
            self.figures.pairs.append(sum(n * (n - 1) for n in on.values()) / (SAMPLES * (SAMPLES - 1)))
            if epoch:
                self.figures.home.append(on[self.homes[p]] / SAMPLES)
            self.homes[p] = on.most_common(1)[0][0]
        return [(tokens, request.id, at) for (request, _, tokens), at in zip(wave, where, strict=True)]

    def finish(self, ended: list[tuple[int, str, str]]) -> None:
        release = self.placement.release
        started = time.thread_time()
        for _, request, replica in ended:
            release(request, replica)
        self.figures.release.append((time.thread_time() - started) / len(ended) * 1e6)
        for tokens, _, replica in ended:
            self.carried[replica] -= PROMPT_TOKENS + tokens

    def read(self) -> None:
        status = self.placement.status()
        self.figures.requests.append(status["request_imbalance"])
        self.figures.tokens.append(max(self.carried.values()) * self.replicas / sum(self.carried.values()))

    def steps(self, batch: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        for epoch in range(2):
            length, order = lengths(self.prompts, epoch), np.random.default_rng(epoch).permutation(self.prompts)
            for prompts in np.split(order[: None if not epoch else 12 * BATCH], range(batch, self.prompts, batch)):
                if len(prompts):
                    yield epoch, prompts, length

    def sync(self) -> None:
        for epoch, prompts, length in self.steps(BATCH):
            wave = self.requests(prompts, length, epoch)
            if self.arm in ("sticky_group", "tokens"):
                self.placement.expect(len(wave))
            ended = self.send(wave, epoch)
            if len(prompts) == BATCH:
                self.read()
            self.finish(sorted(ended))

    def stream(self) -> None:
        clock, running = 0, []  # (end, tokens, request, replica)
        for number, (epoch, prompts, length) in enumerate(self.steps(1)):
            while len(running) > (BATCH - 1) * SAMPLES:
                ended = [heapq.heappop(running) for _ in range(SAMPLES)]
                clock = ended[-1][0]
                self.finish([(tokens, request, at) for _, tokens, request, at in ended])
            for tokens, request, at in self.send(self.requests(prompts, length, epoch), epoch):
                heapq.heappush(running, (clock + tokens, tokens, request, at))
            if number >= BATCH and number % BATCH == 0:
                self.read()


def measure(arm: str, regime: str, replicas: int, prompts: int) -> dict[str, Any]:
    run = Run(arm, replicas, prompts)
    run.sync() if regime == "sync" else run.stream()
    assert run.placement.errors == 0, run.placement.last_error
    return run.figures.summary()


@app.command()
def main(
    as_json: Annotated[bool, typer.Option("--json", help="one object a line")] = False,
    quick: Annotated[bool, typer.Option(help="1,536 prompts, fewer sizes")] = False,
    prompts: Annotated[int, typer.Option(help="of an epoch")] = 17_398,
) -> None:
    """Measure and print."""
    about = {"benchmark": "placement", "machine": describe(), "commit": commit()}
    prompts = 1536 if quick else prompts
    sizes = {"sync": (4, 32, 1024), "stream": (32,)} if quick else {"sync": (2, 4, 32, 128, 1024), "stream": (32, 128)}
    for regime, fleets in sizes.items():
        for replicas in fleets:
            for arm in ARMS:
                row = {
                    "arm": arm,
                    "regime": regime,
                    "replicas": replicas,
                    "prompts": prompts,
                    "in_flight": BATCH * SAMPLES,
                }
                row |= measure(arm, regime, replicas, prompts)
                print(json.dumps({**about, **row}) if as_json else row, flush=True)


if __name__ == "__main__":
    app()
