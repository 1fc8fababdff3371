"""Who rests and who returns: the slowest goes first, the fastest of those that rest returns first."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_rhyme.planning.roster import Change, Roster

PACES = st.dictionaries(st.integers(0, 9), st.floats(1e-3, 1.0), max_size=6)
EVENTS = st.lists(st.one_of(st.sampled_from([-1, 0, 1]), PACES, st.tuples(st.booleans(), st.integers(0, 9))))


@settings(max_examples=300)
@given(st.data(), st.integers(1, 6), EVENTS)
def test_whatever_happens_each_replica_serves_or_rests(data, launched, events):
    """Deaths and newcomers included; bounds hold for what the roster wants."""
    least = data.draw(st.integers(1, launched))
    most = data.draw(st.integers(least, launched))
    roster = Roster(range(launched), least, most)
    assert len(roster.serving) == most
    named = launched
    for event in events:
        serving, resting = list(roster.serving), list(roster.resting)
        assert sorted({*serving, *resting}) == sorted([*serving, *resting]), "one is in both, or twice"
        assert sorted(roster.order()) == sorted([*serving, *resting])
        assert {*roster.order()[: len(serving)]} == {*serving}
        if isinstance(event, dict):
            roster.paced(event)
            assert all(roster.pace(replica) > 0 for replica in [*serving, *resting])
        elif isinstance(event, tuple):  # one dies, and another may take its place
            rests, number = event
            where = resting if rests else serving
            if where:
                where.pop(number % len(where))
                if not rests:
                    serving.append(named)
                    named += 1
            roster.look(serving, resting)
            assert (roster.serving, sorted(roster.resting)) == (serving, sorted(resting))
        elif (change := roster.wants(event)) is None:
            assert event <= 0 or len(serving) >= roster.most or not resting
            assert event >= 0 or len(serving) <= least
        else:
            assert change.serves == (event > 0)
            assert change.replica in (resting if event > 0 else serving)
            paces = [roster.pace(replica) for replica in (resting if event > 0 else serving)]
            assert roster.pace(change.replica) == (min if event > 0 else max)(paces)
            leaves, joins = (resting, serving) if change.serves else (serving, resting)
            leaves.remove(change.replica)
            joins.append(change.replica)
            roster.look(serving, resting)
            assert roster.least <= len(roster.serving) <= roster.most


def test_the_slowest_rests_and_the_fastest_returns():
    roster = Roster([0, 1, 2, 3])
    assert roster.wants(-1) == Change(3, False), "the last where nobody knows"
    roster.paced({0: 0.09, 1: 0.06, 2: 0.061, 3: 0.03})
    assert [roster.pace(n) for n in range(4)] == pytest.approx([1.5, 1.0, 1.0, 0.5])
    roster.look([1, 2], [0, 3])
    assert roster.order() == [1, 2, 3, 0]
    assert roster.wants(1) == Change(3, True)
    roster.look([1, 5], [0, 3])  # 2 has died
    assert roster.serving == [1, 5]
    assert roster.wants(1) == Change(3, True)


def test_paces_follow_what_is_measured_but_not_each_chance():
    roster = Roster([0, 1, 2])
    for _ in range(10):
        roster.paced({0: 1.0, 1: 1.0, 2: 1.0})
    roster.paced({0: 1.04, 7: 9.0})
    assert roster.pace(0) == 1.0
    for _ in range(5):
        roster.paced({0: 2.0})
    assert roster.pace(0) == pytest.approx(2.0)


@pytest.mark.parametrize("numbers", [(3, None), (3, 3), (2, 1), (0, None)])
def test_numbers_that_cannot_be(numbers):
    with pytest.raises(ValueError, match="replicas"):
        Roster([0, 1], *numbers)
