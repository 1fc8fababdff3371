"""The adaptive drafter's compiled code has no index out of bounds, which would overwrite other memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import SLOW, examples


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_index_is_out_of_bounds(tmp_path):
    """Runs in a separate process with a separate cache, because code with checks is compiled separately."""
    seconds, seed = examples(8, slow=300), os.getpid() << 20 if SLOW else 0
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("random_batches.py")), str(seconds), str(seed)],
        env={**os.environ, "NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
