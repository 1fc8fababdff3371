"""Driver of the GPU check: it resumes, keeps time limits, and survives a part's failure."""

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.gpu_check import driver, philox
from benchmarks.gpu_check.parts import Part
from verl_rhyme.sampling import noise

ROOT = Path(__file__).parents[2]
ABOUT = {"machine": "this one"}


def part(name, code, limit_s=20.0, **more):
    return Part(name, ("-c", code), limit_s, f"what {name} decides", needs=(), quick=(), **more)


def run(parts, folder, gpu=False):
    """Return whether all parts are complete, the rows, and the printed lines."""
    printed = []
    complete = driver.run(parts, driver.Results(folder), ABOUT, gpu, True, printed.append)
    return complete, driver.Results(folder).rows, "\n".join(printed)


def statuses(rows):
    return {row["part"]: row["status"] for row in rows if "status" in row}


def test_rows_are_kept_and_output_of_libraries_is_not(tmp_path):
    code = "print('WARNING: a library'); print('{\"ms\": 1.5}'); print('[1]')"
    complete, rows, printed = run([part("quickly", code)], tmp_path)
    assert complete
    assert rows[0] == {"part": "quickly", "decides": "what quickly decides", "ms": 1.5, **ABOUT}
    assert rows[1]["status"] == "done"
    assert len(rows) == 2
    assert "ms 1.5" in printed


def test_only_unfinished_parts_run_again(tmp_path):
    mark = tmp_path / "ran"
    counts = (
        f"import pathlib; p = pathlib.Path({str(mark)!r}); p.write_text(p.read_text() + 'x' if p.exists() else 'x')"
    )
    done = part("done", f"{counts}; print('{{\"n\": 1}}')")
    fails = part("fails", "print('{\"n\": 2}'); raise SystemExit(3)")
    for _ in range(2):
        complete, rows, _ = run([fails, done], tmp_path / "out")
        assert not complete
        assert statuses(rows) == {"fails": "failed", "done": "done"}
        assert sum(row.get("n") == 2 for row in rows) == 1, "rows of the earlier run are replaced"
    assert mark.read_text() == "x"


def test_a_failed_part_is_reported_with_its_error_and_stops_no_other(tmp_path):
    parts = [part("bad", "raise ValueError('no such kernel')"), part("silent", "pass"), part("good", "print('{}')")]
    _, rows, printed = run(parts, tmp_path)
    assert statuses(rows) == {"bad": "failed", "silent": "failed", "good": "done"}
    assert "no such kernel" in printed
    assert "it printed no rows" in printed


def test_a_part_and_its_children_are_killed_at_the_limit_and_keep_their_rows(tmp_path):
    child = "import subprocess, sys, time; c = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    code = f"{child}; print('{{\"child\": %d}}' % c.pid, flush=True); time.sleep(60)"
    began = time.monotonic()
    complete, rows, _ = run([part("slow", code, limit_s=3.0), part("next", "print('{}')")], tmp_path)
    assert time.monotonic() - began < 30
    assert not complete
    assert statuses(rows) == {"slow": "timed out", "next": "done"}
    pid = next(row["child"] for row in rows if "child" in row)
    stat = Path(f"/proc/{pid}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_skipped_part_has_a_reason_and_is_tried_again(tmp_path):
    lacks = Part("lacks", ("-c", "print('{}')"), 20.0, "x", needs=("no_such_package", "json"), quick=())
    gpu_part = part("gpu_part", "print('{}')", gpu_only="it needs a GPU")
    complete, rows, _ = run([lacks, gpu_part], tmp_path)
    assert complete
    assert {row["part"]: row["reason"] for row in rows} == {
        "lacks": "missing packages: no_such_package",
        "gpu_part": "it needs a GPU",
    }
    _, rows, _ = run([gpu_part], tmp_path, gpu=True)
    assert statuses(rows)["gpu_part"] == "done"


def test_the_reference_noise_equals_the_products_noise():
    keys = np.array([0, 1, 2**63 + 12345, 2**64 - 1], dtype=np.uint64)
    positions = np.array([0, 5, (1 << 39) + 7, (1 << 62) + 3])
    for vocabulary in (1, 5, 1024):
        ours = philox.words(torch.from_numpy(keys.view(np.int64)), torch.from_numpy(positions), vocabulary)
        theirs = noise.words(keys, positions, vocabulary)
        assert (ours.numpy() == theirs).all()
        assert philox.gumbel(ours).numpy() == pytest.approx(noise.gumbel(theirs))


@pytest.mark.slow
def test_the_command_runs_a_part_on_a_cpu(tmp_path):
    pytest.importorskip("triton")
    command = ["bash", "benchmarks/gpu_check.sh", "--quick", "--only", "kernel", "--out", str(tmp_path)]
    environment = {"PYTHON": sys.executable, "PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (file,) = tmp_path.glob("*/results.jsonl")
    row, end = map(json.loads, file.read_text().splitlines())
    assert end["status"] == "done"
    assert row["same"] == row["rows"]
    assert row["ranks_right"]


@pytest.mark.slow
def test_parts_without_vllm_need_only_torch_triton_and_transformers():
    absent = ["ray", "verl", "vllm", "numba", "lmdb", "omegaconf", "hydra", "transfer_queue", "tensordict"]
    own = ["__main__", "driver", "kernel", "sampling", "logits", "models", "reporting", "philox"]
    code = f"import sys; sys.modules.update(dict.fromkeys({absent!r}))\n"
    code += "".join(f"import benchmarks.gpu_check.{name}\n" for name in own)
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)
