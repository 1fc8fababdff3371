"""``benchmarks.faults``: what it injects into, what it reads in a log, and what it finds wrong."""

import inspect
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from benchmarks import fault_injection, faults
from benchmarks.fault_injection import REPLACED, TITLES, TOLD, Injection, Injector, processes, redispatched
from verl_rhyme.agent_loop import client
from verl_rhyme.coordinator import replicas
from verl_rhyme.weights import manager

_SERVER = (
    f"import subprocess, time; subprocess.Popen([{TITLES['engine']!r}, '60'], executable='/bin/sleep'); time.sleep(60)"
)


def run_of(folder, servers):
    """Processes with the titles of a run's."""
    env = {**os.environ, "RUN_DIR": str(folder)}
    made = [
        subprocess.Popen([TITLES["server"], "-S", "-c", _SERVER], executable=sys.executable, env=env)
        for _ in range(servers)
    ]
    made.append(subprocess.Popen([TITLES["relay"], "60"], executable="/bin/sleep", env=env))
    return made


@pytest.fixture
def runs(tmp_path):
    """Of which one is ours."""
    folders = [tmp_path / "ours", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()
    made = [process for folder in folders for process in run_of(folder, 3)]
    deadline = time.monotonic() + 60
    while sum(len(processes(folder, "engine")) for folder in folders) < 6 and time.monotonic() < deadline:
        time.sleep(0.05)
    yield folders
    for folder in folders:
        fault_injection.end(folder)
    for process in made:
        process.wait(10)


def states(folder):
    found = [process for kind in ("server", "engine", "relay") for process in processes(folder, kind)]
    return sorted(process.status() for process in found)


def test_only_processes_of_the_run_are_touched_and_one_replica_is_left_in_peace(runs, monkeypatch):
    ours, other = runs
    monkeypatch.setattr(fault_injection, "_PAUSES_S", (0.0,))
    before, replicas = states(other), [(server, server.children()[0]) for server in processes(ours, "server")]
    injector = Injector(ours, {"kill": 2, "hang": 2, "relay": 1}, seed=1)
    with injector.running():
        time.sleep(0.5)
        assert injector.done == [], "it has not trained a step"
        (ours / "metrics.jsonl").write_text("{}\n")
        deadline = time.monotonic() + 20
        while len(injector.done) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)
    assert sorted(each.kind == "relay" for each in injector.done) == [False, False, True]

    def well(process):
        return process.is_running() and process.status() in (psutil.STATUS_SLEEPING, psutil.STATUS_RUNNING)

    assert [well(server) and well(engine) for server, engine in replicas].count(True) == 1
    assert states(other) == before


def test_a_slow_one_goes_on_afterwards(runs, monkeypatch):
    ours, _ = runs
    monkeypatch.setattr(fault_injection, "_SPAN_S", 1.0)
    (ours / "metrics.jsonl").write_text("{}\n")
    injector = Injector(ours, {"slow": 1}, seed=1)
    injector._started = 0.0
    seen = set()
    with injector.running():
        deadline = time.monotonic() + 20
        while (not injector.done or injector._slow is not None) and time.monotonic() < deadline:
            seen |= {process.status() for process in processes(ours, "engine")}
            time.sleep(0.05)
    assert psutil.STATUS_STOPPED in seen
    assert {process.status() for process in processes(ours, "engine")} == {psutil.STATUS_SLEEPING}


def test_what_the_log_tells_goes_to_the_fault_that_it_is_of(tmp_path):
    injector = Injector(tmp_path, {}, seed=1)
    injector.done = [Injection(kind, "server", time.time()) for kind in ("kill", "hang", "relay", "kill", "trainer")]
    log = tmp_path / "train.log"
    log.write_text("replica 1 (10.0.0.1:80) is gone: no answer for 20 s\nthe relay of node ab12 is gone, another one ")
    injector._follow()
    assert [each.told_after_s is not None for each in injector.done] == [False, True, False, False, False]
    with log.open("a") as file:
        file.write(
            "takes its place: it died\nreplica 0 (10.0.0.1:81) is gone: it died\nreplica 3 takes the place of a "
        )
        file.write("dead one\n")
    injector.ended()
    assert [each.told_after_s is not None for each in injector.done] == [True, True, True, False, True]
    assert [each.cut_short for each in injector.done] == [False, False, False, True, False]
    assert injector.replaced == 1


