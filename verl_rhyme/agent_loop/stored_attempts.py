"""Attempts stored in TransferQueue: their reports and their trajectories."""

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

#: verl's partition of trajectories for training.
TRAIN = "train"
#: Key in ``extra_fields`` of a sample's first trajectory: the attempt's report, without its turns.
REPORT = "rhyme_report"


def is_ours(name: str) -> bool:
    """Return whether this is the name of an attempt of this package."""
    try:
        Attempt.named(name)
    except ValueError:
        return False
    return True


async def clear(gone: dict[str, list[str]], before: asyncio.Task[None] | None) -> None:
    """Delete keys, by partition, once ``before`` is done; after an error the next call deletes them."""
    if before is not None:
        await before
    for partition, keys in gone.items():
        if keys:
            try:
                await tq.async_kv_clear(keys=keys, partition_id=partition)
            except Exception:
                logger.warning("could not clear %d keys of partition %s", len(keys), partition, exc_info=True)


async def evidence(listing: dict[str, dict[str, dict]], running: set[str]) -> dict[str, Evidence]:
    """Return the evidence of all attempts by name, from the queue's listing and the ``running`` ones."""
    sessions, train = listing.get(SESSIONS, {}), listing.get(TRAIN, {})
    reported = {name: tag for name, tag in sessions.items() if tag.get("status") in ("interrupted", "generated")}
    records = await _column(list(reported), SESSIONS, "records")
    stored = {name: keys[0] for name, keys in trajectories(train).items() if is_ours(name)}
    extras = await _column([key for name, key in stored.items() if name not in reported], TRAIN, "extra_fields")
    finished = {name: report for name, key in stored.items() if (report := (extras.get(key) or {}).get(REPORT))}
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
    """Return a field by key; missing data are left out. On an error it halves the request, to isolate a bad key."""
    if not keys:
        return {}
    try:
        data = await tq.async_kv_batch_get(keys=keys, partition_id=partition, select_fields=[field])
        rows = [getattr(row, "data", row) for row in data[field]]
        return dict(zip(keys, rows, strict=True))  # the answer leaves out missing keys
    except Exception:
        if len(keys) == 1:
            return {}
        half = len(keys) // 2
        return {**await _column(keys[:half], partition, field), **await _column(keys[half:], partition, field)}


def trajectories(tags: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """Return the keys of each attempt's trajectories, if all are stored; an agent loop may return several."""
    found: dict[str, list[str]] = defaultdict(list)
    unfinished: Counter[str] = Counter()
    for key, tag in tags.items():
        name = key.rpartition("_")[0]
        found[name].append(key)
        unfinished[name] += tag.get("status") != "success"  # a key is listed before its data and its tag are stored
    return {
        name: sorted(keys, key=lambda key: int(key.rpartition("_")[2]))
        for name, keys in found.items()
        if not unfinished[name]
    }
