"""Choice of the drafted continuation."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_rhyme.drafting import choice
from verl_rhyme.history import suffix_index
from verl_rhyme.history.record import PromptHistory, Trajectory


def history(*responses, rewards=None):
    rewards = rewards or [0.0] * len(responses)
    return PromptHistory.build(
        [
            Trajectory(b"k", np.array(r, np.int32), reward, 0, 0, i)
            for i, (r, reward) in enumerate(zip(responses, rewards, strict=True))
        ]
    )


def draft(index, context, limit=32, reward_weight=1.0):
    _, low, high = suffix_index.longest_match(index, np.array(context), 7)
    return choice.choose(index, low, high, limit, reward_weight).tolist()


@pytest.mark.parametrize(
    ("rewards", "scaled"),
    [
        ([0.5, 0.5, 0.5], [0, 0, 0]),
        ([float("nan"), float("inf"), 0.5], [0, 0, 0]),
        ([3.0, float("nan"), 1.0], [1, 0, 0]),
        ([-1.0, 0.0, 3.0], [0, 0.25, 1]),
    ],
)
def test_finite_rewards_are_scaled_over_the_history(rewards, scaled):
    assert history([1], [2], [3], rewards=rewards).scaled_reward.tolist() == scaled


def test_frequent_match_is_sampled_over_its_whole_range():
    # A token before 1 orders the range: the first third continues with 2, the rest with 3.
    responses = [[10 + i, 1, 2 if i < 100 else 3] for i in range(300)]
    assert draft(history(*responses), [1]) == [3]


def reference(index, context, limit, weight):
    """Reference implementation of the definition."""
    _, low, high = suffix_index.longest_match(index, np.array(context), 7)
    active = [int(p) for p in index.suffixes[low:high]]
    owner = {p: int(np.searchsorted(index.bounds, p)) - 1 for p in active}
    paths = [(p, owner[p]) for p in active]
    out = []
    while len(out) < limit and paths:
        groups = {}
        for p, o in paths:
            groups.setdefault(int(index.tokens[p + 1]), []).append((p, o))
        votes = {
            token: (
                len(members) + weight * sum(float(index.scaled_reward[o]) for _, o in members) / len(members),
                max(o for _, o in members),
            )
            for token, members in groups.items()
        }
        best = max(votes, key=votes.__getitem__)
        if best < 0:
            break
        out.append(best)
        paths = [(p + 1, o) for p, o in groups[best]]
    return out


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), max_size=12), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=5
    ),
    st.lists(st.integers(0, 2), min_size=1, max_size=4),
    st.integers(0, 10),
    st.sampled_from([0.0, 1.0, 2.5]),
)
def test_agrees_with_the_definition(recorded, context, limit, weight):
    index = history(*(r for r, _ in recorded), rewards=[reward for _, reward in recorded])
    length, low, high = suffix_index.longest_match(index, np.array(context), 7)
    if length and high - low <= choice.MAX_OCCURRENCES:
        assert draft(index, context, limit, weight) == reference(index, context, limit, weight)
