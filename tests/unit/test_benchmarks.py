"""Our drafter on a recorded trace compared with the paper's."""

from dataclasses import replace

import numpy as np

from benchmarks import traces
from benchmarks.arms import NoDrafts, Rhyme, released
from benchmarks.draft_quality import summary
from benchmarks.replay import replay
from verl_rhyme.config import DraftingConfig


def test_our_drafter_beats_both_histospecs_at_no_higher_cost():
    steps = [step for step in traces.load(traces.FOLDER / "qwen2-t1.parquet") if step[0].epoch < 2]
    arms = (
        NoDrafts(),
        Rhyme(DraftingConfig(floor=0.3, weigh_cost=False)),
        Rhyme(DraftingConfig(policy="paper")),
        released(),
    )
    plain, (cold, warm), (_, paper), (_, theirs) = (
        [summary([tally]) for tally in replay(steps, arm).values()] for arm in arms
    )
    assert [row["tokens_per_step"] for row in plain] == [1, 1]
    assert cold["tokens_per_step"] > 2, "the first epoch gains from live texts"
    assert warm["tokens_per_step"] > 1.3 * paper["tokens_per_step"]
    assert warm["tokens_per_step"] > 1.5 * theirs["tokens_per_step"]
    assert warm["verified_per_token"] < 1.1 * paper["verified_per_token"]


def test_each_turn_is_a_request_and_tools_answers_are_no_history():
    [whole, *_] = next(iter(traces.load(traces.FOLDER / "qwen2-t1.parquet")))
    tool = slice(10, 15)
    logprobs = whole.logprobs.copy()
    logprobs[tool] = np.nan
    first, second = replace(whole, logprobs=logprobs).turns()
    assert first.tokens.tolist() == whole.tokens[:10].tolist()
    assert second.tokens.tolist() == whole.tokens[15:].tolist()
    assert second.prompt.tolist() == [*whole.prompt, *whole.tokens[:15]]
    seen = []

    class Seen(NoDrafts):
        def end_step(self, responses):
            seen.extend(responses)

    tallies = replay([[replace(whole, logprobs=logprobs)]], Seen())
    assert seen[0].tokens.tolist() == np.delete(whole.tokens, tool).tolist()
    assert tallies[whole.epoch].emitted == len(whole.tokens) - 5 - 2, "less the first token of each turn"
