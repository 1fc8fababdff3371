"""Event log: it survives kills, damage and a full disk, and no step counts twice."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_rhyme.drafting.policy import SOURCES
from verl_rhyme.observability.events import REQUESTS, EventLog, read_info, read_requests, read_stages, to_numpy


def requests(count: int) -> dict[str, object]:
    return {
        "uid": [f"uid-{i}" for i in range(count)],
        "prompt_key": [f"{i:032x}" for i in range(count)],
        "node": "node-0",
        "started_at": 1.7e9 + 1 + np.arange(count, dtype=np.float64),
        "response_tokens": list(range(count)),
        "accepted_tokens": 5,
        "verify_steps": 2,
        "history_hit": [i % 2 == 0 for i in range(count)],
        "reverified_tokens": 3,
        "reward": [None if i == 0 else float(i) for i in range(count)],
    }


def test_rows_are_read_as_written(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events")
    log.append_requests(1, 0, requests(5))
    log.append_stages(1, 0, {"stage": ["gen", "update_actor"], "started_at": [1.0, 3.0], "duration_s": [2.0, 4.0]})
    table = read_requests(tmp_path / "events")
    assert table.schema == REQUESTS
    rows = table.to_pylist()
    assert [row["response_tokens"] for row in rows] == [0, 1, 2, 3, 4]
    assert rows[3]["prompt_key"] == (3).to_bytes(16, "big")
    assert (rows[0]["reward"], rows[4]["reward"]) == (None, 4.0)
    assert rows[1]["started_at"] == 1.7e9 + 2
    assert {(row["step"], row["epoch"], row["node"]) for row in rows} == {(1, 0, "node-0")}
    assert read_stages(tmp_path / "events")["duration_s"].to_pylist() == [2.0, 4.0]


def test_missing_values_are_null_and_equal_texts_one_object(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    keys = [bytes(16)] * 3 + [None]
    for step in (1, 2):
        times = np.array([np.nan, 1.0, 2.0, 3.0])
        log.append_requests(step, 0, {"uid": ["u0", "u1"] * 2, "prompt_key": keys, "started_at": times})
    table = read_requests(tmp_path)
    assert table["started_at"].null_count == 2
    columns = to_numpy(table)
    assert np.isnan(columns["finished_at"]).all()
    assert columns["drafted_tokens"].tolist() == [0] * 8
    assert columns["by_source"].shape == (8, len(SOURCES), 2)
    assert not columns["validate"].any()
    assert columns["uid"].tolist() == ["u0", "u1"] * 4
    assert len({id(uid) for uid in columns["uid"]}) == 2
    assert columns["prompt_key"].tolist() == keys * 2
    assert columns["node"].tolist() == [None] * 8
    assert to_numpy(read_requests(tmp_path / "nowhere"))["uid"].shape == (0,)


def test_unknown_columns_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown columns \['draftd_tokens'\]"):
        EventLog(tmp_path).append_requests(1, 0, {"uid": ["a"], "draftd_tokens": [1]})


appends = st.tuples(st.integers(1, 5), st.sampled_from(["requests", "validation", "stages"]))


@given(st.lists(st.lists(appends, min_size=1, max_size=6), max_size=4))
def test_a_resumed_run_replaces_repeated_and_lost_steps(sessions: list[list[tuple[int, str]]]) -> None:
    """Those from its first step on. verl validates before it: that replaces earlier validation of the same step."""
    live: list[tuple[int, str, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, rows in zip("abcd", sessions, strict=False):
            log = EventLog(folder)
            for step, kind in rows:
                if kind == "stages":
                    log.append_stages(step, 0, {"stage": [name]})
                else:
                    log.append_requests(step, 0, {"uid": [name], "validate": kind == "validation"})
            begin = min((step for step, kind in rows if kind != "validation"), default=6)
            again = [(step, kind) for step, kind in rows if kind == "validation"]
            live = [row for row in live if row[0] < begin and row[:2] not in again]
            live += [(step, kind, name) for step, kind in rows]
        requests, stages = read_requests(folder).to_pylist(), read_stages(folder).to_pylist()
    found = [(row["step"], "validation" if row["validate"] else "requests", row["uid"]) for row in requests]
    assert [step for step, *_ in found] == sorted(step for step, *_ in found)
    assert sorted([*found, *((row["step"], "stages", row["stage"]) for row in stages)]) == sorted(live)


@pytest.mark.filterwarnings("ignore:event log")
def test_a_damaged_file_is_skipped_with_a_warning(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    for step in (1, 2):
        log.append_requests(step, 0, requests(20))
    first, _ = sorted(tmp_path.glob("requests-*.arrow"))
    whole = first.read_bytes()
    for damaged in (whole[:-100], b"not arrow at all", b""):
        first.write_bytes(damaged)
        with pytest.warns(UserWarning, match="unreadable and is skipped"):
            assert set(read_requests(tmp_path)["step"].to_pylist()) == {2}
    rng = np.random.default_rng(0)
    for _ in range(300):  # no damage crashes the reader
        noisy = bytearray(whole)
        for at in rng.integers(0, len(whole), rng.integers(1, 40)):
            noisy[at] = rng.integers(0, 256)
        first.write_bytes(noisy)
        assert all(set(row) == set(REQUESTS.names) for row in read_requests(tmp_path).to_pylist())


def test_file_of_another_version_is_read(tmp_path: Path) -> None:
    import pyarrow as pa

    EventLog(tmp_path).append_requests(1, 0, requests(2))
    (path,) = tmp_path.glob("requests-*.arrow")
    table = pa.ipc.open_file(path.read_bytes()).read_all()
    older = table.drop_columns(["verify_steps", "reverified_tokens"]).append_column("later_idea", pa.array([1, 2]))
    with pa.ipc.new_file(path, older.schema) as writer:
        writer.write_table(older)
    columns = read_requests(tmp_path)
    assert (columns["verify_steps"].null_count, columns["accepted_tokens"].to_pylist()) == (2, [5, 5])


WRITER = """
import sys
from verl_rhyme.observability.events import EventLog
log = EventLog(sys.argv[1])
for step in range(1, 100000):
    log.append_requests(step, 0, {"uid": [f"{step}-{i}" for i in range(64)], "node": "n"})
    print(step, flush=True)
