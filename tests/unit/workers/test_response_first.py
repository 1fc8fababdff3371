"""A response does not wait for its draft counts."""

import asyncio
import math
from collections import deque
from types import SimpleNamespace

import pytest
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
from vllm import SamplingParams

from verl_rhyme.config import DraftingConfig, RhymeConfig
from verl_rhyme.engine.gate import Gate
from verl_rhyme.engine.server import RhymeHttpServer
from verl_rhyme.processes.request import DRAFT_COUNTS, FIELD, RequestMeta, RequestRecord


class Engine:
    """Engine whose workers answer when ``answer`` is set."""

    def __init__(self):
        self.answer, self.calls = asyncio.Event(), []

    async def collective_rpc(self, method, args):
        self.calls.append((method, list(args[0])))
        await self.answer.wait()
        return [{id: {"drafted": 9, "history_hit": True} for id in args[0]}, {}]  # rank 0 drafts


class Histories:
    """Histories of a node that does not record."""

    def __init__(self):
        self.asked = []

    def ask(self, key):
        self.asked.append(key)
        return 77

    def take_errors(self):
        return 0


@pytest.fixture
def server(monkeypatch):
    async def generate(self, prompt_ids, sampling_params, request_id, **kwargs):
        self.given = sampling_params
        return TokenOutput(token_ids=[1, 2], stop_reason="completed", extra_fields={})

    monkeypatch.setattr(vLLMHttpServer, "generate", generate)
    built = object.__new__(RhymeHttpServer)
    built.engine, built.global_steps, built.replica_rank, built._node_id = Engine(), 3, 0, "node"
    built._rhyme, built._final, built._names, built._finished = RhymeConfig(), {}, {}, deque(maxlen=4)
    built._gate, built._interrupted, built._began, built._histories = Gate(), set(), {}, Histories()
    return built


def test_finished_response_returns_while_the_workers_are_busy(server):
    async def run():
        outputs = [await asyncio.wait_for(server.generate([5], {}, f"r{i}"), 1) for i in range(2)]
        assert server.engine.calls == []
        counting = asyncio.create_task(server.take_counts())
        await asyncio.sleep(0)
        late = await asyncio.wait_for(server.generate([5], {}, "late"), 1)
        server.engine.answer.set()
        return [*outputs, late], await counting, await server.take_counts(), await server.take_counts()

    outputs, counts, rest, none = asyncio.run(run())
    records = [output.extra_fields[FIELD][0] for output in outputs]
    assert [record["id"] for record in records] == ["r0", "r1", "late"]
    assert all(record["drafted_tokens"] == 0 and math.isnan(record["started_at"]) for record in records)
    assert counts == {id: {"drafted_tokens": 9, "history_hit": True} for id in ("r0", "r1")}
    assert list(rest) == ["late"]
    assert none == {}
    assert server.engine.calls == [("take_request_counts", ["r0", "r1"]), ("take_request_counts", ["late"])]


def test_unfetched_counts_are_bounded(server):
    async def run():
        for i in range(9):
            await server.generate([5], {}, f"r{i}")

    asyncio.run(run())
    assert list(server._finished) == ["r5", "r6", "r7", "r8"]


async def test_engine_receives_the_fields_of_drafter_and_sampler(server):
    """It receives no list of tokens, because vLLM copies every object in ``extra_args``."""
    previous = b"\1\0\0\0\2\0\0\0"
    meta = RequestMeta(key="00ff", sample=2, attempt=1, noise="ab", earlier_text=previous, queued_at=12.5)
    params = {"temperature": 1.0, "extra_args": {"theirs": 1}}
    output = await server.generate([5], params, "r", rhyme=meta.to_dict())
    fields = server.given["extra_args"].pop(FIELD)
    assert server.given == {"temperature": 1.0, "extra_args": {"theirs": 1}}
    engine = {
        "id": "r",
        "key": "00ff",
        "history_requested_ns": 77,
        "noise": "ab",
        "earlier_text": previous,
        "resumed_tokens": 0,
    }
    assert fields == engine
    assert server._histories.asked == [bytes.fromhex("00ff")]
    assert fields["earlier_text"] is previous
    assert RequestMeta.of({FIELD: fields}).earlier_text is previous
    (record,) = output.extra_fields[FIELD]
    assert (record["prompt_key"], record["sample"], record["attempt"], record["queued_at"]) == ("00ff", 2, 1, 12.5)
    assert params == {"temperature": 1.0, "extra_args": {"theirs": 1}}


async def test_request_that_arrives_while_weights_load_starts_under_the_new_policy(server, monkeypatch):
    """A request whose policy changes while it runs has both versions."""

    async def outputs(prompt, sampling_params, request_id):
        yield SimpleNamespace(outputs=[])

    async def generate(self, prompt_ids, sampling_params, request_id, **kwargs):
        await self.set_global_steps(4)  # the request waits meanwhile, as at verl's gate
        async for _ in self._observed_generate(None, sampling_params, request_id):
            if request_id == "long":
                await self.set_global_steps(5)
        return TokenOutput(token_ids=[1], stop_reason="completed", extra_fields={})

    monkeypatch.setattr(vLLMHttpServer, "generate", generate)
    server._engine_generate = outputs
    server.engine.output_processor = SimpleNamespace(external_req_ids={})
    records = [(await server.generate([5], {}, name)).extra_fields[FIELD][0] for name in ("short", "long")]
    versions = [(record["policy_version_start"], record["policy_version_end"]) for record in records]
    assert versions == [(4, 4), (4, 5)]
    assert not server._began


async def test_request_of_another_client_is_served(server):
    output = await server.generate([5], {}, "r")
    (record,) = output.extra_fields[FIELD]
    assert (record["prompt_key"], record["sample"]) == ("", -1)
    assert record["queued_at"] > 0


def test_every_count_has_a_record_column():
    assert set(DRAFT_COUNTS.values()) <= set(RequestRecord.__dataclass_fields__)


def test_continued_response_gets_adapted_options(server):
    """``min_tokens`` counts the tokens of the whole response, but vLLM refuses more than ``max_tokens``."""

    async def ask(made, **options):
        await server.generate(
            [5] * (1 + made), {"max_tokens": 1024 - made, **options}, "r", rhyme={"resumed_tokens": made}
        )
        given = {name: value for name, value in server.given.items() if name != "extra_args"}
        SamplingParams(**given)
        return given

    assert asyncio.run(ask(600, min_tokens=512)) == {"max_tokens": 424, "min_tokens": 0}
    assert asyncio.run(ask(100, min_tokens=512)) == {"max_tokens": 924, "min_tokens": 412}
    server._rhyme = RhymeConfig(drafting=DraftingConfig(enable=False))
    assert asyncio.run(ask(0, seed=3))["seed"] == 3
    seeds = [asyncio.run(ask(made, seed=3))["seed"] for made in (1, 2, 2)]
    assert seeds[0] != seeds[1] == seeds[2] != 3, "vLLM's generator would repeat its numbers"
    server._rhyme = RhymeConfig()
    assert asyncio.run(ask(2, seed=3))["seed"] == 3, "our noise depends on the position"
