"""How much of a response stood in its prompt's last epoch."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_rhyme.history.record import PromptHistory, Trajectory
from verl_rhyme.history.similarity import MATCH, Account, compare, shared_tokens
from verl_rhyme.history.store import HistoryStore

KEY = bytes(16)


def trajectory(epoch: int, tokens: list[int], sample: int = 0, key: bytes = KEY) -> Trajectory:
    return Trajectory(key, np.array(tokens, dtype=np.int32), 0.0, 0, epoch, sample)


def plainly(earlier: list[list[int]], responses: list[list[int]], match: int) -> int:
    """By definition: every run of ``match`` tokens, held against every other."""
    runs = {tuple(text[i : i + match]) for text in earlier for i in range(len(text) - match + 1)}
    shared = 0
    for text in responses:
        covered = {
            i + k for i in range(len(text) - match + 1) if tuple(text[i : i + match]) in runs for k in range(match)
        }
        shared += len(covered)
    return shared


texts = st.lists(st.lists(st.integers(0, 3), max_size=24), min_size=1, max_size=4)


@settings(deadline=None)  # the first compiles
@given(texts, texts, st.integers(1, 5))
def test_runs_are_counted_as_defined(earlier, responses, match):
    arrays = [[np.array(text, dtype=np.int32) for text in side] for side in (earlier, responses)]
    assert shared_tokens(*arrays, match) == plainly(earlier, responses, match)


def test_only_the_epoch_before_counts_and_not_siblings():
    first, second = list(range(10, 20)), list(range(30, 40))
    history = PromptHistory.build([trajectory(0, first), trajectory(1, second), trajectory(2, first, 1)])
    assert compare(history, [trajectory(2, [*second[: MATCH - 1], 9, *second])]) == (10, MATCH + 10)
    assert compare(history, [trajectory(2, first)]) == (0, 10), "an epoch ago another text, a sibling's does not count"
    assert compare(PromptHistory.build([]), [trajectory(0, first)]) == (0, 0)


def test_an_append_tells_what_was_compared(tmp_path):
    with HistoryStore(tmp_path / "history", "", 1 << 20, epochs=2) as store:
        text = list(range(20))
        assert store.append([trajectory(0, text)], step=1).compared == 0
        fresh = trajectory(1, text, key=bytes(15) + b"1")
        stats = store.append([trajectory(1, text[:10] + [99] * 10), fresh], step=2)
        assert (stats.similar, stats.compared) == (10, 20)
        again = store.append([trajectory(1, text[:10] + [99] * 10), fresh], step=2)
        assert (again.similar, again.compared) == (10, 20), "a step recorded anew is held against the same epoch"


def test_what_agrees_by_chance_is_told_beside_it(tmp_path):
    """Held against the last epoch of the prompt before it in the append that has one."""
    keys = [bytes(15) + bytes([k]) for k in range(3)]
    own = [list(range(100 * k, 100 * k + 20)) for k in range(3)]
    shared = list(range(900, 905))
    with HistoryStore(tmp_path / "history", "", 1 << 20, epochs=2) as store:
        first = store.append([trajectory(0, own[k] + shared, key=keys[k]) for k in range(2)], step=1)
        assert (first.by_chance_compared, first.by_chance_similar) == (0, 0)
        second = store.append([trajectory(1, own[k] + shared, key=keys[k]) for k in range(3)], step=2)
        assert (second.compared, second.similar) == (50, 50)
        assert (second.by_chance_compared, second.by_chance_similar) == (25, 5)


def test_chance_has_a_bound_of_its_own():
    account = Account(_left=1000, _chance_left=60)
    for epoch in range(1, 5):
        history = PromptHistory.build([trajectory(epoch - 1, list(range(20)))])
        account.add(history, [trajectory(epoch, list(range(20)))])
    assert account.compared == account.similar == 80
    assert account.by_chance_compared == account.by_chance_similar == 40, "of two, after which the bound is passed"
