"""CUDA graph sizes of an engine that drafts."""

import itertools
import json

from hypothesis import given
from hypothesis import strategies as st

from verl_rhyme.engine.cuda_graphs import LARGEST, TOKENS_PER_ROW, capture_sizes, settings


@given(st.integers(1, 4096), st.integers(1, 1 << 17))
def test_sizes_end_at_the_tokens_of_a_wide_batch(rows, tokens):
    sizes = capture_sizes(rows, tokens)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == min(TOKENS_PER_ROW * rows, tokens, LARGEST)
    padding = [after - before - 1 for before, after in itertools.pairwise(sizes)]
    assert max(padding, default=0) < 64


def test_user_settings_are_kept():
    assert settings(None, False, 64, 8192)["cudagraph_mode"] == "FULL_AND_PIECEWISE"
    assert settings({"cudagraph_mode": "PIECEWISE"}, False, 64, 8192)["cudagraph_mode"] == "PIECEWISE"
    chosen = settings(json.dumps({"cudagraph_capture_sizes": [8], "level": 3}), False, 64, 8192)
    assert chosen == {"cudagraph_capture_sizes": [8], "level": 3, "cudagraph_mode": "FULL_AND_PIECEWISE"}
    assert "cudagraph_capture_sizes" not in settings(None, True, 64, 8192)
    assert "cudagraph_capture_sizes" not in settings({"max_cudagraph_capture_size": 64}, False, 64, 8192)
