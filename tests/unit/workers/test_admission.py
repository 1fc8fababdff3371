"""With more requests than slots, an abort finds every request admitted that the engine knows."""

import asyncio
from collections import defaultdict
from types import SimpleNamespace

import pytest

from verl_rhyme.engine.server import RhymeHttpServer


class Engine:
    """Stand-in for vLLM's AsyncLLM that registers a request after a moment and answers it when ``turn`` is set."""

    def __init__(self):
        self.output_processor = SimpleNamespace(external_req_ids=defaultdict(list))
        self.turn, self.closed = asyncio.Event(), []

    async def generate(self, prompt, sampling_params, request_id, **kwargs):
        try:
            await asyncio.sleep(0.01)
            self.output_processor.external_req_ids[request_id].append("internal")
            await self.turn.wait()
            for tokens in ([1], [1, 2]):
                yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens)])
        except (asyncio.CancelledError, GeneratorExit):
            self.closed.append(request_id)
            raise


def server(engine):
    built = object.__new__(RhymeHttpServer)
    built.engine, built._engine_generate, built._final = engine, engine.generate, {"r": None}
    built.global_steps, built._began = 3, {}
    return built


def test_queued_request_is_admitted_before_its_first_token():
    async def run():
        engine = Engine()
        outputs = server(engine)._observed_generate(None, None, "r")
        first = await asyncio.wait_for(anext(outputs), 1)
        engine.turn.set()
        return first, [output async for output in outputs]

    first, rest = asyncio.run(run())
    assert first.outputs == []
    assert [output.outputs[0].token_ids for output in rest] == [[1], [1, 2]]


def test_request_with_an_immediate_output_needs_no_placeholder():
    async def run():
        engine = Engine()
        engine.turn.set()
        built = server(engine)
        outputs = [output async for output in built._observed_generate(None, None, "r")]
        return built, [output for output in outputs if output.outputs]

    built, outputs = asyncio.run(run())
    assert [output.outputs[0].token_ids for output in outputs] == [[1], [1, 2]]
    assert built._final["r"] is outputs[-1]


def test_cancelled_caller_closes_its_request():
    async def run():
        engine = Engine()

        async def consume():
            async for _ in server(engine)._observed_generate(None, None, "r"):
                pass

        task = asyncio.create_task(consume())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return engine.closed

    assert asyncio.run(run()) == ["r"]