def test_the_product_says_what_is_looked_for():
    said = {
        replicas: ['"replica %d (%s) is gone: %s"', '"replica %d takes the place of a dead one"'],
        manager: ['"the relay of node %s is gone, another one takes its place: %s"'],
        client: ['"a replica died: %s goes on at another with %d tokens of its turn, without those of %.1f s (%s)"'],
    }
    for module, lines in said.items():
        for line in lines:
            assert line in inspect.getsource(module)
    (gone, replaced), [relay], [moved] = ([line.strip('"') for line in lines] for lines in said.values())
    assert TOLD["replica"].search(gone % (3, "10.0.0.1:80", "why"))
    assert REPLACED.search(replaced % 3)
    assert TOLD["relay"].search(relay % ("ab12", "why"))
    log = "\n".join(moved % values for values in (("a_0_1", 12, 3.25, "why"), ("b_1_1", 0, 1.0, "why")))
    assert redispatched(log) == {"redispatched": 2, "kept_tokens": 12, "kept_some": 1, "lost_request_s": 4.2}


def run_with(rows):
    names = ("trained", "step", "epoch", "uid", "sample", "prompt_key")
    return SimpleNamespace(requests=dict(zip(names, map(np.array, zip(*rows, strict=True)), strict=True)))


def test_what_is_lost_or_trained_twice_is_found():
    """Two epochs of two prompts x two samples, an update for each prompt."""
    rows = [
        (True, 2 * epoch + prompt + 1, epoch, f"u{epoch}{prompt}", sample, f"p{prompt}")
        for epoch in range(2)
        for prompt in range(2)
        for sample in range(2)
    ]
    rows.append((True, 1, 0, "u00", 0, "p0"))  # a sample of two requests
    rows.append((False, 1, 0, "u00", 1, "p0"))  # thrown away
    assert faults.not_once(run_with(rows), 4, 2, 4) == []
    assert faults.not_once(run_with(rows[1:-2]), 4, 2, 4) == ["epoch 0: 1 samples lost, 0 trained twice"]
    assert faults.not_once(run_with([*rows, (True, 2, 0, "u00", 0, "p0")]), 4, 2, 4) == ["u00-0 in steps [1, 2]"]
    again = [*rows, (True, 3, 1, "u99", 0, "p0")]
    assert faults.not_once(run_with(again), 4, 2, 4) == ["epoch 1: 0 samples lost, 1 trained twice"]
    assert "steps [4]" in faults.not_once(run_with([row for row in rows if row[1] != 4]), 4, 2, 4)[0]


def test_cells_are_of_the_kinds_that_are_asked_for():
    both = [(cell.setting, cell.arm) for cell in faults.cells(["kill", "cut"], 1)]
    assert both == [("stream", "kill"), ("full", "kill"), ("link", "cut")]
    assert [cell.setting for cell in faults.cells(["cut"], 2)] == ["link", "link"]


def test_a_run_that_was_ended_goes_on_with_what_was_not_done(tmp_path):
    injector = Injector(tmp_path, {"kill": 2, "relay": 1}, seed=1)
    injector.done = [Injection("kill", "engine", time.time())]
    injector.ended("ended from outside")
    later = Injector(tmp_path, {"kill": 2, "relay": 1}, seed=1)
    assert [each.cut_short for each in later.done] == [True]
    assert sorted(later._deck) == ["kill", "relay"]
    assert later.ends == ["ended from outside"]
