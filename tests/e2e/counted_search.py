"""The tool of examples/agent (``multi_turn.function_tool_path``), which also writes each call to the run's folder."""

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
    watched_agent.write("calls.jsonl", {"attempt": session.name if session else "", "query": query})
    return await _search(query)
