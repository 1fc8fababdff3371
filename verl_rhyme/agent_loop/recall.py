"""Fetches what earlier attempts left in TransferQueue, to continue them or to draft from them."""

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
    """Turns and records that an attempt left to the next."""

    turns: list[Turn]
    records: list[dict[str, Any]]


async def recall(names: list[str]) -> dict[str | None, Left]:
    """Return what attempts left, by name. Names without an entry are left out, and their samples start over."""
    if not names:
        return {}
    try:
        data = await tq.async_kv_batch_get(keys=names, partition_id=SESSIONS, select_fields=["turns", "records"])
        columns = ([getattr(row, "data", row) for row in data[name]] for name in ("turns", "records"))
        return {
            name: Left([Turn.from_dict(turn) for turn in turns], list(records))
            for name, turns, records in zip(names, *columns, strict=True)  # the queue leaves out missing entries
        }
    except Exception:
        if len(names) == 1:
            logger.warning("turns of %s are missing: the sample starts over", names[0], exc_info=True)
            return {}
        one_by_one = [await recall([name]) for name in names]
        return {name: left for found in one_by_one for name, left in found.items()}


async def recall_finished(names: list[str]) -> dict[str | None, Left]:
    """Return the first trajectory of finished attempts by name, to draft from it; missing ones are left out."""
    if not names:
        return {}
    try:
        keys, fields = [f"{name}_0" for name in names], ["responses", "response_mask"]
        data = await tq.async_kv_batch_get(keys=keys, partition_id=TRAIN, select_fields=fields)
        columns = [column.unbind() if hasattr(column, "unbind") else column for column in map(data.__getitem__, fields)]
        rows = zip(names, *columns, strict=True)
        return {name: Left(_turns(tokens.tolist(), mask.tolist()), []) for name, tokens, mask in rows}
    except Exception:
        logger.warning("some of %d finished responses are missing, and are regenerated without a draft", len(names))
        half = len(names) // 2
        return {} if not half else {**await recall_finished(names[:half]), **await recall_finished(names[half:])}


def _turns(tokens: list[int], mask: list[int]) -> list[Turn]:
    """Return a trajectory's runs of generated tokens (``mask`` is 1)."""
    turns = []
    for generated, run in itertools.groupby(zip(mask, tokens, strict=True), key=lambda at: at[0]):
        if generated:
            turns.append(Turn("", array("i", [token for _, token in run]), complete=True))
    return turns
