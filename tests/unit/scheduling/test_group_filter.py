"""Groups of which all trajectories have one score."""

import itertools
import json
import math

import pytest

from verl_rhyme.scheduling.group_filter import NONE_KEPT, ONE_SCORE, WARNED, GroupFilter, RolloutError

SPREAD = [[0.0], [1.0]]


def same(score):
    return [[score], [score]]


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
    groups = GroupFilter("acc")
    assert groups.keeps(scores) == kept
    assert groups.dropped == ({} if kept else {1.0: 1})
    assert GroupFilter(None).keeps(scores)


def until_the_end(groups, scores):
    """Return the number of groups, and the error."""
    for number, score in enumerate(scores, 1):
        try:
            groups.keeps(same(score))
        except RolloutError as error:
            return number, str(error)
    raise AssertionError("no end")


def test_a_broken_reward_ends_the_run_after_a_number_that_its_warnings_and_error_name():
    groups = GroupFilter("acc")
    number, error = until_the_end(groups, itertools.repeat(0.0))
    assert number == ONE_SCORE
    assert f"dropped all {ONE_SCORE} groups since it last kept one (metric acc, limit {ONE_SCORE})" in error
    assert f"0.0 in {ONE_SCORE}" in error
    assert f"dropped the last {WARNED} groups: 0.0 in {WARNED}. The run ends after {ONE_SCORE}" in groups.warnings[0]
    assert len(groups.warnings) == ONE_SCORE // WARNED


@pytest.mark.parametrize("first", [[same(1.0)], [SPREAD]], ids=["two scores", "one was kept"])
def test_a_reward_that_has_told_samples_apart_ends_it_later(first):
    groups = GroupFilter("acc")
    for scores in first:
        groups.keeps(scores)
    number, error = until_the_end(groups, itertools.repeat(0.0))
    assert number + (first != [SPREAD]) == NONE_KEPT
    assert f"limit {NONE_KEPT}" in error


@pytest.mark.parametrize("rate", [0.01, 0.03, 0.05, 0.3])
def test_hard_data_do_not_end_a_run(rate):
    """By the union bound: a run of drops begins after a kept group, or at the start."""
    steps, batch = 5000, 1024
    starts = steps * batch  # kept groups
    assert (1 - rate) ** ONE_SCORE + starts * (1 - rate) ** NONE_KEPT < 1e-4


@pytest.mark.parametrize("saved_at", [1, 255, 300, 1023])
def test_the_count_goes_on_after_a_restart(saved_at):
    """A run that resumes again and again ends as well, and no sooner."""
    groups = GroupFilter("acc")
    for _ in range(saved_at):
        groups.keeps(same(0.0))
    state = json.loads(json.dumps({**groups.state_dict(), "dropped": list(groups.dropped.items())}))
    again = GroupFilter("acc")
    again.load_state_dict(state, state["dropped"])
    assert again.dropped == groups.dropped
    assert until_the_end(again, itertools.repeat(0.0))[0] == ONE_SCORE - saved_at
