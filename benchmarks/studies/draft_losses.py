"""Where drafts end, and why: what is lost between the adaptive drafter's accepted tokens and what could be had.

    python -m benchmarks.studies.draft_losses [--policy DIR --temperature T] [--json] [--quick] TRACE.parquet ...

Every verify step ends with a token that no draft gave. Of that token it is asked, in this order:

draft full          the draft was as long as it may be, and all of it right
below floor         it was planned, and estimated below ``drafting.floor``
not the likeliest   the policy drew another token than its likeliest one
wrong candidate     it is the likeliest one, and a source knows it: another token was drafted or planned
in no source        it is the likeliest one, and no source knows it

A source knows a token that followed the same two tokens in the prompt's history, in the group's live texts or in the
request's own text, or the same three in any response. The likeliest token needs the policy: ``--policy``, its folder,
of a trace whose policy was not trained; without it "not the likeliest" is part of the two after it. The ceilings are
acceptance lengths of drafters that always draft the likeliest token, and that draft every token which a source knows;
that of the best copy in hindsight is an arm of :mod:`benchmarks.draft_quality`.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks import policy_states, traces
from benchmarks.arms import Oracle, Rhyme
from benchmarks.machine import commit
from benchmarks.replay import Tally, replay
from benchmarks.traces import Response
from verl_rhyme.config import DraftingConfig
from verl_rhyme.drafting.policy import DecodeStep

REASONS = ("draft full", "below floor", "not the likeliest", "wrong candidate", "in no source")
FLOOR = 0.1
#: Of :func:`benchmarks.replay.replay`.
LONGEST = 32


class Known:
    """What the drafter's sources have seen: next tokens by the last two in a group, by the last three anywhere."""

    def __init__(self) -> None:
        self._group: dict[tuple[bytes, int, int], set[int]] = defaultdict(set)
        self._all: dict[tuple[int, int, int], set[int]] = defaultdict(set)

    def add(self, key: bytes, text: np.ndarray, first: int, last: int, prompt: int) -> None:
        """Take in ``text[first:last]``, of which ``prompt`` tokens are the prompt."""
        for i in range(max(first, 2), last):
            a, b, token = text[i - 2 : i + 1].tolist()
            self._group[key, a, b].add(token)
            if i >= max(3, prompt):
                self._all[int(text[i - 3]), a, b].add(token)

    def has(self, key: bytes, before: np.ndarray, token: int) -> bool:
        """Whether ``token`` has followed the last tokens of ``before``."""
        a, b, c = before[-3:].tolist()
        return token in self._group.get((key, b, c), ()) or token in self._all.get((a, b, c), ())


