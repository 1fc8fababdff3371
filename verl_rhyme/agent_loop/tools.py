"""Tools that answer each call of a sample once: an attempt that begins with earlier turns gets their answers again.

A turn keeps the answers to its calls, in checkpoints too, as JSON. Only verl's tools are covered, which the worker
gives to agent loops (``ToolListWrap``). A call is repeated if it raised, if its answer is not JSON (an image) or long,
and if others may build on what it did: its instance was not released after this call alone, or it changed verl's
``AgentData`` or used :data:`STATE` of it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import wrapt
from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import FunctionTool, normalize_function_tool_return
from verl.tools.schemas import ToolResponse

from verl_rhyme.agent_loop.client import current_call
from verl_rhyme.agent_loop.session import current
from verl_rhyme.once import warn_once

logger = logging.getLogger(__name__)

#: What a tool returns: its response, a reward and metrics.
Answer = tuple[ToolResponse, float | None, dict[str, Any] | None]

#: Attributes of verl's ``AgentData`` that hold a tool's state from one call of a sample to the next, or name it.
STATE = ("extra_fields", "request_id")
#: Characters of the longest answer that is kept: a worker has thousands of samples with dozens of turns.
MOST_CHARACTERS = 1 << 16
TOO_LONG = (
    "an answer of a tool has more than %d characters: it is not kept, and its call is repeated after a failure of its "
    "sample and after a resume; let the tool return what the policy reads (multi_turn.max_tool_response_length)"
)


def answer_once(tools: Iterable[Any]) -> list[Any]:
    """Return tools that keep their answers; those of unknown classes as they are."""
    return [_once(tool) for tool in tools]


def _once(tool: Any) -> Any:
    if isinstance(tool, FunctionTool):
        once: Any = replace(tool)  # verl registers the other, whose function may be synchronous

        async def call(parameters: dict[str, Any]) -> Answer:
            async def normal() -> Answer:
                return normalize_function_tool_return(await tool.call(parameters))

            answer, place = await _answer(tool.name, parameters, normal)
            _keep(answer, place)
            return answer

        once.call = call
        return once
    if isinstance(tool, BaseTool):
        execute, calc_reward, release = tool.execute, tool.calc_reward, tool.release

        async def execute_once(instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Answer:
            instances, key, data = _instances(), (tool.name, instance_id), kwargs.get("agent_data")
            if key in instances:
                instances[key] = None
            if data is not None:
                kwargs["agent_data"] = data = _Watched(data)
                before = _sizes(data)
            answer, place = await _answer(tool.name, parameters, partial(execute, instance_id, parameters, **kwargs))
            stateful = key in instances or (data is not None and (data._self_used or _sizes(data) != before))
            instances[key] = None if stateful else (answer, place)
            return answer

        async def calc_reward_after(instance_id: str, **kwargs: Any) -> float:
            if (key := (tool.name, instance_id)) in (instances := _instances()):
                instances[key] = None
            return await calc_reward(instance_id, **kwargs)

        async def release_and_keep(instance_id: str, **kwargs: Any) -> None:
            if (only := _instances().pop((tool.name, instance_id), None)) is not None:
                _keep(*only)
            await release(instance_id, **kwargs)

        tool.execute, tool.calc_reward, tool.release = execute_once, calc_reward_after, release_and_keep
    return tool


class _Watched(wrapt.ObjectProxy):
    """verl's ``AgentData`` for a tool."""

    def __init__(self, data: Any) -> None:
        super().__init__(data)
        self._self_used = False  # :data:`STATE`

    def __getattr__(self, name: str) -> Any:
        if name in STATE:
            self._self_used = True
        return super().__getattr__(name)


def _sizes(data: Any) -> dict[str, tuple[int, int]]:
    """Return what a tool changes that adds images, rewards or attributes."""
    return {name: (id(value), len(value) if hasattr(value, "__len__") else 0) for name, value in vars(data).items()}


def _instances() -> dict[Any, Any]:
    session = current()
    return {} if session is None else session.tool_instances


async def _answer(
    name: str, parameters: dict[str, Any], call: Callable[[], Awaitable[Answer]]
) -> tuple[Answer, list[str] | None]:
    """Return the answer to a call, and where it is to be kept; ``None`` if it was kept, or cannot be."""
    asked = current_call()
    if asked is None or asked.turn is None:  # no coordinator started the sample
        return await call(), None
    question, answers = json.dumps([name, parameters], default=str), asked.turn.answers
    # Not by the order of all calls: those in parallel may come in another.
    place = next((p for p in answers if p[0] == question and not any(p is other for other in asked.answered)), None)
    if place is None:
        answers.append(place := [question, ""])
    asked.answered.append(place)
    if not place[1]:
        return await call(), place
    response, reward, metrics = json.loads(place[1])
    return (ToolResponse(**response), reward, metrics), None


def _keep(answer: Answer, place: list[str] | None) -> None:
    if place is None:
        return
    try:
        response, reward, metrics = answer
        if type(response) is ToolResponse:
            values = [response.model_dump(exclude_none=True), reward, metrics]
            text = json.dumps(values, default=lambda number: number.item())
            if len(text) <= MOST_CHARACTERS:
                place[1] = text
            else:
                warn_once(logger, TOO_LONG, MOST_CHARACTERS)
    except (TypeError, ValueError, AttributeError):
        """An image, or the answer of an agent loop's own kind: the call is repeated."""
