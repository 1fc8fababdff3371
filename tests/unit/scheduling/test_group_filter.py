"""Groups of which all trajectories have one score."""

import itertools
import math

import pytest

from verl_rhyme.scheduling.group_filter import GroupFilter, RolloutError


@pytest.mark.parametrize(
    ("scores", "kept"),
    [
        ([[1.0], [1.0]], False),
        ([[1.0], [0.0]], True),
        ([[1.0, 1.0], [1.0]], False),
        ([[1.0, 1.0], [0.0]], True),
        ([[1.0]], True),
        ([[1.0], [1.0], []], True),  # the scores of a sample are unknown
        *((list(zip(scores)), True) for scores in itertools.permutations([1.0, 1.0, math.nan])),  # as in verl
    ],
)
def test_groups_with_one_score_are_dropped_and_counted(scores, kept):
    groups = GroupFilter("acc", 1)
    assert groups.keeps(scores) == kept
    assert groups.dropped == ({} if kept else {1.0: 1})
    assert GroupFilter(None, 1).keeps(scores)


@pytest.mark.parametrize(("batch_prompts", "most"), [(1, 128), (64, 128), (100, 200)])
def test_the_run_ends_with_the_scores_where_every_group_is_dropped(batch_prompts, most):
    groups = GroupFilter("acc", batch_prompts)
    for _ in range(3):
        for _ in range(most - 1):
            assert not groups.keeps([[0.0], [0.0]])
        assert groups.keeps([[0.0], [1.0]])
    for number in range(most - 1):
        groups.keeps([[0.0 if number < most - 28 else 1.0]] * 2)
    words = rf"filter_groups dropped all {most} groups .*metric acc\).*: 0.0 in {most - 28}, 1.0 in 28.*reward"
    with pytest.raises(RolloutError, match=words):
        groups.keeps([[1.0], [1.0]])