"""


def test_kill_9_loses_no_flushed_row(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(0.2)
        os.kill(writer.pid, signal.SIGKILL)
        printed = [int(line) for line in writer.stdout.read().splitlines() if line]
    (tmp_path / ".requests.tmp").touch()  # as if it was killed during a write
    steps = read_requests(tmp_path)["step"].to_pylist()
    assert len(steps) == 64 * max(steps)
    assert max(steps) >= max(printed, default=1)
    EventLog(tmp_path)
    assert not list(tmp_path.glob(".*"))


def test_a_full_disk_causes_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog(tmp_path)
    log.append_requests(1, 0, {"uid": ["before"]})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
    try:
        for step in (2, 3):
            log.append_requests(step, 0, {"uid": ["x" * 100] * 100})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    log.append_requests(4, 0, {"uid": ["after"]})
    assert read_requests(tmp_path)["uid"].to_pylist() == ["before", "after"]
    assert not list(tmp_path.glob(".*"))
    EventLog(next(tmp_path.glob("*.arrow")) / "events").describe(run="not a folder")
    [record] = caplog.records
    assert "events.dir" in record.getMessage()


def test_description_is_kept_and_extended_with_every_name(tmp_path: Path) -> None:
    for name, more in (("histospec", {"slots": 32}), ("undrafted", {}), ("histospec", {"engine": "vllm"})):
        EventLog(tmp_path).describe(name, **more)
    assert read_info(tmp_path) == {"names": ["histospec", "undrafted"], "slots": 32, "engine": "vllm"}
    (tmp_path / "run.json").write_text("{broken")
    assert read_info(tmp_path) == {}
