"""The paper's draft window."""

from hypothesis import given
from hypothesis import strategies as st

from verl_rhyme.drafting.window import WindowPolicy


def test_window_has_the_papers_sizes():
    window = WindowPolicy(start=2, growth=2, cap=32)
    sizes = []
    for _ in range(20):
        sizes.append(window.size)
        window.observe(window.size, window.size)
    assert sizes == [2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 32, 32, 32, 32]
    window.observe(32, 31)
    assert window.size == 2


def test_accepted_short_draft_grows_the_window_and_no_draft_keeps_it():
    window = WindowPolicy(start=4, growth=3, cap=32)
    window.observe(1, 1)
    assert window.size == 7
    window.observe(0, 0)
    assert window.size == 7


def test_cap_below_start():
    window = WindowPolicy(start=8, growth=2, cap=4)
    assert window.size == 4
    window.observe(4, 0)
    assert window.size == 4


@given(
    st.integers(1, 10),
    st.integers(0, 10),
    st.integers(1, 128),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40))),
)
def test_stays_within_its_bounds(start, growth, cap, outcomes):
    window = WindowPolicy(start, growth, cap)
    for drafted, accepted in outcomes:
        before = window.size
        window.observe(drafted, min(accepted, drafted))
        assert min(start, cap) <= window.size <= cap
        if drafted > 0 and accepted < drafted:
            assert window.size == min(start, cap)
        else:
            assert window.size >= before
