"""Where drafts end, and why: what is lost between the adaptive drafter's accepted tokens and what could be had.

    python -m benchmarks.draft_losses [--policy DIR --temperature T] [--json] TRACE.parquet ...

Every verify step ends with a token that no draft gave. Of that token it is asked, in this order:

limit           the draft was as long as it may be, and all of it right
below floor     it was planned, and estimated below ``drafting.floor``
random          it is not the policy's likeliest one: no drafter that does not know the noise drafts it
another drafted it is the likeliest one, and a source knows it: another token was drafted or planned
unknown         it is the likeliest one, and no source knows it

A source knows a token that followed the same two tokens in the prompt's history, in the group's live texts or in the
request's own text, or the same three in any response. The likeliest token needs the policy: ``--policy``, its folder,
of a trace whose policy was not trained; without it "random" is part of the two after it. The ceilings are tokens a
verify step of drafters that always draft the likeliest token, that draft every token which a source knows, and of the
best copy in hindsight.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks import traces
from benchmarks.arms import Hindsight, Rhyme
from benchmarks.machine import commit
from benchmarks.replay import Tally, replay
from benchmarks.traces import Response
from verl_rhyme.config import DraftingConfig
from verl_rhyme.drafting.policy import DecodeStep

REASONS = ("limit", "below floor", "random", "another drafted", "unknown")
#: Of :func:`benchmarks.replay.replay`.
LONGEST = 32
_BATCH = 16


class Known:
    """What the drafter's sources have seen: next tokens by the last two in a group, by the last three anywhere."""

    def __init__(self) -> None:
        self._group: dict[tuple[bytes, int, int], set[int]] = defaultdict(set)
        self._all: dict[tuple[int, int, int], set[int]] = defaultdict(set)

    def add(self, key: bytes, text: np.ndarray, first: int, last: int, prompt: int) -> None:
        """Take in ``text[first:last]``, of which ``prompt`` tokens are the prompt."""
        tokens = text[max(0, first - 3) : last].tolist()
        for i in range(first - max(0, first - 3), len(tokens)):
            if i >= 2:
                self._group[key, tokens[i - 2], tokens[i - 1]].add(tokens[i])
            if i >= 3 and max(0, first - 3) + i >= prompt:
                self._all[tokens[i - 3], tokens[i - 2], tokens[i - 1]].add(tokens[i])

    def has(self, key: bytes, before: np.ndarray, token: int) -> bool:
        """Whether ``token`` has followed the last tokens of ``before``."""
        a, b, c = before[-3:].tolist()
        return token in self._group.get((key, b, c), ()) or token in self._all.get((a, b, c), ())


class Watched(Rhyme):
    """The adaptive drafter, asked at every step why its draft ends where it does."""

    def __init__(self, floor: float, likeliest: dict[str, np.ndarray] | None) -> None:
        super().__init__(DraftingConfig(floor=floor, weigh_cost=False, tail_weight=1.0))
        self._likeliest, self._known, self._length = likeliest, Known(), dict[str, int]()
        self.reasons: Counter[tuple[int, str]] = Counter()  # by epoch
        self.oracle: Counter[tuple[int, bool]] = Counter()  # tokens by epoch, and whether a source knew them

    def step(self, responses: Sequence[Response], done: DecodeStep) -> list[list[int]]:
        for response, row, length in zip(responses, done.rows, done.lengths, strict=True):
            self._take_in(response, done.tokens[row], int(length))
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

    def _take_in(self, response: Response, text: np.ndarray, length: int) -> None:
        prompt, first = len(response.prompt), self._length.get(response.id, 0)
        for end in range(max(first, prompt + 1), length):
            self.oracle[response.epoch, self._known.has(response.key, text[:end], int(text[end]))] += 1
        self._known.add(response.key, text, first, length, prompt)
        self._length[response.id] = length

    def _reason(self, response: Response, text: np.ndarray, draft: list[int], right: int, token: int) -> str:
        if right == LONGEST:
            return "limit"
        slots, slot = self.policy._slots, self.policy._requests[response.id].slot
        if right == len(draft) and slots.planned[slot] > right and slots.draft[slot, right] == token:
            return "below floor"
        if self._likeliest is not None and self._likeliest[response.id][len(text) - len(response.prompt)] != token:
            return "random"
        return "another drafted" if self._known.has(response.key, text, token) else "unknown"


