"""Turns of samples compared with brute force, and their metrics."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_rhyme.observability import metrics as m
from verl_rhyme.observability.turns import turns

rows = st.tuples(
    st.sampled_from("ab"), st.integers(0, 1), st.booleans(), st.integers(0, 50), st.integers(0, 9), st.booleans()
)


def columns(drawn: list[Any]) -> dict[str, np.ndarray]:
    """Return columns from rows of (uid, sample, trained, queued, seconds, aborted)."""
    uid, sample, trained, queued, seconds, aborted = zip(*drawn, strict=True)
    return {
        **{"uid": np.array(uid), "sample": np.array(sample), "trained": np.array(trained)},
        "queued_at": 1.7e9 + np.array(queued, float),
        "finished_at": 1.7e9 + np.add(queued, seconds).astype(float),
        "stop_reason": np.where(aborted, "aborted", "completed"),
    }


@given(st.lists(rows, min_size=1, max_size=30))
def test_turns_of_parallel_aborted_and_untrained_requests(drawn) -> None:
    found = turns(columns(drawn))
    samples: dict[Any, list[Any]] = {}
    for uid, sample, trained, queued, seconds, aborted in drawn:
        samples.setdefault((uid, sample, trained), []).append((queued, queued + seconds, aborted))
    gaps, lives = [], []
    for mine in samples.values():
        mine.sort(key=lambda request: request[0])  # stable, as the columns are
        lives.append(max(end for _, end, _ in mine) - mine[0][0])
        for at, (before, after) in enumerate(pairwise(mine)):
            left = max(end for _, end, _ in mine[: at + 1])
            if after[0] >= left and not before[2]:
                gaps.append((left, after[0]))
    pauses = sorted(zip((found.left - 1.7e9).round(), (found.back - 1.7e9).round(), strict=True))
    assert pauses == sorted(gaps)
    assert sorted(found.lives) == pytest.approx(sorted(lives), abs=1e-3)


def test_no_requests() -> None:
    assert len(turns({name: values[:0] for name, values in columns([("a", 0, True, 0, 1, False)]).items()}).after) == 0


def test_metrics_of_tools() -> None:
    """Two calls of one sample, the second over a weight sync; a single turn; and one that was interrupted."""
    requests = columns(
        [
            *[("a", 0, True, at, 2, False) for at in (0, 5, 10)],
            ("a", 1, True, 0, 4, False),
            *[("b", 0, True, at, 1, aborted) for at, aborted in ((0, True), (3, False))],
        ]
    )
    requests |= {
        "request": np.array([0, 1, 2, 0, 0, 1]),
        "prompt_tokens": np.array([100, 150, 190, 100, 100, 120]),
        "response_tokens": np.array([30, 20, 9, 9, 20, 9]),
        "cached_tokens": np.array([0, 96, 0, 0, 0, 0]),
        "policy_version_start": np.array([1, 1, 2, 1, 1, 1]),
        "policy_version_end": np.array([1, 1, 2, 1, 1, 1]),
    }
    found = m.tool_metrics(requests)
    lives = 12 + 4 + 4
    assert found == pytest.approx(
        {m.TOOL_CALLS: 2, m.TOOL_S: (3 + 3) / 3, m.TOOL_SHARE: 6 / lives, m.PREFILLED_AGAIN: 130 - 96}
    )
    single = {name: values[3:] for name, values in requests.items()}
    assert m.tool_metrics(single) == {}, "no sample has a second turn"
