"""A real run as its event log tells it: requests to fit a cost model by, stages, and its responses as a workload."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from verl_rhyme.observability import events
from verl_rhyme.planning.cost_fit import Requests
from verl_rhyme.simulation.scenario import AGAIN, Drafts
from verl_rhyme.simulation.workload import Prompt

Columns = dict[str, npt.NDArray[Any]]


class RunError(ValueError):
    """A run's log does not tell what is asked; the message says where and what."""


@dataclass(frozen=True)
class Run:
    """What was read.

    Attributes:
        folder: Of the event log.
        requests: Columns of :data:`~verl_rhyme.observability.events.REQUESTS`.
        stages: Columns of :data:`~verl_rhyme.observability.events.STAGES`.
        info: What the trainer kept of the run (:func:`~verl_rhyme.observability.events.read_info`).
        unread: Files that could not be read, and columns that requests do not have.
    """

    folder: Path
    requests: Columns
    stages: Columns
    info: dict[str, Any]
    unread: list[str]


def read(run: str | os.PathLike[str]) -> Run:
    """A run folder, its checkpoints' or the event log's own.

    Raises:
        RunError: There are no events in it.
    """
    top = Path(run)
    if not top.is_dir():
        raise RunError(f"{top} is no folder: give a run's, such as runs/tiny_cpu/histospec-qwen2-fsdp-sync")
    found = [top, *sorted(top.glob("events")), *sorted(top.glob("*/events"))]
    folder = next((path for path in found if any(path.glob("requests-*.arrow"))), None)
    if folder is None:
        raise RunError(
            f"{top}: no events of a run (requests-*.arrow) in it, in events/ or in checkpoints/events/: it has not "
            "ended its first step, ran with rhyme.events.enable=false, or is stock verl, which logs none (a run with "
            "+rhyme=histospec and rhyme.drafting.enable=false decodes as stock verl does, and logs)"
        )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        requests, stages = events.read_requests(folder), events.read_stages(folder)
    unread = [str(warning.message) for warning in told]
    if not requests.num_rows:
        raise RunError(f"{folder}: no request can be read; {unread[0] if unread else 'its files are empty'}")
    columns = events.to_numpy(requests)
    lacking = {name: requests.column(name).null_count for name in _SIZES}
    lacking |= {name: requests.num_rows * (not np.isfinite(columns[name]).any()) for name in _TIMES}  # or it never ran
    for count in sorted({*lacking.values()} - {0}):
        names = ", ".join(name for name, of in lacking.items() if of == count)
        unread.append(
            f"{folder}: {count} of {requests.num_rows} requests do not tell {names}: they are another version's, or "
            "their engines kept no statistics"
        )
    return Run(folder, columns, events.to_numpy(stages), events.read_info(folder), unread)


_SIZES = (
    "prompt_tokens",
    "response_tokens",
    "drafted_tokens",
    "accepted_tokens",
    "verify_steps",
    "policy_version_start",
)
_TIMES = ("queued_at", "started_at", "finished_at")


def requests(run: Run) -> Requests:
    """What a fit goes by.

    Raises:
        RunError: No request tells its times.
    """
    columns = run.requests
    known = np.isfinite(columns["started_at"]) & np.isfinite(columns["finished_at"])
    if not known.any():
        raise RunError(
            f"{run.folder}: no request tells when it started and ended: this log is another version's, or its engines "
            "ran with disable_log_stats=true"
        )
    columns = {name: values[known] for name, values in columns.items()}
    prompt = _numbered(columns["prompt_key"])
    whole_prompt = columns["prompt_tokens"].astype(float)
    shared = np.full(prompt.max() + 1, np.inf)
    np.minimum.at(shared, prompt, whole_prompt)
    own = whole_prompt - shared[prompt]
    first_token = np.where(np.isfinite(columns["first_token_at"]), columns["first_token_at"], columns["finished_at"])
    return Requests(
        replica=columns["replica"].astype(np.int64),
        started=columns["started_at"],
        first_token=np.clip(first_token, columns["started_at"], columns["finished_at"]),
        finished=columns["finished_at"],
        own=own,
        prompt=prompt,
        prompt_tokens=shared[prompt],
        computed=own + np.where(_first_of_its_prompt(columns, prompt), shared[prompt], 0.0),
        tokens=columns["response_tokens"].astype(float),
        steps=_steps(columns),
        drafted=columns["drafted_tokens"].astype(float),
        whole=(columns["stop_reason"] != "aborted") & (columns["response_tokens"] > 0),
    )


def prompts(run: Run) -> list[Prompt]:
    """The groups that were trained, in the order in which they were sent to the engines, with the lengths they had.

    An attempt that was cut short and generated anew under another version would have been longer than it got: it has
    the median of the run's responses that are.

    Raises:
        RunError: No trained response tells its length.
    """
    kept = ~run.requests["validate"]
    columns = {name: values[kept] for name, values in run.requests.items()}
    columns["steps"] = _steps(columns)
    finished = columns["finished_at"]
    sent = np.where(np.isfinite(columns["queued_at"]), columns["queued_at"], finished)
    groups: dict[str, list[int]] = {}
    for row in np.argsort(finished, kind="stable").tolist():
        groups.setdefault(str(columns["uid"][row]), []).append(row)
    lengths = np.sort(columns["response_tokens"][columns["trained"]])
    found = [(float(sent[rows].min()), p) for rows in groups.values() if (p := _prompt(columns, rows, lengths))]
    if not found:
        raise RunError(f"{run.folder}: none of its {len(finished)} requests is of a trained response with a length")
    told: list[Prompt] = []
    seen: dict[str, int] = {}
    for _, prompt in sorted(found, key=lambda entry: entry[0]):
        epoch = seen[prompt.key] = seen.get(prompt.key, -1) + 1
        told.append(prompt._replace(epoch=epoch))
    return told


