"""A replica is healthy only if its engine answers as well."""

import asyncio

import pytest
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

from verl_rhyme.engine import server as servers
from verl_rhyme.engine.server import RhymeHttpServer


class Engine:
    """vLLM's front end and the engine process behind it."""

    def __init__(self):
        self.error, self.steps = None, asyncio.Event()

    async def check_health(self):
        if self.error is not None:
            raise self.error

    async def is_sleeping(self):
        await self.steps.wait()
        return False


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(servers, "_HEALTH_POLL_S", 0.01)
    built = object.__new__(RhymeHttpServer)
    built.node_rank, built.engine, built._rpcs = 0, Engine(), 0
    return built


async def test_hanging_engine_is_not_healthy(server):
    check = asyncio.create_task(server.healthy())
    done, _ = await asyncio.wait({check}, timeout=0.1)
    assert not done, "the engine process hangs"
    server.engine.steps.set()
    await asyncio.wait_for(check, 1)
    await asyncio.wait_for(server.healthy(), 1)


async def test_engine_that_dies_during_the_check_is_not_healthy(server):
    check = asyncio.create_task(server.healthy())
    await asyncio.sleep(0.05)
    server.engine.error = RuntimeError("it has died")
    with pytest.raises(RuntimeError, match="it has died"):
        await asyncio.wait_for(check, 1)


async def test_engine_that_loads_weights_is_healthy(server, monkeypatch):
    taken = asyncio.Event()
    monkeypatch.setattr(vLLMHttpServer, "collective_rpc", lambda self, method: taken.wait())
    loads = asyncio.create_task(server.collective_rpc("update_weights"))
    await asyncio.sleep(0)
    await asyncio.wait_for(server.healthy(), 1)
    taken.set()
    await loads
    done, _ = await asyncio.wait({check := asyncio.create_task(server.healthy())}, timeout=0.1)
    assert not done
    check.cancel()


async def test_server_without_engine_is_healthy(server):
    server.node_rank = 1
    await asyncio.wait_for(server.healthy(), 1)
