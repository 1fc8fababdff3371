"""A real run as its event log tells it: requests to fit a cost model by, stages, lengths, acceptance lengths."""

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
    prompt = _numbered(columns["prompt_key"].tolist())
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


def lengths(run: Run) -> tuple[npt.NDArray[np.float64], float]:
    """Tokens of each trained response, and of a prompt on average.

    Raises:
        RunError: No trained response tells its length.
    """
    kept = run.requests["trained"] & ~run.requests["validate"]
    columns = {name: run.requests[name][kept] for name in ("uid", "sample", "prompt_tokens", "response_tokens")}
    sample = _numbered([*zip(columns["uid"].tolist(), columns["sample"].tolist(), strict=True)])
    tokens = np.bincount(sample, columns["response_tokens"])  # one that was moved or resumed has several requests
    if not tokens.any():
        raise RunError(f"{run.folder}: none of its {len(kept)} requests is of a trained response with a length")
    prompt = _numbered(columns["uid"].tolist())
    prompt_tokens = np.full(prompt.max() + 1, np.inf)
    np.minimum.at(prompt_tokens, prompt, columns["prompt_tokens"])
    return tokens[tokens > 0].astype(float), float(prompt_tokens.mean())


def _steps(columns: Columns) -> npt.NDArray[np.float64]:
    """Decode steps of each request. Its first token is the prompt's; what was accepted behind its end is not in it."""
    verified = columns["verify_steps"]
    plain = columns["response_tokens"] - columns["accepted_tokens"]
    return np.maximum(np.maximum(plain, np.where(verified > 0, verified + 1, 0)), 1).astype(float)


def _numbered(keys: list[Any]) -> npt.NDArray[np.int64]:
    numbers: dict[Any, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)


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
