"""The tool of examples/agent (``multi_turn.function_tool_path``), which also writes each call, and the time of
each answer, to the run's folder."""

import asyncio
import os
import time

import watched_agent
from verl.tools.function_tool import FUNCTION_TOOL_REGISTRY, function_tool

import examples.agent.search  # noqa: F401  (registers it)
from verl_rhyme.agent_loop.session import current

_search = FUNCTION_TOOL_REGISTRY.pop("search").fn


@function_tool("search")
async def counted_search(query: str) -> str:
    """Search the facts.

    Args:
        query: Words of the fact.
    """
    session = current()
    attempt = session.name if session else ""
    watched_agent.write("calls.jsonl", {"attempt": attempt, "query": query})
    await asyncio.sleep(float(os.environ.get("SEARCH_TAKES_S", "0")))
    found = await _search(query)
    watched_agent.write("answers.jsonl", {"attempt": attempt, "at": time.time()})
    return found
