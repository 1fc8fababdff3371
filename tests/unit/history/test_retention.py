"""Selection of the prompts and epochs of a bounded history: the ledger alone, without a store."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.history.stores import key
from verl_rhyme.history.retention import Entry, Retention, place


def kept(ledger):
    return {k for k, entry in ledger.entries() if entry.units}


def arrive(ledger, i, epoch, size, epochs=None, step=0):
    """Add one prompt like the store."""
    ledger.note_visit(key(i), epoch, epoch, size, step)
    ledger.set_level()
    units = ledger.allowed_visits(key(i))
    if units:
        before = ledger.get(key(i)).units
        units = min(units, before + (epochs or 1))
        ledger.record(key(i), Entry(epoch, size, units, size * units, 1, units))
    elif key(i) in ledger:
        ledger.evict(key(i))
    for k, left in ledger.excess(ledger.bound).items():
        entry = ledger.get(k)
        if left:
            size = entry.bytes // entry.units
            ledger.record(k, Entry(entry.epoch, size, left, size * left, 1, left))
        else:
            ledger.evict(k)


def test_places_are_uniform_for_any_keys():
    places = np.sort([place(key(i)) for i in range(4000)])
    assert np.abs(places - np.linspace(0, 1, 4000)).max() < 0.03


@pytest.mark.parametrize("fits", [0.1, 0.5, 1.0, 1.3, 2.0, 2.7, 9.0])
def test_the_level_matches_the_bound(fits):
    ledger = Retention(int(fits * 1000 * 100), epochs=4)
    for epoch in range(5):
        for i in np.random.default_rng(epoch).permutation(1000):
            arrive(ledger, i, epoch, 100)
    assert ledger.level == pytest.approx(min(fits, 4), abs=0.05)
    assert ledger.total("bytes") == pytest.approx(min(ledger.bound, 400_000), rel=0.01)
    assert ledger.kept_share == pytest.approx(min(1, fits), abs=0.01)
    depths = [entry.units for _, entry in sorted(ledger.entries(), key=lambda each: place(each[0]))]
    assert ledger.most_visits == depths[0]
    assert depths == sorted(depths, reverse=True), "the lowest places keep most"
    assert max(depths) - min(depths) <= (0 if fits > 4 else 1), "uniformly"


def test_the_level_follows_the_sizes():
    """With shorter responses more prompts fit, with longer ones fewer."""
    ledger, shares = Retention(70_000, epochs=1), []
    for epoch, size in enumerate([200, 200, 100, 100, 100, 200, 200, 200]):
        for i in range(1000):
            arrive(ledger, i, epoch, size)
        shares.append(ledger.kept_share)
    assert [shares[epoch] for epoch in (0, 4, 7)] == pytest.approx([0.35, 0.7, 0.35], abs=0.01)


def test_parts_of_one_visit_add_up_and_repeated_ones_do_not():
    ledger = Retention(100, epochs=1)
    for step in (0, 1, 2, 3, 2, 3):
        ledger.note_visit(key(1), 0, 7, 50, step)
    assert ledger.get(key(1)).size == 200
    ledger.note_visit(key(1), 0, 8, 50, 4)
    assert ledger.get(key(1)).size == 50
    ledger.set_level()
    assert ledger.allowed_visits(key(1)) == 1


def test_one_very_large_prompt_does_not_exclude_the_others():
    ledger = Retention(1000, epochs=1)
    first = min(range(50), key=lambda i: place(key(i)))
    for i in range(50):
        ledger.note_visit(key(i), 0, 0, 5000 if i == first else 10, 0)
    ledger.set_level()
    assert ledger.allowed_visits(key(first)) == 0
    assert all(ledger.allowed_visits(key(i)) for i in range(50) if i != first)


def test_prompts_that_left_the_data_are_forgotten():
    ledger = Retention(1000, epochs=1)
    for i in range(40):
        arrive(ledger, i, 0, 100)
    assert (len(ledger), ledger.prompts) == (40, 10)
    for epoch in range(1, 4):
        for i in range(100, 105):
            arrive(ledger, i, epoch, 100)
        ledger.drop_gone()
    assert all(key(i) in ledger for i in range(100, 105))
    assert len(ledger) == 10  # five are new; five old ones stay while there is ledger for them
    assert ledger.total("bytes") == 1000


@settings(max_examples=60, deadline=None)
@given(
    st.integers(500, 20_000),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6), st.integers(1, 3000)), min_size=1, max_size=120),
)
def test_the_bound_holds_and_the_counts_are_right(bound, epochs, arrivals):
    ledger = Retention(bound, epochs)
    for i, epoch, size in arrivals:
        arrive(ledger, i, epoch, size)
        assert ledger.total("bytes") <= bound
        assert 0 <= ledger.level <= epochs
        assert ledger.prompts == len(kept(ledger))
        stay = kept(ledger)
        ledger.drop_gone()
        assert kept(ledger) == stay
        assert len(ledger) == len(dict(ledger.entries()))
        assert all(ledger.get(k) == entry for k, entry in ledger.entries())
