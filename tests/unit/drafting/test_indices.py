"""The adaptive drafter's compiled code stays within its arrays; a wrong index would write to whatever lies there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import SLOW, examples


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_index_is_out_of_bounds(tmp_path):
    """In a process and a cache of its own: code that checks is compiled anew, and must not be kept for others."""
    seconds, seed = examples(8, slow=300), os.getpid() << 20 if SLOW else 0
    found = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("random_batches.py")), str(seconds), str(seed)],
        env={**os.environ, "NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr[-4000:]
