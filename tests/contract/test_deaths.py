"""Replicas that die, hang or are only busy, and what takes their place, among real actors."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from verl_rhyme.workers import replicas
from verl_rhyme.workers.replicas import dead
from verl_rhyme.workers.vllm.replica import RhymeReplica

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # no worker can import it

pytestmark = pytest.mark.xdist_group("deaths")  # of one cluster


class Server:
    """Of a replica, as far as it is asked whether it lives."""

    async def healthy(self) -> int:
        return os.getpid()

    async def cache_tokens(self) -> int:
        return 4096

    async def generate(self) -> None:
        await asyncio.Event().wait()

    async def block(self, seconds: float) -> None:
        time.sleep(seconds)


class Replica:
    """As one of verl's, without an engine."""

    def __init__(self, replica_rank: int = 0, **_: Any) -> None:
        self.replica_rank = replica_rank
        self.servers: list[Any] = []
        self.workers: list[Any] = []
        self.resource_pool: Any = None
        self._server_address, self._server_handle = f"s{replica_rank}", None

    async def init_standalone(self) -> None:
        self._server_handle = ray.remote(num_cpus=0)(Server).remote()
        self.servers = [self._server_handle]

    def pid(self) -> int:
        return ray.get(self._server_handle.healthy.remote())


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def replica(cluster: None) -> Iterator[Replica]:
    made = Replica()
    asyncio.run(made.init_standalone())
    yield made
    ray.kill(made._server_handle)


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(replicas.logger, "warning", lambda message, *values: lines.append(message % values))
    return lines


def test_a_server_with_many_requests_says_that_it_lives(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """At DAPO's sizes one replica has 2048 of them and more: each holds one of its actor's calls."""
    ours = object.__new__(RhymeReplica)
    ours.config, ours._rhyme = SimpleNamespace(max_num_seqs=1024), True
    full = Replica()
    server = ray.remote(num_cpus=0, max_concurrency=ours.max_concurrency)(Server).remote()
    full.servers = [server]
    requests = [server.generate.remote() for _ in range(2100)]
    monkeypatch.setattr(replicas, "_SILENT_S", 15.0)
    monkeypatch.setattr(replicas, "_HUNG_S", 15.0)
    assert dead([full]) == {}
    assert ray.wait(requests, timeout=0)[0] == []
    ray.kill(server)


def test_one_that_is_busy_is_waited_for_and_one_that_hangs_is_dead(
    replica: Replica, monkeypatch: pytest.MonkeyPatch, warned: list[str]
) -> None:
    pid = replica.pid()
    monkeypatch.setattr(replicas, "_SILENT_S", 0.3)
    monkeypatch.setattr(replicas, "_HUNG_S", 30.0)
    replica._server_handle.block.remote(1.5)
    assert dead([replica]) == {}
    assert [line for line in warned if "replicas [0] live, but have not answered" in line]
    monkeypatch.setattr(replicas, "_HUNG_S", 1.0)
    os.kill(pid, signal.SIGSTOP)
    assert dead([replica]) == {replica: "no answer for 1 s"}


def test_one_whose_process_is_gone_is_dead_at_once(replica: Replica) -> None:
    other = Replica(1)
    asyncio.run(other.init_standalone())
    os.kill(other.pid(), signal.SIGKILL)
    [(found, why)] = dead([replica, other]).items()
    assert found is other
    assert why
