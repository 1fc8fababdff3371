"""Attempts as TransferQueue has them: what they reported, and the trajectories they stored."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from typing import Any

import transfer_queue as tq

from verl_rhyme.scheduling.recovery import Evidence
from verl_rhyme.scheduling.remembered import Record
from verl_rhyme.workers.session import SESSIONS

logger = logging.getLogger(__name__)

#: verl's partition of trajectories that are to be trained.
TRAIN = "train"


async def clear(gone: dict[str, list[str]], before: asyncio.Task[None] | None) -> None:
    """Take keys, by partition, out of the queue, once ``before`` is done; what stays is gone with the next time."""
    if before is not None:
        await before
    for partition, keys in gone.items():
        if keys:
            try:
                await tq.async_kv_clear(keys=keys, partition_id=partition)
            except Exception:
                logger.warning("could not clear %d keys of %s", len(keys), partition, exc_info=True)


async def evidence(listing: dict[str, dict[str, dict]], running: set[str]) -> dict[str, Evidence]:
    """By name, what is known of all attempts: as the queue has it, and those that are ``running``."""
    tags = listing.get(SESSIONS, {})
    reported = {name: tag for name, tag in tags.items() if tag.get("status") in ("interrupted", "generated")}
    stored = trajectories(listing.get(TRAIN, {}))
    records = await _records(list(reported))
    return {
        name: Evidence(
            status=reported.get(name, {}).get("status"),
            tokens=reported.get(name, {}).get("tokens", 0),
            first_version=reported.get(name, {}).get("first_version"),
            running=name in running,
            stored=name in stored,
            records=records.get(name, []),
            scores=reported.get(name, {}).get("scores", []),
        )
        for name in {*reported, *running}
    }


async def _records(names: list[str]) -> dict[str, list[Record]]:
    """Of those whose data are there; one that is not, because it is being cleared, takes no other's along."""
    if not names:
        return {}
    try:
        data = await tq.async_kv_batch_get(keys=names, partition_id=SESSIONS, select_fields=["records"])
        rows = [list(getattr(row, "data", row)) for row in data["records"]]
        return dict(zip(names, rows, strict=True))  # what is not there is left out of the answer
    except Exception:
        if len(names) == 1:
            return {}
        half = len(names) // 2
        return {**await _records(names[:half]), **await _records(names[half:])}


def trajectories(tags: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """Keys of each attempt's trajectories, where all of them are stored; an agent loop may give several."""
    found: dict[str, list[str]] = defaultdict(list)
    unfinished: Counter[str] = Counter()
    for key, tag in tags.items():
        name = key.rpartition("_")[0]
        found[name].append(key)
        unfinished[name] += tag.get("status") != "success"  # a key is shown before its data and its tag are there
    return {
        name: sorted(keys, key=lambda key: int(key.rpartition("_")[2]))
        for name, keys in found.items()
        if not unfinished[name]
    }
