"""Why drafts end: shares add up, and the ceilings are what they say."""

import numpy as np
import pytest

from benchmarks import traces
from benchmarks.arms import Oracle
from benchmarks.replay import replay
from benchmarks.studies import draft_losses
from benchmarks.traces import Response

KEY = b"k" * 16


def response(number, tokens, epoch=0, prompt=(1, 2, 3)):
    tokens = np.array(tokens, dtype=np.int32)
    logprobs = np.zeros(len(tokens), dtype=np.float32)
    return Response(str(number), epoch, epoch, KEY, number, 0.0, np.array(prompt, dtype=np.int32), tokens, logprobs)


def test_known_is_what_followed_the_last_two_in_the_group_or_the_last_three_anywhere():
    known = draft_losses.Known()
    text = np.array([5, 6, 7, 8, 9])
    known.add(KEY, text, 0, 3, prompt=1)
    known.add(KEY, text, 3, 5, prompt=1)
    assert known.has(KEY, np.array([0, 6, 7]), 8)
    assert known.has(b"o" * 16, np.array([6, 7, 8]), 9)
    assert not known.has(b"o" * 16, np.array([0, 7, 8]), 9)
    assert not known.has(KEY, np.array([0, 6, 7]), 9)


def test_an_oracle_drafts_up_to_what_it_does_not_know():
    steps = [[response(0, range(10))]]
    known = np.ones(10, dtype=bool)
    all_known = replay(steps, Oracle({"0": known}))[0]
    assert (all_known.emitted, all_known.steps) == (9, 1)
    known[[4, 5]] = False
    two_missing = replay(steps, Oracle({"0": known}))[0]
    assert (two_missing.emitted, two_missing.steps) == (9, 3)  # 1 to 4, 5, 6 to 9
    assert two_missing.accepted == two_missing.drafted


@pytest.mark.parametrize("likeliest", [False, True])
def test_every_step_ends_for_one_reason(likeliest):
    steps = traces.load(traces.FOLDER / "smollm2-worked-t08.parquet")[:2]
    best = {r.id: r.tokens for step in steps for r in step} if likeliest else None
    arm = draft_losses.Watched(best)
    tallies = replay(steps, arm)
    for epoch, tally in tallies.items():
        ended = {why: arm.reasons[epoch, why] for why in draft_losses.REASONS}
        tokens = sum(len(r.tokens) - 1 for r in steps[epoch])
        assert tally.emitted == tokens == tally.accepted + sum(ended.values())
        assert ended["not the likeliest"] == 0, "what was sampled is the likeliest here, or nothing is known of it"
        assert min(ended["below floor"], ended["wrong candidate"], ended["in no source"]) > 0
    shares = [np.concatenate([arm.known[r.id][1:] for r in step]).mean() for step in steps]
    assert shares[0] < shares[1] < 1, "the history knows more"
    assert arm.reasons[1, "in no source"] < 0.7 * arm.reasons[0, "in no source"]
    ends = [arm.known[r.id][-1] for r in steps[1]]
    assert np.mean(ends) > 0.8, "most end as others of their group did; it is 0 where nobody learns how they end"
