"""Tool of the agent for verl's ``tool_agent`` loop: ``actor_rollout_ref.rollout.multi_turn.function_tool_path``."""

import asyncio
import re
import zlib
from pathlib import Path

from verl.tools.function_tool import function_tool

FACTS = Path(__file__).with_name("facts.txt").read_text().splitlines()
#: Range of a search's duration in seconds. Its logarithm is uniform over the queries.
FASTEST, SLOWEST = 0.05, 2.0


def seconds(query: str) -> float:
    """Return the duration of a search, always the same for a query."""
    return FASTEST * (SLOWEST / FASTEST) ** (zlib.crc32(" ".join(query.split()).encode()) / 2**32)


@function_tool
async def search(query: str) -> str:
    """Search the facts.

    Args:
        query: Words of the fact, such as "friend of Ann".
    """
    await asyncio.sleep(seconds(query))
    wanted = " ".join(query.split())
    found = [fact for fact in FACTS if re.search(rf"\b{re.escape(wanted)} is\b", fact)] if wanted else []
    return found[0] if len(found) == 1 else "nothing is known of this."
