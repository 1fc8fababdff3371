"""Measure what a draft head adds on recorded traces: text alone, the head alone, both.

    python -m benchmarks.draft_head --policy DIR --temperature T [--passes 1 --passes 8] [--json] [--quick] TRACE ...

The hidden states come from the policy (:mod:`benchmarks.policy_states`), so the trace must be of an untrained policy.
The head starts untrained. After each decoding step it trains on ``--passes`` positions per emitted token. ``--save
FILE`` trains a head on all epochs except the last, and writes it to a file for ``drafting.head``.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks import policy_states, traces
from benchmarks.arms import NoDrafts, Rhyme
from benchmarks.draft_quality import summary
from benchmarks.machine import commit, describe
from benchmarks.policy_states import States
from benchmarks.replay import replay
from benchmarks.traces import Response
from verl_rhyme.config import DraftingConfig
from verl_rhyme.drafting import head
from verl_rhyme.drafting.adaptive import AdaptiveDrafter
from verl_rhyme.drafting.head import DraftHead, HeadTrainer, PolicyRows
from verl_rhyme.drafting.head_inference import HeadInference
from verl_rhyme.drafting.head_interface import Proposals
from verl_rhyme.drafting.policy import DecodeStep

STEPS = 4
#: Most tokens that the head can draft, and tokens in its buffer.
_MOST_TOKENS, _BUFFER = 4096, 1 << 16
#: Tokens between two selections of the output rows.
_CHOOSE_EVERY = 2048
_FEWEST = 256


class Learning:
    """Draft head that trains on the states of a trace, as in the engine."""

    def __init__(self, states: States, temperature: float, passes: float) -> None:
        torch.manual_seed(0)
        self._states, self._passes = states, passes
        self._output, self._embedding = torch.from_numpy(states.output), torch.from_numpy(states.embedding)
        self.head = DraftHead(states.output.shape[1])
        self.inference, self._trainer = HeadInference(self.head, STEPS), HeadTrainer(self.head, _BUFFER, STEPS)
        self.inference.temperature = temperature
        self.counts_of_tokens: Counter[int] = Counter()
        self._seen: dict[str, int] = {}
        self._number: dict[str, int] = {}
        self._since, self._owed = _CHOOSE_EVERY, 0.0
        self.seconds, self.updates = 0.0, 0

    def start(self, response: Response) -> None:
        self.counts_of_tokens.update(response.prompt.tolist())
        self._seen[response.id], self._number[response.id] = 0, -1

    @property
    def steps(self) -> int:
        """Steps of the head; 0 while it has too few updates, as in the engine."""
        return self.inference.steps if self.updates >= head.MIN_UPDATES else 0

    def propose(self, position: int, going: np.ndarray, latest: np.ndarray) -> Proposals:
        return self.inference.propose(position, going, latest)

    def observe(self, responses: Sequence[Response], done: DecodeStep) -> None:
        """Take the tokens emitted since the last step; the head then predicts their continuation."""
        states, tokens, previous = [], [], []
        for response, length in zip(responses, done.lengths, strict=True):
            first, end = self._seen[response.id], int(length) - len(response.prompt)
            states.append(self._states.hidden[response.id][first:end])
            previous += [self._number[response.id], *range(-2 - len(tokens), -1 - len(tokens) - end + first, -1)]
            tokens += response.tokens[first:end].tolist()
            self._seen[response.id] = end
            self._number[response.id] = -2 - (len(tokens) - 1)
        hidden = torch.from_numpy(np.concatenate(states)).float()
        numbers = self._trainer.add(hidden, np.array(tokens), np.array(previous))
        for response in responses:
            self._number[response.id] = int(numbers[-2 - self._number[response.id]])
        self.counts_of_tokens.update(tokens)
        self._since += len(tokens)
        if self._since >= _CHOOSE_EVERY:
            self._since = 0
            chosen = torch.tensor([token for token, _ in self.counts_of_tokens.most_common(_MOST_TOKENS)])
            self.inference.rows = PolicyRows.of(
                chosen, self._output[chosen], self._embedding[chosen], len(self._output)
            )
        self._learn(len(tokens))
        last = np.cumsum([len(part) for part in states]) - 1
        self.inference.begin(hidden[torch.from_numpy(last)])

    def _learn(self, emitted: int) -> None:
        self._owed += self._passes * emitted / (HeadTrainer.SEGMENT * self._trainer.segments)
        rows = self.inference.rows
        assert rows is not None
        began = time.perf_counter()
        while self._owed >= 1 and len(self._trainer) >= _FEWEST:
            self._owed -= 1
            self._trainer.update(rows, self.inference.temperature)
            self.updates += 1
        self.seconds += time.perf_counter() - began


def trained(states: States, steps: Sequence[Sequence[Response]], temperature: float, passes: float) -> Learning:
    """Return a head trained on all epochs except the last."""
    learning = Learning(states, temperature, passes)
    replay([step for step in steps if step[0].epoch < steps[-1][0].epoch], HeadAlone(1.0, learning))
    return learning


class Both(Rhyme):
    """Adaptive drafter with a draft head."""

    def __init__(self, floor: float, learning: Learning) -> None:
        self.learning = learning
        config = DraftingConfig(floor=floor, weigh_cost=False)
        super().__init__(config, make=lambda *args: AdaptiveDrafter(*args, head=learning))

    def start(self, response: Response) -> None:
        super().start(response)
        self.learning.start(response)

    def step(self, responses: Sequence[Response], done: DecodeStep) -> list[list[int]]:
        self.learning.observe(responses, done)
        return super().step(responses, done)


class HeadAlone(NoDrafts):
    """Drafts the head's most probable tokens while their joint probability stays above the minimum."""

    def __init__(self, floor: float, learning: Learning) -> None:
        self._floor, self.learning = floor, learning

    def start(self, response: Response) -> None:
        self.learning.start(response)

    def step(self, responses: Sequence[Response], done: DecodeStep) -> list[list[int]]:
        self.learning.observe(responses, done)
        drafts: list[list[int]] = [[] for _ in responses]
        latest = done.tokens[done.rows, done.lengths - 1]
        reach, going = np.ones(len(responses)), np.arange(len(responses))
        for position in range(self.learning.steps):
            tokens, probabilities = self.learning.propose(position, going, latest)
            reach[going] *= probabilities[going, 0]
            going = going[reach[going] >= self._floor]
            latest = tokens[:, 0]
            for row in going:
                drafts[row].append(int(latest[row]))
            if not len(going):
                break
        return drafts


