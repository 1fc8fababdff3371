"""The paper's drafter over many live requests."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.drafting.engine import KEY, OTHER_KEY, history
from verl_rhyme.config import DraftingConfig
from verl_rhyme.drafting.paper import PaperDrafter, Window
from verl_rhyme.drafting.policy import DecodeStep, RequestCounts

COUNTING = history(range(100))


def step(drafter, *rows, budget=10_000):
    """Return drafts of rows of (request, context, limit, drafted and accepted tokens of the last step)."""
    names, contexts, limits, drafted, accepted = zip(*rows, strict=True)
    tokens = np.zeros((len(rows), 16), np.int32)
    for row, context in enumerate(contexts):
        tokens[row, : len(context)] = context
    lengths = np.array([len(context) for context in contexts])
    return drafter.step(
        DecodeStep(names, np.arange(len(rows)), tokens, lengths, drafted, accepted, np.array(limits), budget)
    )


def one(drafter, context, limit=32, last=(0, 0), **more):
    [draft] = step(drafter, ("a", context, limit, *last), **more)
    return draft


def test_window_follows_the_verification():
    drafter = PaperDrafter(DraftingConfig(), {KEY: COUNTING}.get)
    drafter.start("a", KEY)
    assert one(drafter, [0, 1, 2]) == [3, 4]
    assert one(drafter, [3, 4, 5], last=(2, 2)) == [6, 7, 8, 9]
    assert one(drafter, [5, 6, 7], last=(4, 1)) == [8, 9]
    assert one(drafter, [5, 6, 7]) == [8, 9]
    assert drafter.finish("a") == RequestCounts(drafted_tokens=6, accepted_tokens=3, verify_steps=2, history_hit=True)


def test_window_has_the_papers_sizes():
    window = Window(cap=32)
    sizes = []
    for _ in range(20):
        sizes.append(window.size)
        window.observe(window.size, window.size)
    assert sizes == [2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 32, 32, 32, 32]
    window.observe(32, 31)
    assert window.size == 2
    window.observe(1, 1)
    assert window.size == 4, "an accepted short draft grows the window as well"


def test_backs_off_to_the_shortest_match_only():
    drafter = PaperDrafter(DraftingConfig(), {KEY: COUNTING}.get)
    drafter.start("a", KEY)
    assert one(drafter, [99, 99, 5, 6, 7]) == [8, 9]
    assert one(drafter, [99, 99, 99, 6, 7]) == []
    assert one(drafter, [6, 7]) == []


def test_short_budget_is_granted_in_turn():
    drafter = PaperDrafter(DraftingConfig(), {KEY: COUNTING}.get)
    for request in "abc":
        drafter.start(request, KEY)

    def lengths(*limits, accepted=0):
        rows = [(name, [0, 1, 2], limit, 2 * accepted, 2 * accepted) for name, limit in zip("abc", limits, strict=True)]
        return [len(draft) for draft in step(drafter, *rows, budget=5)]

    assert lengths(9, 9, 9) == [2, 2, 1]
    assert lengths(1, 9, 2, accepted=1) == [1, 2, 2]
    assert lengths(0, 9, 1) == [0, 4, 1]


def test_history_is_read_once_for_live_requests_of_a_prompt():
    reads = []
    drafter = PaperDrafter(DraftingConfig(), lambda key: reads.append(key) or COUNTING)
    for request in "abc":
        drafter.start(request, KEY)
    assert reads == [KEY]
    drafter.start("a", KEY)
    assert reads == [KEY], "a restart"
    for request in "abc":
        drafter.finish(request)
    drafter.start("d", KEY)
    assert reads == [KEY, KEY], "a later step sees what was recorded meanwhile"
    drafter.finish("d")
    assert not len(drafter._histories)
    assert drafter.finish("d") == RequestCounts()


rows = st.lists(
    st.tuples(
        st.integers(0, 5),
        st.lists(st.integers(0, 3), min_size=1, max_size=10),
        st.integers(0, 40),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda row: row[0],
)


@settings(max_examples=200, deadline=None)
@given(
    responses=st.lists(st.lists(st.integers(0, 3), max_size=60), min_size=1, max_size=5),
    steps=st.lists(st.tuples(rows, st.integers(0, 60)), max_size=8),
)
def test_bounds_and_budget_are_never_exceeded_and_drafts_are_deterministic(responses, steps):
    index = history(*responses)
    pair = [PaperDrafter(DraftingConfig(max_tokens=20), {KEY: index}.get, match=(1, 5)) for _ in range(2)]
    for drafter in pair:
        for i in range(6):
            drafter.start(str(i), KEY if i < 5 else OTHER_KEY)
    drafted = dict.fromkeys(range(6), 0)
    for batch, budget in steps:
        verified = [
            (str(i), context, limit, drafted[i], max(0, drafted[i] - missed)) for i, context, limit, missed in batch
        ]
        first, second = (step(drafter, *verified, budget=budget) for drafter in pair)
        assert first == second
        assert sum(map(len, first)) <= budget
        for (i, context, limit, _), draft in zip(batch, first, strict=True):
            assert len(draft) <= min(limit, 20)
            drafted[i] = len(draft)
            if draft:
                assert i < 5
                seen = context[-1:] + draft  # drafted tokens follow the context in the history
                assert any(seen == list(r[i : i + len(seen)]) for r in responses for i in range(len(r)))
