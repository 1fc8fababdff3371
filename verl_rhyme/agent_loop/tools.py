"""Tools that answer each call of a sample once: an attempt that begins with earlier turns gets their answers again.

A turn keeps the answers to its calls, in checkpoints too, as JSON; a call whose answer is not JSON (an image) is
repeated. Only verl's tools are covered, which the worker gives to agent loops (``ToolListWrap``).
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import FunctionTool, normalize_function_tool_return
from verl.tools.schemas import ToolResponse

from verl_rhyme.agent_loop.client import current_call

#: What a tool returns: its response, a reward and metrics.
Answer = tuple[ToolResponse, float | None, dict[str, Any] | None]


def answer_once(tools: Iterable[Any]) -> list[Any]:
    """Return tools that keep their answers; those of unknown classes as they are."""
    return [_once(tool) for tool in tools]


def _once(tool: Any) -> Any:
    if isinstance(tool, FunctionTool):

        async def call(**parameters: Any) -> Answer:
            async def normal() -> Answer:
                return normalize_function_tool_return(await tool.call(parameters))

            return await _answer(tool.name, parameters, normal)

        return replace(tool, fn=call, is_async=True)
    if isinstance(tool, BaseTool):
        execute = tool.execute

        async def execute_once(instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Answer:
            return await _answer(tool.name, parameters, partial(execute, instance_id, parameters, **kwargs))

        tool.execute = execute_once
    return tool


async def _answer(name: str, parameters: dict[str, Any], call: Callable[[], Awaitable[Answer]]) -> Answer:
    asked = current_call()
    if asked is None or asked.turn is None:  # no coordinator started the sample
        return await call()
    turn, place, question = asked.turn, asked.tools, json.dumps([name, parameters], default=str)
    asked.tools += 1
    known, text = turn.answers.get(place, ["", ""])
    if known == question:
        response, reward, metrics = json.loads(text)
        return ToolResponse(**response), reward, metrics
    answer = await call()
    response, reward, metrics = answer
    try:
        turn.answers[place] = [question, json.dumps([response.model_dump(exclude_none=True), reward, metrics])]
    except TypeError:  # an image
        turn.answers.pop(place, None)
    return answer
