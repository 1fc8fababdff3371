"""Attempts as TransferQueue has them: what they reported, and the trajectories they stored."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from typing import Any

import transfer_queue as tq

from verl_rhyme.agent_loop.session import SESSIONS
from verl_rhyme.scheduling.attempts import Attempt
from verl_rhyme.scheduling.recovery import Evidence

logger = logging.getLogger(__name__)

#: verl's partition of trajectories that are to be trained.
TRAIN = "train"
#: Of the ``extra_fields`` of a sample's first trajectory: its attempt's report, but for its turns.
REPORT = "rhyme_report"


def is_ours(name: str) -> bool:
    """Whether this is the name of an attempt; of another trainer mode's it is not."""
    try:
        Attempt.named(name)
    except ValueError:
        return False
    return True


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
    sessions, train = listing.get(SESSIONS, {}), listing.get(TRAIN, {})
    reported = {name: tag for name, tag in sessions.items() if tag.get("status") in ("interrupted", "generated")}
    records = await _column(list(reported), SESSIONS, "records")
    stored = {name: keys[0] for name, keys in trajectories(train).items() if is_ours(name)}
    extras = await _column([key for name, key in stored.items() if name not in reported], TRAIN, "extra_fields")
    finished = {name: told for name, key in stored.items() if (told := (extras.get(key) or {}).get(REPORT))}
    found = {}
    for name in {*reported, *finished, *running}:
        report = reported.get(name) or {"status": "generated" if name in finished else None, **finished.get(name, {})}
        found[name] = Evidence(
            status=report["status"],
            tokens=report.get("tokens", 0),
            first_version=report.get("first_version"),
            running=name in running,
            stored=name in stored,
            reported=name in reported,
            records=list(records[name] if name in records else report.get("records", [])),
            scores=train[stored[name]].get("scores", []) if name in stored else [],
        )
    return found


async def _column(keys: list[str], partition: str, field: str) -> dict[str, Any]:
    """By key, where the data are there; one whose data are being cleared takes no other's along."""
    if not keys:
        return {}
    try:
        data = await tq.async_kv_batch_get(keys=keys, partition_id=partition, select_fields=[field])
        rows = [getattr(row, "data", row) for row in data[field]]
        return dict(zip(keys, rows, strict=True))  # what is not there is left out of the answer
    except Exception:
        if len(keys) == 1:
            return {}
        half = len(keys) // 2
        return {**await _column(keys[:half], partition, field), **await _column(keys[half:], partition, field)}


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
