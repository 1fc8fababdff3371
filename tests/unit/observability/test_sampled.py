"""The bubble ratio from outside: its arithmetic, and the process that asks servers of vLLM's exposition format."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import prometheus_client
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_rhyme.observability import metrics, observe, sampled, steps, summary
from verl_rhyme.observability.sampled import Unknown

pytestmark = pytest.mark.slow  # the observer is a process

#: Requests of two servers: (server, start, seconds), in a rollout of at most 60 s.
requests = st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 30), st.floats(1, 30)), min_size=1, max_size=40)


def answers(spans, server, every, until=70.0, since=-5.0, shift=0.0):
    times = np.arange(since + shift * every, until, every)
    begin, end = (np.array([span[k] for span in spans if span[0] == server]) for k in (1, 2))
    running = ((begin[:, None] <= times) & (times < (begin + end)[:, None])).sum(axis=0)
    return times, running.astype(float)


@settings(max_examples=50, deadline=None)
@given(requests, st.integers(1, 30), st.floats(0, 1), st.floats(0, 1))
def test_it_is_the_bubble_ratio_of_the_requests(spans, slots, a, b):
    servers = {"a": answers(spans, "a", 0.05, shift=a), "b": answers(spans, "b", 0.05, shift=b)}
    begin, end = (np.array([span[k] for span in spans]) for k in (1, 2))
    exact = metrics.bubble_ratio(begin, begin + end, slots)
    # Within rollout nothing may run for a while, but not at its ends. An edge is known to half an interval.
    span = (begin + end).max() - begin.min()
    edges = (2 * len(spans) + 2) * 0.025 / span
    assert sampled.bubble_ratio(servers, slots, -np.inf, 65.0) == pytest.approx(exact, abs=edges)


def test_rollout_that_goes_on_is_counted_to_the_end_of_the_window():
    spans = [("a", 0.0, 10.0)]
    servers = {"a": answers(spans, "a", 0.1)}
    assert sampled.bubble_ratio(servers, 1, -np.inf, 20.0) == pytest.approx(0.0, abs=0.01)
    assert sampled.bubble_ratio(servers, 1, -np.inf, 20.0, whole=True) == pytest.approx(0.5, abs=0.01)
    assert sampled.bubble_ratio(servers, 2, 5.0, 15.0, whole=True) == pytest.approx(0.75, abs=0.01)


def test_what_validation_takes_does_not_count():
    servers = {"a": answers([("a", 0.0, 10.0), ("a", 10.0, 5.0), ("a", 10.0, 5.0), ("a", 20.0, 10.0)], "a", 0.1)}
    with_it = sampled.bubble_ratio(servers, 4, -np.inf, 40.0)
    assert with_it == pytest.approx(1 - (10 + 2 * 5 + 10) / (4 * 30), abs=0.01)
    assert sampled.bubble_ratio(servers, 4, -np.inf, 40.0, [(10.0, 15.0)]) == pytest.approx(1 - 20 / (4 * 25), abs=0.01)


def test_a_gap_is_told_and_a_short_one_is_not():
    times, running = answers([("a", 0.0, 40.0)], "a", 0.1)
    short = (times < 10) | (times > 12)
    assert sampled.bubble_ratio({"a": (times[short], running[short])}, 1, -np.inf, 60.0) == pytest.approx(0, abs=0.01)
    long = (times < 10) | (times > 20)
    with pytest.raises(Unknown, match=r"a did not answer for 10\.\d of 40\.\d s of rollout"):
        sampled.bubble_ratio({"a": (times[long], running[long])}, 1, -np.inf, 60.0)


@pytest.mark.parametrize(
    ("servers", "why"),
    [
        ({}, "no server was asked"),
        ({"a": ([], [])}, "a has not answered"),
        ({"a": ([1.0, 2.0], [0.0, 0.0])}, "no request was seen"),
        ({"a": ([1.0, 2.0], [3.0, 0.0])}, "a answered 0 times"),
        ({"a": ([11.0, 12.0], [3.0, 0.0])}, "first asked after it"),
    ],
)
def test_what_is_not_known_is_never_a_number(servers, why):
    found = {name: (np.array(times), np.array(running)) for name, (times, running) in servers.items()}
    with pytest.raises(Unknown, match=why):
        sampled.bubble_ratio(found, 4, -np.inf, 10.0)


def line(gen, step, testing=None):
    """Of a step that took ``gen`` seconds of rollout, and trained for the rest."""
    trained = metrics.TIMING + "update_actor"
    data = {metrics.EPOCH: 0, metrics.GEN_S: gen, metrics.STEP_S: step, trained: step - gen}
    return data if testing is None else {**data, metrics.TIMING + "testing": testing}


def test_windows_are_those_of_slot_time():
    first = sampled.Step.of(line(4.0, 10.0), 110.0)
    assert (first.harvested, first.between, first.ended) == (104, 107, 110)
    second = sampled.Step.of(line(6.0, 10.0, 5.0), 125.5)
    assert (second.ended, second.logged) == (120.5, 125.5)
    assert sampled.window(second, first, runs_on=False) == (107, second.harvested, [])
    assert sampled.window(second, first, runs_on=True) == (104, second.harvested, [])
    third = sampled.Step.of(line(6.0, 10.0), 136.0)
    assert sampled.window(third, second, runs_on=False) == (118.5, 132, [(118.5, 125.5)])
    assert sampled.window(third, second, runs_on=True) == (116.5, 132, [(120.5, 125.5)])
    # What a step does before gen, long in a start's first, has no stage.
    slow = sampled.Step.of({**line(4.0, 10.0), metrics.STEP_S: 19.0}, 110.0)
    assert (slow.harvested, slow.between) == (104, 107)
    with pytest.raises(Unknown, match="timing_s/gen"):
        sampled.Step.of({metrics.EPOCH: 0}, 1.0)


class Server:
    """An HTTP server as verl's are: vLLM's metrics, and one of a filter by ``name[]`` behind a slash."""

    def __init__(self, engines=1, filters=True, gauge=observe.GAUGE):
        self.registry = prometheus_client.CollectorRegistry()
        self.gauge = prometheus_client.Gauge(gauge, "h", ["engine", "model_name"], registry=self.registry)
        prometheus_client.Gauge("vllm:num_requests_waiting", "h", registry=self.registry).set(7)
        self.engines, self.delay, self.asked = engines, 0.0, []
        self.set(0)
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                outer.asked.append(self.path)
                time.sleep(outer.delay)
                short = self.path.startswith("/metrics/?name")
                found = outer.registry
                if short and filters:
                    found = outer.registry.restricted_registry([observe.GAUGE])
                body = prometheus_client.generate_latest(found)
                self.send_response(404 if short and not filters else 200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.address = f"127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def set(self, running):
        """Of all its engines together."""
        for engine in range(self.engines):
            part = running // self.engines + (engine < running % self.engines)
            self.gauge.labels(engine=str(engine), model_name="m").set(part)

    def close(self):
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def serve():
    servers = []

    def start(**options):
        servers.append(Server(**options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


CONFIG = {
    "trainer": {"v1": {"trainer_mode": "sync", "sync": {}}, "default_local_dir": "${run}/checkpoints"},
    "actor_rollout_ref": {"rollout": {"n": 4, "max_num_seqs": 4, "prometheus": {"file": "${run}/servers.yml"}}},
    "algorithm": {"filter_groups": None},
    "data": {"train_batch_size": 8},
}


def pipeline(trainer_mode, max_staleness, **scheduling):
    rollout = {"n": 4, "max_num_seqs": 100, "checkpoint_engine": {"backend": "naive"}}
    custom = {"rhyme": {"max_staleness": max_staleness, "scheduling": scheduling, "events": {"enable": False}}}
    prometheus = {"file": "${run}/servers.yml"}
    return {
        "trainer": {"v1": {"trainer_mode": trainer_mode}, "default_local_dir": "${run}/checkpoints"},
        "actor_rollout_ref": {"rollout": {**rollout, "custom": custom, "prometheus": prometheus}},
    }


class Run:
    """What verl leaves behind, as it goes."""

    def __init__(self, folder: Path, **changes):
        self.folder, self.config = folder, {"run": str(folder), **CONFIG, **changes}

    def begin(self, *addresses):
        config = self.folder / steps.CONFIG_FILE
        config.parent.mkdir(parents=True)
        config.write_text(yaml.safe_dump(self.config))
        config.with_name("overrides.yaml").write_text("[]")
        if addresses:
            jobs = [
                {"job_name": "ray", "file_sd_configs": [{"files": ["x.json"]}]},
                {"job_name": "rollout", "static_configs": [{"targets": list(addresses)}]},
            ]
            (self.folder / "servers.yml").write_text(yaml.safe_dump({"scrape_configs": jobs}))

    def log(self, step, gen, whole, **more):
        with (self.folder / steps.METRICS_FILE).open("a") as file:
            data = {**line(gen, whole), metrics.TOTAL_TOKENS: 100, "prompt_length/mean": 1, "response_length/mean": 9}
            file.write(json.dumps({"step": step, "data": {**data, **more}}) + "\n")

    @property
    def seen(self):
        return steps.from_sampled(self.folder / steps.SAMPLED_FILE)


def test_a_run_with_two_servers_is_measured(tmp_path, serve):
    first, second, run = serve(engines=2), serve(filters=False), Run(tmp_path)
    observer = observe.Observer(tmp_path, interval=0.02)
    observer.look()
    run.begin(first.address, second.address)
    observer.look()
    assert set(observer.servers) == {first.address, second.address}
    for number in (1, 2):
        began = time.time()
        time.sleep(0.2)
        for counts in ((4, 3), (2, 0)):  # of 8 slots
            first.set(counts[0]), second.set(counts[1])
            time.sleep(0.5)
        first.set(0)
        harvested = time.time()
        time.sleep(0.4)
        run.log(number, harvested - began, time.time() - began)
        observer.look()
    observer.close()
    for number in (1, 2):
        assert run.seen[number][metrics.BUBBLE_RATIO_SAMPLED] == pytest.approx(1 - 9 / 16, abs=0.08)
        assert run.seen[number][metrics.BUBBLE_SLOTS_SAMPLED] == 8
    assert all(path == observe.PATHS[0] for path in first.asked)
    assert second.asked[:2] == list(observe.PATHS)
    assert set(second.asked[2:]) == {observe.PATHS[1]}
    (row,) = summary.read(tmp_path).summary["epochs"]
    assert row["bubble_ratio"] is None
    assert row["bubble_ratio_sampled"] == pytest.approx(1 - 9 / 16, abs=0.08)
    assert row["bubble_ratio_sampled_unknown"] is None


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ("nobody", "verl named no servers: set .*prometheus.enable=true"),
        ("gone", "has not answered"),
        ("other", "has not"),
    ],
)
def test_servers_that_do_not_answer_leave_null_and_a_reason(tmp_path, serve, broken, why):
    server = serve(gauge="sglang:num_running_reqs") if broken == "other" else serve()
    run, told = Run(tmp_path), []
    observer = observe.Observer(tmp_path, interval=0.02, tell=told.append)
    run.begin(*([] if broken == "nobody" else [server.address]))
    if broken == "gone":
        server.close()
        server.http.server_close = lambda: None
    for number in (1, 2, 3):
        observer.look()
        time.sleep(0.2)
        run.log(number, 0.1, 0.2)
    observer.look()
    observer.close()
    assert len(told) == len(set(told)) <= 2
    if broken == "other":
        assert any(f"has no {observe.GAUGE}" in text for text in told)
    (row,) = summary.read(tmp_path).summary["epochs"]
    assert row["bubble_ratio_sampled"] is None
    assert row["bubble_ratio_sampled_unknown"].startswith("3 of 3 steps: ")
    assert re.search(why, row["bubble_ratio_sampled_unknown"])


def test_one_that_hangs_holds_up_no_other(tmp_path, serve):
    slow, quick = serve(), serve()
    slow.delay = 30.0
    threads = [observe.Server(server.address, 0.02) for server in (slow, quick)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    assert [len(thread.take(0.0)[0]) > 5 for thread in threads] == [False, True]
    for thread in threads:
        thread.stop()


def test_lines_of_an_earlier_start_are_not_taken_for_this_one(tmp_path):
    run = Run(tmp_path)
    run.log(1, 1.0, 2.0)
    run.begin()
    for name in ("config.yaml", "overrides.yaml"):
        os.utime((tmp_path / steps.CONFIG_FILE).with_name(name), (1, 1))  # its config, too
    observer = observe.Observer(tmp_path, tell=lambda _: None)
    observer.look()
    assert not run.seen
    (tmp_path / steps.METRICS_FILE).unlink()
    observer.look()
    run.log(2, 1.0, 2.0)
    observer.look()
    assert set(run.seen) == {2}
    assert observer._config is None


def test_a_config_that_is_still_being_written_is_not_taken_for_the_whole(tmp_path):
    run = Run(tmp_path)
    run.begin("127.0.0.1:1")
    config, whole = tmp_path / steps.CONFIG_FILE, (tmp_path / steps.CONFIG_FILE).read_text()
    observer = observe.Observer(tmp_path)
    config.with_name("overrides.yaml").unlink()
    for text in ("", whole[: len(whole) // 2], whole):
        config.write_text(text)
        observer.look()
        assert not observer.servers
    config.with_name("overrides.yaml").write_text("[]")
    observer.look()
    assert set(observer.servers) == {"127.0.0.1:1"}
    observer.close()


@pytest.mark.parametrize(
    ("changes", "slots", "runs_on"),
    [
        ({}, 8, False),  # two replicas of four
        ({"data": {"train_batch_size": 1}}, 4, False),  # one batch of four samples
        (
            {
                "data": {"train_batch_size": 1},
                "algorithm": {"filter_groups": {"enable": True, "max_inflight_gen_batches": 2}},
            },
            8,
            False,
        ),
        (
            {
                "data": {"train_batch_size": 1},
                "trainer": {
                    "v1": {"trainer_mode": "separate_async", "separate_async": {"num_warmup_batches": 0.5}},
                    "default_local_dir": "${run}/checkpoints",
                },
            },
            4,
            True,
        ),
        (pipeline("sync", 0, in_flight=4.0), 128, False),  # four batches of 8 x 4 are in flight
        (pipeline("separate_async", 0, in_flight=4.0), 128, False),  # and on-policy no engine runs on
        (pipeline("separate_async", 1), 64, True),
        (pipeline("sync", 0, in_flight=1.25), 40, False),
    ],
)
def test_slots_are_those_that_the_run_can_fill(tmp_path, changes, slots, runs_on):
    Run(tmp_path, **changes).begin()
    observer = observe.Observer(tmp_path)
    observer.look()
    observer.servers = {"a": None, "b": None}
    assert observer._slots() == (slots, runs_on)
    info = tmp_path / "checkpoints" / "events" / "run.json"
    info.parent.mkdir(parents=True)
    info.write_text(json.dumps({"slots": 3, "rollout": "step"}))
    assert observer._slots() == (3, True)


def test_the_process_ends_when_told_and_when_its_parent_does(tmp_path):
    command = [sys.executable, "-m", "verl_rhyme.observability.observe", str(tmp_path)]
    with subprocess.Popen(command) as process:
        time.sleep(3)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    for seconds in (3, 0):  # or before it has begun
        script = f"{' '.join(command)} --parent $$ > /dev/null & echo $!; sleep {seconds}"
        watcher = int(subprocess.run(["bash", "-c", script], stdout=subprocess.PIPE, text=True, check=True).stdout)
        deadline = time.monotonic() + 20
        while Path(f"/proc/{watcher}").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not Path(f"/proc/{watcher}").exists()


def test_what_nobody_thought_of_leaves_null_and_a_reason(tmp_path, serve, monkeypatch):
    server, run, told = serve(), Run(tmp_path, data={}), []
    observer = observe.Observer(tmp_path, interval=0.02, tell=told.append)
    run.begin(server.address)
    observer.look()
    time.sleep(0.2)
    run.log(1, 0.1, 0.2)
    observer.look()
    assert run.seen[1][metrics.BUBBLE_RATIO_UNKNOWN].startswith("ConfigAttributeError: ")
    monkeypatch.setattr(observer._follower, "poll", lambda: 1 / 0)
    observer.look()
    observer.close()
    assert told[-1] == "cannot see the run: ZeroDivisionError: division by zero"