def likeliest(steps: Sequence[Sequence[Response]], folder: Path, temperature: float) -> dict[str, np.ndarray]:
    """The policy's likeliest token at every position, int64[n] by response.

    Raises:
        SystemExit: It gives the trace's tokens other log-probs than the trace says: it is another policy.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found: dict[str, np.ndarray] = {}
    responses = sorted((r for step in steps for r in step), key=lambda r: len(r.prompt) + len(r.tokens))
    for begin in range(0, len(responses), _BATCH):
        lot = responses[begin : begin + _BATCH]
        texts = [torch.from_numpy(np.concatenate([r.prompt, r.tokens]).astype(np.int64)) for r in lot]
        ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
        with torch.inference_mode():
            hidden = model.model(ids, attention_mask=mask).last_hidden_state
            for i, r in enumerate(lot):
                first = len(r.prompt) - 1
                logits = model.lm_head(hidden[i, first : first + len(r.tokens)]) / temperature
                tokens = texts[i][len(r.prompt) :, None]
                apart = (logits.log_softmax(-1).gather(1, tokens)[:, 0] - torch.from_numpy(r.logprobs)).abs().max()
                if float(apart) > 0.05:
                    raise SystemExit(f"{folder} at temperature {temperature} is not the policy of this trace")
                found[r.id] = logits.argmax(-1).numpy()
    return found


def without(steps: Sequence[Sequence[Response]], right: dict[str, np.ndarray]) -> dict[int, tuple[int, int]]:
    """Tokens and verify steps, by epoch, of a drafter that is right just at these positions."""
    found: dict[int, tuple[int, int]] = {}
    for step in steps:
        for r in step:
            tokens = verify = at = 0
            hits, at = right[r.id], 1  # prefill gives the first
            while at < len(hits):
                ahead = hits[at : at + LONGEST]
                run = len(ahead) if ahead.all() else int(np.argmin(ahead))
                emitted = min(run + 1, len(hits) - at)
                tokens, verify, at = tokens + emitted, verify + 1, at + emitted
            before = found.get(r.epoch, (0, 0))
            found[r.epoch] = before[0] + tokens, before[1] + verify
    return found


def rows(path: Path, floor: float, policy: Path | None, temperature: float) -> list[dict[str, Any]]:
    """One for the first epoch, one for the later ones."""
    steps = traces.load(path)
    best = None if policy is None else likeliest(steps, policy, temperature)
    arm = Watched(floor, best)
    tallies, copies = replay(steps, arm), replay(steps, Hindsight(least=1))
    ceiling = None
    if best is not None:
        ceiling = without(steps, {r.id: best[r.id] == r.tokens for step in steps for r in step})
    found = []
    for name, epochs in (("first", [0]), ("later", [e for e in tallies if e])):
        ended = {why: sum(arm.reasons[e, why] for e in epochs) for why in REASONS}
        known, unknown = (sum(arm.oracle[e, had] for e in epochs) for had in (True, False))
        row: dict[str, Any] = {"trace": path.stem, "epochs": name, "floor": floor}
        row["tokens_per_step"] = _ratio([tallies[e] for e in epochs])
        row |= {why: round(count / max(1, sum(ended.values())), 3) for why, count in ended.items()}
        row["ceiling_known"] = round((known + unknown) / max(1, unknown), 2)
        row["ceiling_copy"] = _ratio([copies[e] for e in epochs])
        if ceiling is not None:
            tokens, verify = (sum(ceiling[e][i] for e in epochs) for i in (0, 1))
            row["ceiling_likeliest"] = round(tokens / verify, 2)
        found.append(row)
    return found


def _ratio(tallies: Sequence[Tally]) -> float:
    return round(sum(t.emitted for t in tallies) / max(1, sum(t.steps for t in tallies)), 2)


def main(
    files: list[Path],
    policy: Annotated[Path | None, typer.Option(help="folder of the policy, where it was not trained")] = None,
    temperature: Annotated[float, typer.Option(help="of the trace")] = 1.0,
    floor: Annotated[float, typer.Option(help="drafting.floor")] = 0.1,
    as_json: Annotated[bool, typer.Option("--json", help="one object a line")] = False,
) -> None:
    """Replay traces and print why drafts end, as shares of the verify steps, and the ceilings."""
    for path in files:
        for row in rows(path, floor, policy, temperature):
            print(json.dumps({"benchmark": "draft_losses", **row, "commit": commit()}) if as_json else row, flush=True)


if __name__ == "__main__":
    typer.run(main)
