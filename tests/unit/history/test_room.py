"""Selection of the prompts and epochs of a bounded history: the ledger alone, without a store."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_rhyme.history.room import Entry, Room, place


def key(i):
    return int(i).to_bytes(16, "big")


def kept(room):
    return {k for k, entry in room.entries() if entry.units}


def arrive(room, i, epoch, size, epochs=None, step=0):
    """Add one prompt like the store."""
    room.arrive(key(i), epoch, epoch, size, step)
    room.settle()
    units = room.epochs_for(key(i))
    if units:
        before = room.entry(key(i)).units
        units = min(units, before + (epochs or 1))
        room.record(key(i), Entry(epoch, size, units, size * units, 1, units))
    elif key(i) in room:
        room.evict(key(i))
    for k, left in room.excess(room.bound).items():
        entry = room.entry(k)
        if left:
            size = entry.bytes // entry.units
            room.record(k, Entry(entry.epoch, size, left, size * left, 1, left))
        else:
            room.evict(k)


def test_places_are_uniform_for_any_keys():
    places = np.sort([place(key(i)) for i in range(4000)])
    assert np.abs(places - np.linspace(0, 1, 4000)).max() < 0.03


def test_a_large_bound_keeps_all():
    room = Room(10**6, epochs=3)
    for epoch in range(5):
        for i in range(100):
            arrive(room, i, epoch, 100)
    assert room.level == 3
    assert (room.prompts, room.deepest, room.total("bytes"), room.kept_share) == (100, 3, 30_000, 1)


@pytest.mark.parametrize("fits", [0.1, 0.5, 1.0, 1.3, 2.0, 2.7])
def test_the_level_matches_the_bound(fits):
    room = Room(int(fits * 1000 * 100), epochs=4)
    for epoch in range(4):
        for i in np.random.default_rng(epoch).permutation(1000):
            room.arrive(key(i), epoch, epoch, 100, epoch)
            arrive(room, i, epoch, 100)
    assert room.level == pytest.approx(fits, abs=0.05)
    assert room.total("bytes") == pytest.approx(room.bound, rel=0.01)
    assert room.kept_share == pytest.approx(min(1, fits), abs=0.01)
    depths = [entry.units for _, entry in room.entries()]
    assert max(depths) - min(depths) <= 1  # uniformly


def test_the_lowest_places_stay():
    room = Room(3000, epochs=1)
    for i in range(100):
        arrive(room, i, 0, 100)
    stay = sorted(place(k) for k in kept(room))
    go = [place(k) for k, entry in room.entries() if not entry.units]
    assert len(stay) == 30
    assert stay[-1] < min(go)


def test_parts_of_one_visit_add_up_and_repeated_ones_do_not():
    room = Room(100, epochs=1)
    for step in (0, 1, 2, 3, 2, 3):
        room.arrive(key(1), 0, 7, 50, step)
    assert room.entry(key(1)).size == 200
    room.arrive(key(1), 0, 8, 50, 4)
    assert room.entry(key(1)).size == 50
    room.settle()
    assert room.epochs_for(key(1)) == 1


def test_one_very_large_prompt_does_not_exclude_the_others():
    room = Room(1000, epochs=1)
    first = min(range(50), key=lambda i: place(key(i)))
    for i in range(50):
        room.arrive(key(i), 0, 0, 5000 if i == first else 10, 0)
    room.settle()
    assert room.epochs_for(key(first)) == 0
    assert all(room.epochs_for(key(i)) for i in range(50) if i != first)


def test_prompts_that_left_the_data_are_forgotten():
    room = Room(1000, epochs=1)
    for i in range(40):
        arrive(room, i, 0, 100)
    assert (room.known, room.prompts) == (40, 10)
    for epoch in range(1, 4):
        for i in range(100, 105):
            arrive(room, i, epoch, 100)
        room.forget()
    assert all(key(i) in room for i in range(100, 105))
    assert room.known == 10  # five are new; five old ones stay while there is room for them
    assert room.total("bytes") == 1000


@settings(max_examples=60, deadline=None)
@given(
    st.integers(500, 20_000),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6), st.integers(1, 3000)), min_size=1, max_size=120),
)
def test_the_bound_holds_and_the_counts_are_right(bound, epochs, arrivals):
    room = Room(bound, epochs)
    for i, epoch, size in arrivals:
        arrive(room, i, epoch, size)
        assert room.total("bytes") <= bound
        assert 0 <= room.level <= epochs
        assert room.prompts == len(kept(room))
        forgotten = room.forget()
        assert not kept(room) & set(forgotten)
        assert room.known == len(dict(room.entries()))
        assert all(room.entry(k) == entry for k, entry in room.entries())