class Watched(Rhyme):
    """The adaptive drafter, asked at every step why its draft ends where it does.

    Attributes:
        reasons: Verify steps by epoch and reason.
        known: bool[n] by response: the tokens that a source knew.
    """

    def __init__(self, likeliest: dict[str, np.ndarray] | None) -> None:
        super().__init__(DraftingConfig(floor=FLOOR, weigh_cost=False))
        self._likeliest, self._sources, self._length = likeliest, Known(), dict[str, int]()
        self.reasons: Counter[tuple[int, str]] = Counter()
        self.known: dict[str, np.ndarray] = {}

    def start(self, response: Response) -> None:
        super().start(response)
        self.known[response.id] = np.zeros(len(response.tokens), dtype=bool)

    def step(self, responses: Sequence[Response], done: DecodeStep) -> list[list[int]]:
        rows = zip(responses, done.rows, done.lengths, strict=True)
        self._take_in([(response, done.tokens[row], int(length)) for response, row, length in rows])
        drafts = super().step(responses, done)
        for response, row, length, draft in zip(responses, done.rows, done.lengths, drafts, strict=True):
            future = response.tokens[length - len(response.prompt) :]
            right = 0
            while right < min(len(draft), len(future)) and draft[right] == future[right]:
                right += 1
            if right < len(future):
                text = np.concatenate([done.tokens[row, :length], future[:right]])
                self.reasons[response.epoch, self._reason(response, text, draft, right, int(future[right]))] += 1
        return drafts

    def finish(self, response: Response) -> None:
        text = np.concatenate([response.prompt, response.tokens])
        self._take_in([(response, text, len(text))])
        super().finish(response)

    def _take_in(self, texts: Sequence[tuple[Response, np.ndarray, int]]) -> None:
        for response, text, length in texts:  # before any of this step's tokens is a source
            prompt, first = len(response.prompt), self._length.get(response.id, 0)
            for end in range(max(first, prompt + 1), length):
                self.known[response.id][end - prompt] = self._sources.has(response.key, text[:end], int(text[end]))
        for response, text, length in texts:
            self._sources.add(response.key, text, self._length.get(response.id, 0), length, len(response.prompt))
            self._length[response.id] = length

    def _reason(self, response: Response, text: np.ndarray, draft: list[int], right: int, token: int) -> str:
        if right == LONGEST:
            return "draft full"
        slots, slot = self.policy._slots, self.policy._requests[response.id].slot
        if right == len(draft) and slots.planned[slot] > right and slots.draft[slot, right] == token:
            return "below floor"
        if self._likeliest is not None and self._likeliest[response.id][len(text) - len(response.prompt)] != token:
            return "not the likeliest"
        return "wrong candidate" if self._sources.has(response.key, text, token) else "in no source"


def rows(
    trace: str, steps: Sequence[Sequence[Response]], policy: Path | None, temperature: float
) -> list[dict[str, Any]]:
    """One for the first epoch, one for the later ones."""
    best = None
    if policy is not None:
        states = policy_states.load(steps, policy, temperature)
        best = {r.id: states.likeliest(r.id) for step in steps for r in step}
    arm = Watched(best)
    tallies = replay(steps, arm)
    ceilings = {"known": arm.known}
    if best is not None:
        ceilings["likeliest"] = {r.id: best[r.id] == r.tokens for step in steps for r in step}
    replayed = {name: replay(steps, Oracle(known)) for name, known in ceilings.items()}
    found = []
    for name, epochs in (("first", [0]), ("later", [e for e in tallies if e])):
        ended = {why: sum(arm.reasons[e, why] for e in epochs) for why in REASONS}
        if best is None:
            del ended["not the likeliest"]
        if not epochs:
            continue
        row: dict[str, Any] = {"trace": trace, "epochs": name}
        row["tokens_per_step"] = _ratio([tallies[e] for e in epochs])
        row |= {why: round(count / max(1, sum(ended.values())), 3) for why, count in ended.items()}
        row |= {f"ceiling_{of}": _ratio([there[e] for e in epochs]) for of, there in replayed.items()}
        found.append(row)
    return found


def _ratio(tallies: Sequence[Tally]) -> float:
    return round(sum(t.emitted for t in tallies) / max(1, sum(t.steps for t in tallies)), 2)


def main(
    files: list[Path],
    policy: Annotated[Path | None, typer.Option(help="folder of the policy, where it was not trained")] = None,
    temperature: Annotated[float, typer.Option(help="of the trace")] = 1.0,
    quick: Annotated[bool, typer.Option(help="the first two epochs")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one object a line")] = False,
) -> None:
    """Replay traces and print why drafts end, and the ceilings (docs/studies/real_model.md says how to read them)."""
    if policy is not None and not (policy / "config.json").exists():
        raise typer.BadParameter(f"--policy: {policy} is no model folder")
    for path in files:
        steps = traces.load(path)
        if quick:
            steps = [step for step in steps if step[0].epoch < 2]
        for row in rows(path.stem, steps, policy, temperature):
            print(json.dumps({"benchmark": "draft_losses", **row, "commit": commit()}) if as_json else row, flush=True)


if __name__ == "__main__":
    typer.run(main)
