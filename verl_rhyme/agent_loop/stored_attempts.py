"""Attempts stored in TransferQueue: their reports, and their trajectories."""

from __future__ import annotations

import itertools
import logging
from array import array
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import transfer_queue as tq
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from verl_rhyme.agent_loop.session import SESSIONS, Turn
from verl_rhyme.processes import queue
from verl_rhyme.scheduling.attempts import Attempt
from verl_rhyme.scheduling.recovery import Evidence

logger = logging.getLogger(__name__)

#: verl's partition of trajectories for training.
TRAIN = "train"
#: Attempts whose turns are stored in one message.
_STORED_TOGETHER = 64
#: Key in ``extra_fields`` of a sample's first trajectory: the attempt's report, without its turns.
REPORT = "rhyme_report"


class StoredTurns(NamedTuple):
    """Turns and request records that an attempt left to the next."""

    turns: list[Turn]
    records: list[dict[str, Any]]

    def columns(self) -> dict[str, Any]:
        return {"turns": [turn.to_dict() for turn in self.turns], "records": self.records}


class KeptTurns:
    """Turns of interrupted and failed attempts, kept by the agent loop worker that ran them and runs the next attempt.

    At 32,000 running samples of 16,000 tokens, TransferQueue would otherwise carry 4 GB both ways with each policy
    version. It has each attempt's records (:func:`evidence`), and the turns only if a checkpoint stored them
    (:meth:`store`). If the worker dies, the samples start over.
    """

    def __init__(self) -> None:
        self._turns: dict[str, StoredTurns] = {}  # by the attempt's name
        self._stored: set[str] = set()  # attempts whose turns TransferQueue has as well

    def __iter__(self) -> Iterator[str]:
        return iter(self._turns)

    def keep(self, name: str, turns: list[Turn], records: list[dict[str, Any]]) -> None:
        self._turns[name] = StoredTurns([turn.copy() for turn in turns], records)

    def overwritten(self, name: str) -> None:
        """Note that an attempt's report replaced what TransferQueue may have got of it."""
        self._stored.discard(name)

    def find(self, names: Iterable[str]) -> dict[str | None, StoredTurns]:
        """Return what these attempts left, for new ones to go on with; others are left out."""
        kept = {name: self._turns[name] for name in names if name in self._turns}
        return {name: StoredTurns([turn.copy() for turn in left.turns], [*left.records]) for name, left in kept.items()}

    def forget(self, names: Iterable[str]) -> None:
        for name in names:
            self._turns.pop(name, None)
            self._stored.discard(name)

    async def store(self) -> None:
        """Store all turns in TransferQueue as well, for a checkpoint. The coordinator deletes no entries meanwhile:
        TransferQueue would write into those of others."""
        names = [name for name in self._turns if name not in self._stored]
        for start in range(0, len(names), _STORED_TOGETHER):
            part = [name for name in names[start : start + _STORED_TOGETHER] if name in self._turns]
            if part:
                fields = list_of_dict_to_tensordict([self._turns[name].columns() for name in part])
                await tq.async_kv_batch_put(
                    keys=part, partition_id=SESSIONS, fields=fields, tags=[{"turns": True} for _ in part]
                )
                self._stored.update(self._turns.keys() & part)


def is_ours(name: str) -> bool:
    try:
        Attempt.named(name)
    except ValueError:
        return False
    return True


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


async def clear(gone: dict[str, list[str]]) -> None:
    """Delete keys, by partition; after an error the next call deletes them."""
    for partition, keys in gone.items():
        if keys:
            try:
                await tq.async_kv_clear(keys=keys, partition_id=partition)
            except Exception:
                logger.warning("could not clear %d keys of partition %s", len(keys), partition, exc_info=True)


async def fetch_turns(names: list[str]) -> dict[str | None, StoredTurns]:
    """Return what ended attempts left, by name; attempts without turns are left out."""
    found = await _fetch(names, SESSIONS, ["turns", "records"])
    stored = {name: left for name, left in found.items() if left[0]}
    if missing := [name for name in names if name not in stored]:
        logger.warning("the turns of %d attempts are missing, their samples start over: %s", len(missing), missing[:8])
    return {
        name: StoredTurns([Turn.from_dict(turn) for turn in turns], list(records))
        for name, (turns, records) in stored.items()
    }


async def fetch_finished_turns(names: list[str]) -> dict[str | None, StoredTurns]:
    """Return the first trajectory of finished attempts by name, to draft from it; missing ones are left out."""
    stored = await _fetch([f"{name}_0" for name in names], TRAIN, ["responses", "response_mask"])
    if missing := len(names) - len(stored):
        logger.warning("%d finished responses are missing, and are regenerated without a draft", missing)
    return {
        key.rpartition("_")[0]: StoredTurns(_generated_runs(tokens.tolist(), mask.tolist()), [])
        for key, (tokens, mask) in stored.items()
    }


def _generated_runs(tokens: list[int], mask: list[int]) -> list[Turn]:
    turns: list[Turn] = []
    for generated, run in itertools.groupby(zip(mask, tokens, strict=True), key=lambda at: at[0]):
        if generated:
            turns.append(Turn("", array("i", [token for _, token in run]), complete=True, number=len(turns)))
    return turns


async def evidence(
    listing: dict[str, dict[str, dict]], running: set[str], kept: Collection[str]
) -> dict[str, Evidence]:
    """Return the evidence of all attempts by name, from the tags of all keys in TransferQueue by partition, and the
    attempts that the workers run and whose turns they keep."""
    sessions, train = listing.get(SESSIONS, {}), listing.get(TRAIN, {})
    reported = {name: tag for name, tag in sessions.items() if tag.get("status") in ("interrupted", "generated")}
    records = await _fetch(list(reported), SESSIONS, ["records"])
    stored = {name: keys[0] for name, keys in trajectories(train).items() if is_ours(name)}
    extras = await _fetch([key for name, key in stored.items() if name not in reported], TRAIN, ["extra_fields"])
    reports = {name: (extras[key][0] or {}).get(REPORT) for name, key in stored.items() if key in extras}
    finished = {name: report for name, report in reports.items() if report}
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
            records=list(records[name][0] if name in records else report.get("records", [])),
            scores=train[stored[name]].get("scores", []) if name in stored else [],
            lost=not report.get("turns", True) and name not in kept and name not in running,
        )
    return found


async def _fetch(
    keys: list[str], partition: str, fields: list[str], patient: bool = True
) -> dict[str, tuple[Any, ...]]:
    """Return fields by key; entries with missing data are left out. On an error it halves the request; an error of the
    queue itself is waited out once before (``patient``)."""
    if not keys:
        return {}
    try:
        with nullcontext() if patient else queue.once():
            data = await tq.async_kv_batch_get(keys=keys, partition_id=partition, select_fields=fields)
        columns = []
        for column in (data[name] for name in fields):
            values = column.unbind() if hasattr(column, "unbind") else column  # a tensor, or a list
            columns.append([getattr(value, "data", value) for value in values])
        return dict(zip(keys, zip(*columns, strict=True), strict=True))  # the answer leaves out missing keys
    except Exception as error:
        patient = patient and isinstance(error, queue.PERMANENT)
        if len(keys) == 1:
            logger.debug("%s of partition %s cannot be fetched", keys[0], partition, exc_info=True)
            return {}
        half = len(keys) // 2
        halves = [await _fetch(some, partition, fields, patient) for some in (keys[:half], keys[half:])]
        return {**halves[0], **halves[1]}
