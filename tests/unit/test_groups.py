"""Tests of one ``xdist_group`` run in one worker, which creates their shared fixtures once."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).parents[1] / "conftest.py"
GROUPED = """
import os, pathlib, time, pytest
@pytest.mark.xdist_group("one")
@pytest.mark.parametrize("i", range(12))
def test_shared(i):
    time.sleep(0.02)
    pathlib.Path(f"{os.environ['PYTEST_XDIST_WORKER']}-{i}").touch()
"""


def test_a_group_stays_together(tmp_path):
    shutil.copy(CONFTEST, tmp_path)
    (tmp_path / "test_grouped.py").write_text(GROUPED)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(command, cwd=tmp_path, env=kept, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    ran = [path.name.partition("-")[0] for path in tmp_path.glob("gw*-*")]
    assert len(ran) == 12
    assert len(set(ran)) == 1
