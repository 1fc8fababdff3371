"""Tools of verl over attempts at a sample: each call is answered once, as often as the attempt begins again."""

import asyncio
import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
from verl.experimental.agent_loop.tool_agent_loop import AgentData, ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall
from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import FunctionTool
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


def over_a_failure(tool, ask, keys=(3, 3, 4)):
    """Run the loop until its first turn's answers, and again to its end; return the answers of the first turn."""
    (once,), session = answer_once([tool]), sample(partial=True)
    (first,) = loop(Client([99, -1]), session, once, keys, ask)
    second, _ = loop(Client([99]), again(session, partial=True), once, keys, ask)
    return first, second


async def ask(tool, key, data=None):
    """Let verl's ToolAgentLoop call a tool."""
    data = data or AgentData([], [], [], None, None, {}, "request", {})
    loop = SimpleNamespace(tools={"look": tool}, max_tool_response_length=10**6)
    return await ToolAgentLoop._call_tool(loop, FunctionCall(name="look", arguments=f'{{"key": {key}}}'), {}, data)


def loop(client, session, tool, keys=(3, 3, 4), ask=ask):
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


def test_parallel_calls_are_known_by_what_they_ask():
    """Their instances take a while to create, each time another one."""
    tool, starts = Look(lambda n: ToolResponse(text=f"answer {n}")), iter([2, 1, 0, 0, 1, 2, 0, 0, 0])

    async def create(**_):
        await asyncio.sleep(0.01 * next(starts))
        return "instance" + str(len(tool.calls)), ToolResponse()

    tool.create = create
    first, second = over_a_failure(tool, ask, keys=(3, 4, 5))
    assert [answer[0].text for answer in first] == [answer[0].text for answer in second]
    assert len(tool.calls) == 6, "of both turns, once"


async def keeps_its_instance(tool, key):
    return await tool.execute("one", {"key": key})


async def judges_its_instance(tool, key):
    instance, _ = await tool.create()
    answer = await tool.execute(instance, {"key": key})
    await tool.calc_reward(instance)
    await tool.release(instance)
    return answer


@pytest.mark.parametrize(
    ("loops", "touch", "calls"),
    [
        (keeps_its_instance, None, 3),
        (judges_its_instance, None, 3),
        (ask, lambda data: data.extra_fields.setdefault("shell", []).append(1), 3),
        (ask, lambda data: data.request_id, 3),
        (ask, lambda data: setattr(data, "shell", 1), 3),
        (ask, lambda data: data.turn_scores.append(1.0), 3),
        (ask, lambda data: data.messages, 2),
    ],
)
def test_a_call_on_which_others_may_build_is_repeated(loops, touch, calls):
    """A sandbox lives in an instance or in verl's AgentData: another attempt must fill it again."""

    class Shell(Look):
        async def execute(self, instance_id, parameters, agent_data=None, **_):
            assert agent_data is None or isinstance(agent_data, AgentData)
            if touch is not None:
                touch(agent_data)
            return await super().execute(instance_id, parameters)

    tool = Shell(lambda n: ToolResponse(text="done"))
    over_a_failure(tool, loops, keys=(3,))
    assert len(tool.calls) == calls


class Mine(ToolResponse):
    cost: float = 0.0


@pytest.mark.parametrize(
    ("answer", "calls"),
    [
        ((ToolResponse(text="a"), np.float32(0.5), {"n": np.int64(3)}), 2),
        ((ToolResponse(text="a"), None, None), 2),
        ((ToolResponse(text="a"), 0.5, {"data": b"x"}), 3),
        ((Mine(text="a", cost=2.0), 0.5, {}), 3),
        ("only a text", 3),  # an agent loop's own kind of tool
        ((ToolResponse(text="a" * 60_000), 0.0, {}), 2),
        ((ToolResponse(text="a" * 70_000), 0.0, {}), 3),
    ],
)
def test_an_answer_of_any_kind_reaches_the_agent_loop(answer, calls):
    class Any(Look):
        async def execute(self, instance_id, parameters, **_):
            self.calls.append(parameters)
            return answer

    async def plainly(tool, key):
        instance, _ = await tool.create()
        found = await tool.execute(instance, {"key": key})
        await tool.release(instance)
        return found

    tool = Any(None)
    assert over_a_failure(tool, plainly, keys=(3,)) == ([answer], [answer])
    assert len(tool.calls) == calls


@pytest.mark.parametrize("kind", [0, 1])
def test_a_tool_that_raised_is_asked_again_in_its_place(kind):
    """verl's loop goes on with the error's text."""

    def answer(n):
        if n == 2:
            raise ConnectionError("away")
        return ToolResponse(text=f"answer {n}")

    tool, calls = looks(answer)[kind]
    first, second = ([made[0].text for made in each] for each in over_a_failure(tool, ask, keys=(3, 3, 3)))
    assert first == ["answer 1", "Error executing tool 'look': away", "answer 3"]
    assert second == ["answer 1", "answer 4", "answer 3"]
    assert len(calls) == 7


def test_wrong_arguments_raise_what_verl_raises_and_the_function_stays():
    """The policy reads the error, and an agent loop may call the function itself."""
    tool, _ = looks(lambda n: ToolResponse(text=str(n)))[1]
    (once,) = answer_once([tool])
    assert once.fn is tool.fn
    for arguments in ({"kye": 3}, [3], 3):
        errors = []
        for each in (tool, once):
            with pytest.raises(TypeError) as raised:
                asyncio.run(each.call(arguments))
            errors.append(str(raised.value))
        assert errors[0] == errors[1]


@pytest.mark.parametrize("kind", [0, 1])
def test_samples_of_no_coordinator_and_unknown_tools_are_left_alone(kind):
    tool, calls = looks(lambda n: ToolResponse(text=str(n)))[kind]
    mine = object()
    once, other = answer_once([tool, mine])
    assert other is mine
    for _ in range(2):
        loop(Client(interruptible=False), Session(), once, keys=(3,))
    assert len(calls) == 4
