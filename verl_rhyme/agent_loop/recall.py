"""What attempts left in TransferQueue, for those that go on from it or draft from it."""

from __future__ import annotations

import itertools
import logging
from array import array
from typing import Any, NamedTuple

import transfer_queue as tq

from verl_rhyme.agent_loop.session import SESSIONS, Turn
from verl_rhyme.agent_loop.stored_attempts import TRAIN

logger = logging.getLogger(__name__)


class Left(NamedTuple):
    """What an attempt left to the next."""

    turns: list[Turn]
    records: list[dict[str, Any]]


async def recall(names: list[str]) -> dict[str | None, Left]:
    """By name, what these attempts left; what is not there is left out, and those samples begin anew."""
    if not names:
        return {}
    try:
        data = await tq.async_kv_batch_get(keys=names, partition_id=SESSIONS, select_fields=["turns", "records"])
        columns = ([getattr(row, "data", row) for row in data[name]] for name in ("turns", "records"))
        return {
            name: Left([Turn.from_dict(turn) for turn in turns], list(records))
            for name, turns, records in zip(names, *columns, strict=True)  # it leaves out what is not there
        }
    except Exception:
        if len(names) == 1:
            logger.warning("what %s said is not there: the sample begins anew", names[0], exc_info=True)
            return {}
        one_by_one = [await recall([name]) for name in names]
        return {name: left for found in one_by_one for name, left in found.items()}


async def recall_finished(names: list[str]) -> dict[str | None, Left]:
    """By name, what finished attempts said, to be drafted from: of their first trajectories, where these are there."""
    if not names:
        return {}
    try:
        keys, fields = [f"{name}_0" for name in names], ["responses", "response_mask"]
        data = await tq.async_kv_batch_get(keys=keys, partition_id=TRAIN, select_fields=fields)
        columns = [column.unbind() if hasattr(column, "unbind") else column for column in map(data.__getitem__, fields)]
        rows = zip(names, *columns, strict=True)
        return {name: Left(_turns(tokens.tolist(), mask.tolist()), []) for name, tokens, mask in rows}
    except Exception:
        logger.warning("of %d finished responses that are regenerated some are not drafted from", len(names))
        half = len(names) // 2
        return {} if not half else {**await recall_finished(names[:half]), **await recall_finished(names[half:])}


def _turns(tokens: list[int], mask: list[int]) -> list[Turn]:
    """Of a trajectory: runs of tokens that the model said (``mask`` is 1)."""
    turns = []
    for said, run in itertools.groupby(zip(mask, tokens, strict=True), key=lambda at: at[0]):
        if said:
            turns.append(Turn("", array("i", [token for _, token in run]), complete=True))
    return turns
