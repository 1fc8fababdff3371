"""An abandoned request is aborted in the engine by the id that verl gave it."""

import asyncio
from functools import partial
from types import SimpleNamespace

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from verl_rhyme.engine.gate import Gate
from verl_rhyme.engine.server import RhymeHttpServer


class Core:
    """The engine process."""

    def __init__(self):
        self.aborted = []

    async def abort_requests_async(self, names):
        self.aborted += names


@pytest.fixture
def server():
    """Server with vLLM's front end around one request, to which vLLM has given another id."""
    built = object.__new__(RhymeHttpServer)
    engine = SimpleNamespace(
        output_processor=OutputProcessor(None, log_stats=False), engine_core=Core(), log_requests=False
    )
    engine.abort = partial(AsyncLLM.abort, engine)
    built.engine, built.node_rank, built.cleared = engine, 0, 0
    built._gate, built._final, built._aborts = Gate(), {}, set()
    params = SamplingParams(max_tokens=8, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
    request = EngineCoreRequest("r-12345678", [1, 2], None, params, None, 0.0, None, None, None, external_req_id="r")
    built.queue = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, request.request_id)
    built.arrives = partial(engine.output_processor.add_request, request, None, None, 0, built.queue)
    return built


async def test_request_is_aborted_for_the_engine_and_for_its_caller(server):
    server.arrives()
    assert await server.abort_request("r", reset_prefix_cache=False) == {"aborted": True, "request_id": "r"}
    assert server.engine.engine_core.aborted == ["r-12345678"]
    output = await asyncio.wait_for(server.queue.get(), 1)
    assert output.outputs[0].finish_reason == "abort"


async def test_request_that_waits_for_loading_weights_is_aborted_on_arrival(server):
    server._final["r"] = None  # the request has passed the gate, and verl holds it
    assert not (await server.abort_request("r"))["aborted"]
    assert server._aborts
    server.arrives()
    await asyncio.wait_for(asyncio.gather(*server._aborts), 1)
    assert server.engine.engine_core.aborted == ["r-12345678"]


async def test_request_that_waits_at_the_gate_never_enters(server):
    waits = asyncio.create_task(server._gate.enter("r", 1))
    await asyncio.sleep(0)
    assert (await server.abort_request("r"))["aborted"]
    assert not await waits


async def test_unknown_request_aborts_nothing(server):
    server.arrives()
    assert not (await server.abort_request("another", reset_prefix_cache=False))["aborted"]
    assert server.engine.engine_core.aborted == []
