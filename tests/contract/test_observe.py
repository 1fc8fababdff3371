"""vLLM's own ``/metrics`` answers the question that the observer of a run asks, and verl's file names its servers."""

from __future__ import annotations

import threading
import time

import prometheus_client
import pytest

from verl_rhyme.observability import observe


@pytest.fixture
def address():
    """Of vLLM's router over prometheus_client's registry, with its gauge and others."""
    import uvicorn
    from fastapi import FastAPI
    from vllm.entrypoints.serve.instrumentator.metrics import attach_router

    gauges = [prometheus_client.Gauge(name, "h", ["model_name", "engine"]) for name in (observe.GAUGE, "vllm:other")]
    for engine in (0, 1):
        gauges[0].labels("m", str(engine)).set(3 + engine)
    app = FastAPI()
    attach_router(app)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.05)
    yield f"127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(30)
    for gauge in gauges:
        prometheus_client.REGISTRY.unregister(gauge)


@pytest.mark.parametrize("path", observe.PATHS)
def test_vllm_answers_with_the_sum_of_its_engines(address, path):
    import http.client

    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=10)
    connection.request("GET", path)
    response = connection.getresponse()
    text = response.read().decode()
    assert response.status == 200
    assert observe.running(text) == 7
    # The short question costs a server one metric, not all of them.
    assert ("vllm:other" in text) == (path == "/metrics")
    connection.close()


def test_the_gauge_is_vllms(monkeypatch):
    """The name under which vLLM counts ``len(scheduler.running)``."""
    import inspect

    from vllm.v1.metrics import loggers

    source = inspect.getsource(loggers.PrometheusStatLogger)
    assert f'name="{observe.GAUGE}"' in source
    assert "self.gauge_scheduler_running[engine_idx].set( scheduler_stats.num_running_reqs )" in " ".join(
        source.split()
    )


def test_verls_file_names_the_servers(tmp_path, monkeypatch):
    import ray
    from verl.workers.config import PrometheusConfig
    from verl.workers.rollout import utils

    class Remote:
        """Ray's decorator without a cluster: a task runs at once."""

        def __init__(self, function):
            self.function = function

        def options(self, **_):
            return self

        def remote(self, *arguments):
            return self.function(*arguments)

    monkeypatch.setattr(ray, "remote", lambda **_: Remote)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "NodeManagerAddress": "127.0.0.1"}])
    monkeypatch.setattr(ray, "get", list)
    monkeypatch.setattr("subprocess.run", lambda *_, **__: None)  # curl to a Prometheus that is none
    file = tmp_path / "a run" / "servers.yml"
    addresses = ["10.0.0.1:4001", "[fd00::1]:4002"]
    utils.update_prometheus_config(PrometheusConfig(enable=True, file=str(file)), addresses, "vllm")
    assert observe._addresses(file) == addresses
