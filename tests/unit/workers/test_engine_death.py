"""Tokens of a request survive the death of its engine while the server still answers."""

import asyncio
from types import SimpleNamespace

import pytest
from test_session import PROMPT, Client, Engine, sample
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
from vllm.v1.engine.exceptions import EngineDeadError

from verl_rhyme.agent_loop import session as sessions
from verl_rhyme.engine.gate import Gate
from verl_rhyme.engine.server import RhymeHttpServer
from verl_rhyme.processes.request import DIED, FIELD


async def two_steps(prompt, params, request_id, **kwargs):
    """Output of vLLM, whose lists grow one after another before the caller reads them."""
    yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1, 2], logprobs=["a", "b", "c"], finish_reason=None)])
    raise EngineDeadError


@pytest.fixture
def server():
    built = object.__new__(RhymeHttpServer)
    processor = SimpleNamespace(external_req_ids={"r": ["r-1"]})
    built.engine, built._engine_generate = SimpleNamespace(output_processor=processor), two_steps
    built._final, built._interrupted, built._names, built._began = {"r": None}, set(), {}, {}
    built.global_steps = 3
    return built


async def test_request_of_a_coordinator_ends_as_aborted(server):
    server._names["r"] = "uid_0"
    last = [output async for output in server._observed_generate(None, None, "r") if output.outputs][-1].outputs[0]
    assert (last.token_ids, last.logprobs, last.finish_reason) == ([1, 2], ["a", "b"], "abort")
    assert server._interrupted == {"r"}


async def test_request_of_another_client_fails_as_with_verl(server):
    with pytest.raises(EngineDeadError):
        async for _ in server._observed_generate(None, None, "r"):
            pass
    assert not server._interrupted


async def test_output_reports_the_death_to_the_client(server, monkeypatch):
    async def generate(self, prompt_ids, sampling_params, request_id, **kwargs):
        if request_id == "interrupted":
            self._interrupted.add(request_id)
        return TokenOutput(token_ids=[1, 2], stop_reason="aborted", extra_fields={})

    monkeypatch.setattr(vLLMHttpServer, "generate", generate)
    server._gate, server._rhyme = Gate(), SimpleNamespace(drafting=SimpleNamespace(enable=False))
    server.global_steps, server.replica_rank, server._node_id = 3, 0, "node"
    outputs = [await server.generate([5], {}, name) for name in ("whole", "interrupted")]
    assert [output.extra_fields.get(DIED, False) for output in outputs] == [False, True]
    assert not server._interrupted


async def test_removed_replica_returns_partial_responses(server):
    server.node_rank, given = 0, []
    server.engine.output_processor.propagate_error = given.append
    leaves = asyncio.create_task(server.let_go())
    done, _ = await asyncio.wait({leaves}, timeout=0.05)
    assert not done, "one request has not returned yet"
    server._final.clear()
    await asyncio.wait_for(leaves, 1)
    assert [type(error) for error in given] == [EngineDeadError]


@pytest.mark.parametrize("partial", [True, False])
async def test_turn_continues_on_another_replica_with_its_tokens(monkeypatch, partial):
    """The attempt stays the same, because the policy is the same."""
    original = Engine.generate

    async def generate(self, request_id, **kwargs):
        output = await original(self, request_id, **kwargs)
        if output.stop_reason == "aborted":
            output.extra_fields[DIED] = True
        return output

    monkeypatch.setattr(Engine, "generate", generate)
    client, removed = Client(stops=[5, 0, 3]), []

    async def remove(servers):
        removed.append(servers)

    client._load_balancer = SimpleNamespace(remove_servers=SimpleNamespace(remote=remove))
    session = sample(partial)
    sessions.set_current(session)
    output = await client.generate("r", prompt_ids=PROMPT, sampling_params={})
    assert output.token_ids == [*range(100, 120)]
    assert len(output.log_probs) == 20
    assert output.stop_reason == "completed"
    assert DIED not in output.extra_fields
    assert [len(prompt) - len(PROMPT) for prompt, *_ in client.requests] == [0, 5, 5, 8]
    assert [record["response_tokens"] for record in output.extra_fields[FIELD]] == [5, 0, 3, 12]
    assert len(removed) == 3
