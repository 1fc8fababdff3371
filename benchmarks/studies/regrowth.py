"""What an interrupted response is worth to the request that generates it anew.

    python -m benchmarks.studies.regrowth [--json] [--quick]

The response is a trace's. What it said before the weights changed is made of it: a token stays with probability
``kept``, else another one of the trace's stands there; and once in 200 tokens 1 to 16 are inserted or left out (except
where all is kept). All arms have the history of the epoch before; "adaptive" knows nothing of the interrupted text,
"adaptive, text live" has it among its live texts, as the engine has that was interrupted, until they are overwritten
(its microseconds a token include taking them in). ``reverified_share`` is the share of accepted tokens that were
drafted from it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated

import numpy as np
import typer

from benchmarks import traces
from benchmarks.arms import Rhyme
from benchmarks.draft_quality import summary
from benchmarks.machine import commit, describe
from benchmarks.replay import replay
from benchmarks.traces import Response
from verl_rhyme.config import DraftingConfig
from verl_rhyme.drafting.policy import DecodeStep

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

KEPT = (0.8, 0.9, 0.93, 0.97, 1.0)
#: Spans inserted or left out, for each token; their lengths (tokens).
SPANS, LONGEST_SPAN = 1 / 200, 16


def interrupted(rng: np.random.Generator, tokens: np.ndarray, kept: float, vocabulary: np.ndarray) -> np.ndarray:
    """int32[n]: what a response with ``tokens`` said before; see the module.

    Args:
        rng: Chance.
        tokens: int32[n].
        kept: Probability of a token to be the same.
        vocabulary: int32[m], tokens that may stand in its stead.
    """
    text = np.where(rng.random(len(tokens)) < kept, tokens, rng.choice(vocabulary, len(tokens)))
    if kept == 1:
        return text.astype(np.int32)
    pieces, begin = [], 0
    for at in np.flatnonzero(rng.random(len(text)) < SPANS):
        span = int(rng.integers(1, LONGEST_SPAN + 1))
        pieces.append(text[begin:at])
        if rng.random() < 0.5:
            pieces.append(rng.choice(vocabulary, span))
            begin = at
        else:
            begin = at + span
    return np.concatenate([*pieces, text[begin:]]).astype(np.int32)


class Regrown(Rhyme):
    """Ours, with every request's interrupted text."""

    def __init__(self, config: DraftingConfig, previous: dict[str, np.ndarray]) -> None:
        super().__init__(config)
        self._previous = previous
        self.accepted = self.reverified = 0

    def start(self, response: Response) -> None:
        self.policy.start(response.id, response.key, self._previous.get(response.id))

    def finish(self, response: Response) -> None:
        counts = self.policy.finish(response.id)  # the replay does not tell what the last draft came to
        self.accepted += counts.accepted * (response.id in self._previous)
        self.reverified += counts.reverified


class Live(Rhyme):
    """Ours, after it generated the interrupted texts itself."""

    def __init__(self, config: DraftingConfig, previous: dict[str, np.ndarray]) -> None:
        super().__init__(config)
        self._previous = previous

    def start(self, response: Response) -> None:
        text = self._previous.get(response.id)
        if text is not None:
            tokens = np.concatenate([response.prompt, text]).astype(np.int32)[None]
            self.policy.start("interrupted", response.key)
            lengths, none = np.array([tokens.shape[1]]), np.zeros(1, np.int64)
            self.policy.step(DecodeStep(["interrupted"], none, tokens, lengths, [0], [0], none, budget=0))
            self.policy.finish("interrupted")
        super().start(response)


ARMS = {"adaptive": lambda config, previous: Rhyme(config), "adaptive, text live": Live, "regrowth": Regrown}


def previous_of(steps: Sequence[Sequence[Response]], epoch: int, kept: float) -> dict[str, np.ndarray]:
    """Interrupted texts of an epoch's responses, by id."""
    rng = np.random.default_rng(0)
    vocabulary = np.unique(np.concatenate([r.tokens for step in steps for r in step]))
    return {r.id: interrupted(rng, r.tokens, kept, vocabulary) for step in steps for r in step if r.epoch == epoch}


@app.command()
def main(
    as_json: Annotated[bool, typer.Option("--json", help="one object a line")] = False,
    quick: Annotated[bool, typer.Option(help="one trace, three shares")] = False,
) -> None:
    """Replay each trace's second epoch as responses that are generated anew."""
    config = DraftingConfig(weigh_cost=False)
    names = ["qwen2-t1"] if quick else sorted(path.stem for path in traces.FOLDER.glob("*.parquet"))
    for trace in names:
        steps = [step for step in traces.load(traces.FOLDER / f"{trace}.parquet") if step[0].epoch < 2]
        for kept in (0.8, 0.93, 1.0) if quick else KEPT:
            previous = previous_of(steps, 1, kept)
            for name, make in ARMS.items():
                if name == "adaptive" and kept != KEPT[0]:
                    continue  # it does not know the text: the same figures
                arm = make(config, previous)
                tally = replay(steps, arm)[1]
                row = {"benchmark": "regrowth", "trace": trace, "kept": kept, "arm": name, **summary([tally])}
                row["us_per_token"] = round(1e6 * tally.seconds / tally.emitted, 2)
                if isinstance(arm, Regrown):
                    row["reverified_share"] = round(arm.reverified / arm.accepted, 3)
                print(json.dumps({**row, "machine": describe(), "commit": commit()}) if as_json else row, flush=True)


if __name__ == "__main__":
    app()