def most_at_a_time(requests: Requests) -> int:
    """Requests in a replica's slots, but for moments: an end is told a little after the slot has its next one."""
    most = 1
    for replica in np.unique(requests.replica):
        of = requests.replica == replica
        times = np.concatenate([requests.finished[of], requests.started[of]])
        order = np.argsort(times, kind="stable")
        running = np.cumsum(np.repeat([-1, 1], of.sum())[order])[:-1]
        seconds = np.bincount(running, np.diff(times[order]))[1:]
        most = max(most, 1 + int(np.flatnonzero(seconds >= _MOMENTS * seconds.sum())[-1]))
    return most


#: Share of a replica's busy time.
_MOMENTS = 0.05


def _prompt(columns: Columns, rows: list[int], lengths: npt.NDArray[Any]) -> Prompt | None:
    """A group from its requests in the order of time; ``None``: it was not trained, or tells no length."""
    by_sample: dict[int, list[int]] = {}
    for row in rows:
        by_sample.setdefault(int(columns["sample"][row]), []).append(row)
    final: list[tuple[int, float]] = []
    under: dict[tuple[int, int], tuple[int, float | None]] = {}
    for place, number in enumerate(sorted(by_sample)):
        trained = [row for row in by_sample[number] if columns["trained"][row]]
        tokens = int(columns["response_tokens"][trained].sum())
        if not tokens:
            return None
        final.append((tokens, _pace(columns, trained)))
        by_version: dict[int, list[int]] = {}
        for row in by_sample[number]:
            by_version.setdefault(int(columns["policy_version_start"][row]), []).append(row)
        for version, attempt in by_version.items():
            made = int(columns["response_tokens"][attempt].sum())
            if not made:
                continue
            if set(attempt) <= set(trained):
                length = tokens
            elif columns["stop_reason"][attempt[-1]] == "aborted":
                longer = lengths[np.searchsorted(lengths, made, side="right") :]
                length = int(np.median(longer)) if len(longer) else made + 1
            else:
                length = made
            under[place, version] = length, _pace(columns, attempt)
    key = columns["prompt_key"][rows[0]]
    return Prompt(
        key=key.hex() if isinstance(key, bytes) else str(columns["uid"][rows[0]]),
        epoch=0,
        tokens=int(columns["prompt_tokens"][rows].min()),
        lengths=np.array([tokens for tokens, _ in final], dtype=np.int64),
        paces=np.array([pace for _, pace in final]),
        under=under,
    )


def _pace(columns: Columns, rows: list[int]) -> float:
    return max(1.0, float(columns["response_tokens"][rows].sum() / columns["steps"][rows].sum()))


def _steps(columns: Columns) -> npt.NDArray[np.float64]:
    """Decode steps of each request. Its first token is the prompt's; what was accepted behind its end is not in it."""
    verified = columns["verify_steps"]
    plain = columns["response_tokens"] - columns["accepted_tokens"]
    return np.maximum(np.maximum(plain, np.where(verified > 0, verified + 1, 0)), 1).astype(float)


def _numbered(keys: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    numbers: dict[Any, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys.tolist()], dtype=np.int64)


def _first_of_its_prompt(columns: Columns, prompt: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Whether nobody of its prompt came before it on its replica with the same weights: the prefix is computed."""
    order = np.argsort(columns["started_at"], kind="stable")
    seen: set[tuple[int, int, int]] = set()
    first = np.zeros(len(prompt), dtype=bool)
    for row in order.tolist():
        which = int(columns["replica"][row]), int(prompt[row]), int(columns["policy_version_start"][row])
        first[row] = which not in seen
        seen.add(which)
    return first


#: Visits of a prompt after which acceptance lengths are told apart no more.
_MOST_VISITS = 7


def acceptance(run: Run) -> Drafts:
    """Acceptance lengths by how often a prompt was visited before, without what was regenerated from its own text,
    which a simulation has of its own; and draft tokens for each that was gained, of all."""
    columns = run.requests
    rows = ~columns["validate"] & (columns["response_tokens"] > 0)
    drafted, accepted = (int(columns[name][rows].sum()) for name in ("drafted_tokens", "accepted_tokens"))
    if not drafted or not accepted:
        return Drafts()
    tokens: dict[int, list[float]] = {}
    steps, sent = _steps(columns), np.where(np.isfinite(columns["queued_at"]), columns["queued_at"], np.inf)
    visits: dict[str, int] = {}
    before: Counter[Any] = Counter()
    for row in np.flatnonzero(rows)[np.argsort(sent[rows], kind="stable")].tolist():
        uid, key = str(columns["uid"][row]), columns["prompt_key"][row]
        if uid not in visits:
            visits[uid] = before[key]
            before[key] += 1
        sums = tokens.setdefault(min(visits[uid], _MOST_VISITS), [0.0, 0.0])
        again = float(columns["reverified_tokens"][row])
        sums[0] += float(columns["response_tokens"][row]) - again
        sums[1] += float(steps[row]) - again / AGAIN
    paces = [max(1.0, made / max(taken, 1.0)) for _, (made, taken) in sorted(tokens.items())]
    return Drafts(tuple(paces), max(1.0, drafted / accepted))
