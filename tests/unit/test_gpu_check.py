"""The check for the day a GPU is there: its driver goes on where it stopped, keeps time, outlives a part's fault."""

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
    """Whether all is done, the rows, and what was said."""
    said = []
    whole = driver.run(parts, driver.Results(folder), ABOUT, gpu, True, said.append)
    return whole, driver.Results(folder).rows, "\n".join(said)


def statuses(rows):
    return {row["part"]: row["status"] for row in rows if "status" in row}


def test_rows_are_kept_with_what_they_decide_and_libraries_words_are_not(tmp_path):
    code = "print('WARNING: a library'); print('{\"ms\": 1.5}'); print('[1]')"
    whole, rows, said = run([part("quickly", code)], tmp_path)
    assert whole
    assert rows[0] == {"part": "quickly", "decides": "what quickly decides", "ms": 1.5, **ABOUT}
    assert rows[1]["status"] == "done"
    assert len(rows) == 2
    assert "ms 1.5" in said


def test_what_is_done_is_not_run_again_and_what_is_not_is(tmp_path):
    mark = tmp_path / "ran"
    counts = (
        f"import pathlib; p = pathlib.Path({str(mark)!r}); p.write_text(p.read_text() + 'x' if p.exists() else 'x')"
    )
    done = part("done", f"{counts}; print('{{\"n\": 1}}')")
    fails = part("fails", "print('{\"n\": 2}'); raise SystemExit(3)")
    for _ in range(2):
        whole, rows, _ = run([fails, done], tmp_path / "out")
        assert not whole
        assert statuses(rows) == {"fails": "failed", "done": "done"}
        assert sum(row.get("n") == 2 for row in rows) == 1, "rows of the earlier go are replaced"
    assert mark.read_text() == "x"


def test_a_part_that_fails_is_told_with_its_words_and_stops_no_other(tmp_path):
    parts = [part("bad", "raise ValueError('no such kernel')"), part("silent", "pass"), part("good", "print('{}')")]
    _, rows, said = run(parts, tmp_path)
    assert statuses(rows) == {"bad": "failed", "silent": "failed", "good": "done"}
    assert "no such kernel" in said
    assert "it told nothing" in said


def test_a_part_is_ended_in_time_with_all_that_it_began_and_keeps_its_rows(tmp_path):
    child = "import subprocess, sys, time; c = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    code = f"{child}; print('{{\"child\": %d}}' % c.pid, flush=True); time.sleep(60)"
    began = time.monotonic()
    whole, rows, _ = run([part("slow", code, limit_s=3.0), part("next", "print('{}')")], tmp_path)
    assert time.monotonic() - began < 30
    assert not whole
    assert statuses(rows) == {"slow": "timed out", "next": "done"}
    pid = next(row["child"] for row in rows if "child" in row)
    stat = Path(f"/proc/{pid}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_what_cannot_run_here_says_why_and_is_looked_at_again(tmp_path):
    lacks = Part("lacks", ("-c", "print('{}')"), 20.0, "x", needs=("no_such_package", "json"), quick=())
    apart = part("apart", "print('{}')", gpu_only="there is no GPU to ask")
    whole, rows, _ = run([lacks, apart], tmp_path)
    assert whole
    assert {row["part"]: row["reason"] for row in rows} == {
        "lacks": "not here: no_such_package",
        "apart": "there is no GPU to ask",
    }
    _, rows, _ = run([apart], tmp_path, gpu=True)
    assert statuses(rows)["apart"] == "done"


def test_the_noise_written_anew_is_the_noise():
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
def test_what_runs_without_vllm_needs_torch_triton_and_transformers_alone():
    absent = ["ray", "verl", "vllm", "numba", "lmdb", "omegaconf", "hydra", "transfer_queue", "tensordict"]
    own = ["__main__", "driver", "kernel", "sampling", "draft_head", "logits", "models", "telling", "philox"]
    code = f"import sys; sys.modules.update(dict.fromkeys({absent!r}))\n"
    code += "".join(f"import benchmarks.gpu_check.{name}\n" for name in own)
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)
