"""Tools of verl over attempts at a sample: each call is answered once, as often as the attempt begins again."""

import asyncio
import contextlib

import pytest
from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import FunctionTool, normalize_function_tool_return
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

from tests.unit.agent_loop.engines import PROMPT, Client, again, sample
from verl_rhyme.agent_loop import session as sessions
from verl_rhyme.agent_loop.session import Session
from verl_rhyme.agent_loop.tools import answer_once

SCHEMA = OpenAIFunctionToolSchema.model_validate(
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look.",
            "parameters": {"type": "object", "properties": {}, "required": []},
        },
    }
)


class Look(BaseTool):
    def __init__(self, answer):
        super().__init__({}, SCHEMA)
        self.answer, self.calls = answer, []

    async def execute(self, instance_id, parameters, **kwargs):
        self.calls.append(parameters)
        answer = self.answer(len(self.calls)), 0.5, {"n": len(self.calls)}
        await asyncio.sleep(0)
        return answer


def looks(answer):
    """Return both kinds of tools, and the calls of each."""
    base, calls = Look(answer), []

    def look(key):
        calls.append({"key": key})
        return answer(len(calls)), 0.5, {"n": len(calls)}

    return [(base, base.calls), (FunctionTool("look", look, SCHEMA), calls)]


async def ask(tool, key):
    """Call a tool as verl's ToolAgentLoop does."""
    if isinstance(tool, FunctionTool):
        return normalize_function_tool_return(await tool.call({"key": key}))
    return await tool.execute("instance", {"key": key}, agent_data=None)


def loop(client, session, tool, keys=(3, 3, 4)):
    """Two turns with calls in parallel after each; return the answers before a failure."""
    answers = []

    async def run():
        sessions.set_current(session)
        prompt = PROMPT
        for _ in range(2):
            said = await client.generate("r", prompt_ids=prompt, sampling_params={"max_tokens": 4})
            answers.append(await asyncio.gather(*(ask(tool, key) for key in keys)))
            prompt = [*prompt, *said.token_ids, 9]

    with contextlib.suppress(ValueError):
        asyncio.run(run())
    return answers


@pytest.mark.parametrize("kind", [0, 1])
def test_a_call_is_answered_once_over_attempts(kind):
    tool, calls = looks(lambda n: ToolResponse(text=f"answer {n}"))[kind]
    (once,), client, session = answer_once([tool]), Client([99, -1, -1]), sample(partial=True)
    first = loop(client, session, once)
    assert [response.text for response, _, _ in first[0]] == ["answer 1", "answer 2", "answer 3"]
    for _ in range(2):
        session = again(session, partial=True)
        answers = loop(client, session, once)
        assert answers[:1] == first
    assert [call["key"] for call in calls] == [3, 3, 4] * 2, "of both turns, once"
    assert len(answers) == 2


@pytest.mark.parametrize("kind", [0, 1])
def test_a_call_is_repeated_in_a_regenerated_turn_and_with_other_arguments(kind):
    tool, calls = looks(lambda n: ToolResponse(text=str(n)))[kind]
    (once,), session = answer_once([tool]), sample(partial=True)
    loop(Client([99, -1]), session, once)
    loop(Client([-1]), after := again(session, partial=True), once, keys=(3, 5, 4))
    assert [call["key"] for call in calls] == [3, 3, 4, 5]
    loop(Client([99, -1]), again(after, partial=False), once)
    assert len(calls) == 7


@pytest.mark.parametrize("kind", [0, 1])
def test_an_answer_that_is_not_json_is_asked_for_again(kind):
    tool, calls = looks(lambda n: ToolResponse(image=[object()]))[kind]
    (once,), session = answer_once([tool]), sample(partial=True)
    for stops in ([99, -1], [-1]):
        ((answer,),) = loop(Client(stops), session, once, keys=(3,))
        assert answer[0].image
        session = again(session, partial=True)
    assert len(calls) == 2


@pytest.mark.parametrize("kind", [0, 1])
def test_samples_of_no_coordinator_and_unknown_tools_are_left_alone(kind):
    tool, calls = looks(lambda n: ToolResponse(text=str(n)))[kind]
    mine = object()
    once, other = answer_once([tool, mine])
    assert other is mine
    for _ in range(2):
        loop(Client(interruptible=False), Session(), once, keys=(3,))
    assert len(calls) == 4
