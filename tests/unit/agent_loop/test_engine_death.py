"""A turn keeps its tokens when its engine dies while the server still answers."""

from types import SimpleNamespace

import pytest

from tests.unit.agent_loop.test_session import PROMPT, Client, Engine, sample
from verl_rhyme.agent_loop import session as sessions
from verl_rhyme.processes.request import DIED, FIELD


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