def main(
    files: list[Path],
    policy: Annotated[Path, typer.Option(help="folder of the untrained policy")],
    temperature: Annotated[float, typer.Option(help="temperature of the trace")] = 1.0,
    passes: Annotated[list[float] | None, typer.Option(help="training passes per token")] = None,
    floor: Annotated[list[float] | None, typer.Option(help="value of drafting.floor")] = None,
    arm: Annotated[list[str] | None, typer.Option(help="text, head or both; default: all")] = None,
    save: Annotated[Path | None, typer.Option(help="train a head on the trace, write it here, and stop")] = None,
    quick: Annotated[bool, typer.Option(help="the first two epochs, one floor")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per line")] = False,
) -> None:
    """Replay traces and print acceptance length and verification overhead by epoch."""
    floors = floor or ([0.1] if quick else [0.2, 0.1, 0.05])
    for path in files:
        steps = traces.load(path)
        if quick:
            steps = [step for step in steps if step[0].epoch < 2]
        states = policy_states.load(steps, policy, temperature)
        if save is not None:
            learning = trained(states, steps, temperature, (passes or [8.0])[0])
            counts = np.zeros(len(states.output), dtype=np.int64)
            counts[list(learning.counts_of_tokens)] = list(learning.counts_of_tokens.values())
            head.save(save, learning.head, counts, learning.updates)
            return
        learns = [(name, f, p) for name in ("head", "both") for p in passes or [1.0, 8.0] for f in floors]
        arms = [("text", f, 0.0) for f in floors] + learns
        arms = [each for each in arms if not arm or each[0] in arm]
        for name, f, p in arms:
            learning = Learning(states, temperature, p)
            config = DraftingConfig(floor=f, weigh_cost=False)
            drafter = Rhyme(config) if name == "text" else {"head": HeadAlone, "both": Both}[name](f, learning)
            tallies = replay(steps, drafter)
            for epochs, part in (("first", [tallies[0]]), ("later", [t for e, t in tallies.items() if e])):
                row: dict[str, Any] = {"benchmark": "draft_head", "trace": path.stem, "drafts from": name}
                row |= {"floor": f, "passes": p, "epochs": epochs}
                if part:
                    figures = summary(part)
                    row |= {key: figures[key] for key in ("tokens_per_step", "verified_per_token")}
                    row |= {"updates": learning.updates, "training_seconds": round(learning.seconds, 1)}
                    row |= {"machine": describe(), "commit": commit()}
                    print(json.dumps(row) if as_json else {k: row[k] for k in list(row)[1:8]}, flush=True)


if __name__ == "__main__":
    typer.run(main)
