"""What attempts leave: turns in their workers and at checkpoints in TransferQueue, trajectories there."""

from __future__ import annotations

import itertools
import logging
from array import array
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import transfer_queue as tq
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from verl_rhyme.agent_loop.session import SESSIONS, Turn
from verl_rhyme.processes import queue
from verl_rhyme.scheduling.attempts import Attempt, AttemptReport, Record

logger = logging.getLogger(__name__)

#: verl's partition of trajectories for training.
TRAIN = "train"
#: Attempts whose turns are stored in one message.
_STORED_TOGETHER = 64
#: Key in ``extra_fields`` of a sample's first trajectory: the attempt's report (``AttemptReport.to_dict``).
REPORT = "rhyme_report"

#: Turns and request records that an attempt left to the next.
Left = tuple[list[Turn], list[Record]]
_Entry = tuple[AttemptReport, list[Turn]]


class KeptTurns:
    """Turns of interrupted and failed attempts, kept by the agent loop worker that ran them and runs the next attempt.

    At 32,000 running samples of 16,000 tokens, TransferQueue would otherwise carry 4 GB both ways with each policy
    version. It gets them for a checkpoint alone (:meth:`store`), with those of running attempts. If the worker dies,
    the samples start over.
    """

    def __init__(self) -> None:
        self._kept: dict[Attempt, _Entry] = {}
        self._stored: set[Attempt] = set()  # attempts whose turns TransferQueue has as well

    @property
    def reports(self) -> list[AttemptReport]:
        return [report for report, _ in self._kept.values()]

    def keep(self, report: AttemptReport, turns: list[Turn]) -> None:
        """Keep turns, those of a failed attempt as of an interrupted one: they are as good."""
        self._kept[report.attempt] = report._replace(status="interrupted"), [turn.copy() for turn in turns]

    def find(self, attempts: Iterable[Attempt]) -> dict[Attempt, Left]:
        """Return what these attempts left, for new ones to go on with; others are left out."""
        kept = [self._kept[attempt] for attempt in attempts if attempt in self._kept]
        return {report.attempt: ([turn.copy() for turn in turns], [*report.records]) for report, turns in kept}

    def forget(self, attempts: Iterable[Attempt]) -> None:
        for attempt in attempts:
            self._kept.pop(attempt, None)
            self._stored.discard(attempt)

    async def store(self, running: Iterator[_Entry]) -> None:
        """Store all turns in TransferQueue as well, for a checkpoint, and those of ``running`` attempts as they are
        then. The coordinator deletes no entries meanwhile: TransferQueue would write into those of others."""
        entries = self._unstored(running)
        while part := list(itertools.islice(entries, _STORED_TOGETHER)):
            ended = self._kept.keys() & [report.attempt for report, _ in part]  # others have more turns at their end
            rows = [{"report": report.to_dict(), "turns": [turn.to_dict() for turn in turns]} for report, turns in part]
            await tq.async_kv_batch_put(
                keys=[report.attempt.name for report, _ in part],
                partition_id=SESSIONS,
                fields=list_of_dict_to_tensordict(rows),
            )
            self._stored.update(self._kept.keys() & ended)

    def _unstored(self, running: Iterator[_Entry]) -> Iterator[_Entry]:
        """Yield each attempt once, at last those of ``running`` that end before their turn comes."""
        done = {*self._stored}

        def ended() -> Iterator[_Entry]:
            yield from [entry for attempt, entry in self._kept.items() if attempt not in done]

        for report, turns in itertools.chain(ended(), running, ended()):
            if report.attempt not in done:
                done.add(report.attempt)
                yield report, turns


def attempt_of(key: str) -> Attempt | None:
    """Return the attempt of a trajectory's key in partition ``train``; ``None`` for keys of others."""
    try:
        return Attempt.named(key.rpartition("_")[0])
    except ValueError:
        return None


def trajectories(tags: dict[str, dict[str, Any]]) -> dict[Attempt, list[str]]:
    """Return the keys of each attempt's trajectories, if all are stored; an agent loop may return several."""
    found: dict[Attempt, list[str]] = defaultdict(list)
    for key in tags:
        if (attempt := attempt_of(key)) is not None:
            found[attempt].append(key)
    return {
        attempt: sorted(keys, key=lambda key: int(key.rpartition("_")[2]))
        for attempt, keys in found.items()
        if all(tags[key].get("status") == "success" for key in keys)  # a key is listed before its data and tag
    }


async def clear(gone: dict[str, list[str]]) -> None:
    """Delete keys, by partition; after an error the next call deletes them."""
    for partition, keys in gone.items():
        if keys:
            try:
                await tq.async_kv_clear(keys=keys, partition_id=partition)
            except Exception:
                logger.warning("could not clear %d keys of partition %s", len(keys), partition, exc_info=True)


async def fetch_turns(attempts: Collection[Attempt]) -> dict[Attempt, Left]:
    """Return what interrupted attempts left at a checkpoint; attempts without turns are left out."""
    stored = await _fetch([attempt.name for attempt in attempts], SESSIONS, ["turns", "report"])
    if missing := [attempt.name for attempt in attempts if attempt.name not in stored]:
        logger.warning("the turns of %d attempts are missing, their samples start over: %s", len(missing), missing[:8])
    return {
        Attempt.named(name): ([Turn.from_dict(turn) for turn in turns], list(report["records"]))
        for name, (turns, report) in stored.items()
    }


async def fetch_finished_turns(attempts: Collection[Attempt]) -> dict[Attempt, Left]:
    """Return the first trajectory of finished attempts, to draft from it; missing ones are left out."""
    stored = await _fetch([f"{attempt.name}_0" for attempt in attempts], TRAIN, ["responses", "response_mask"])
    if missing := len(attempts) - len(stored):
        logger.warning("%d finished responses are missing, and are regenerated without a draft", missing)
    return {
        Attempt.named(key.rpartition("_")[0]): (_generated_runs(tokens.tolist(), mask.tolist()), [])
        for key, (tokens, mask) in stored.items()
    }


def _generated_runs(tokens: list[int], mask: list[int]) -> list[Turn]:
    turns: list[Turn] = []
    for generated, run in itertools.groupby(zip(mask, tokens, strict=True), key=lambda at: at[0]):
        if generated:
            turns.append(Turn("", array("i", [token for _, token in run]), complete=True, number=len(turns)))
    return turns


async def fetch_reports(listing: dict[str, dict[str, dict]]) -> dict[Attempt, AttemptReport]:
    """Return the reports in TransferQueue, from the tags of all keys by partition: those of attempts whose trajectories
    are stored, and those of interrupted ones that a checkpoint stored."""
    interrupted = await _fetch(list(listing.get(SESSIONS, ())), SESSIONS, ["report"])
    found = {(attempt := Attempt.named(name)): AttemptReport(attempt, **row[0]) for name, row in interrupted.items()}
    finished = {keys[0]: attempt for attempt, keys in trajectories(listing.get(TRAIN, {})).items()}
    for key, (extra,) in (await _fetch(list(finished), TRAIN, ["extra_fields"])).items():
        if report := (extra or {}).get(REPORT):
            found[finished[key]] = AttemptReport(finished[key], **report)
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
