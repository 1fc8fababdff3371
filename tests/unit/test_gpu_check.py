"""Driver of the GPU check: it resumes, keeps time limits, and survives a part's failure."""

import numpy as np
import pytest
import torch

from benchmarks.gpu_check import driver, philox
from benchmarks.gpu_check.parts import Part
from verl_rhyme.sampling import noise


def part(name, code, limit_s=20.0, needs=(), **more):
    return Part(name, ("-c", code), limit_s, f"what {name} decides", needs=needs, quick=(), **more)


def run(parts, folder):
    """Return whether all parts are complete, the status of each, all rows, and the printed lines."""
    printed = []
    complete = driver.run(parts, driver.Results(folder), {"machine": "this one"}, False, True, printed.append)
    rows = driver.Results(folder).rows
    return complete, {row["part"]: row["status"] for row in rows if "status" in row}, rows, "\n".join(printed)


def test_a_failed_part_stops_no_other_and_runs_again(tmp_path):
    mark = tmp_path / "ran"
    parts = [
        part("bad", "print('{\"n\": 2}'); raise ValueError('no such kernel')"),
        part("slow", "import time; print('{\"kept\": 1}', flush=True); time.sleep(60)", limit_s=3.0),
        part("good", f"open({str(mark)!r}, 'a').write('x'); print('WARNING: a library'); print('{{\"ms\": 1.5}}')"),
        part("lacks", "print('{}')", needs=("no_such_package", "json")),
        part("gpu", "print('{}')", gpu_only="it needs a GPU"),
    ]
    for _ in range(2):
        complete, statuses, rows, printed = run(parts, tmp_path / "out")
        assert not complete
        assert statuses == {"bad": "failed", "slow": "timed out", "good": "done", "lacks": "skipped", "gpu": "skipped"}
        assert sum(row.get("n") == 2 for row in rows) == 1, "rows of the earlier run are replaced"
        assert "no such kernel" in printed
    assert mark.read_text() == "x"
    assert {"part": "good", "decides": "what good decides", "ms": 1.5, "machine": "this one"} in rows
    assert sum("kept" in row for row in rows) == 1
    reasons = {row["part"]: row["reason"] for row in rows if row.get("status") == "skipped"}
    assert reasons == {"lacks": "missing packages: no_such_package", "gpu": "it needs a GPU"}


def test_the_reference_noise_equals_the_products_noise():
    keys = np.array([0, 1, 2**63 + 12345, 2**64 - 1], dtype=np.uint64)
    positions = np.array([0, 5, (1 << 39) + 7, (1 << 62) + 3])
    for vocabulary in (1, 5, 1024):
        ours = philox.words(torch.from_numpy(keys.view(np.int64)), torch.from_numpy(positions), vocabulary)
        theirs = noise.words(keys, positions, vocabulary)
        assert (ours.numpy() == theirs).all()
        assert philox.gumbel(ours).numpy() == pytest.approx(noise.gumbel(theirs))
