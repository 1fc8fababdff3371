"""Event log of a real run: requests for fitting a cost model, stages, response lengths, acceptance lengths."""

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
    """A run's log lacks the requested data; the message says where and what."""


@dataclass(frozen=True)
class Run:
    """The event log of a run.

    Attributes:
        folder: Folder of the event log.
        requests: Columns of :data:`~verl_rhyme.observability.events.REQUESTS`.
        stages: Columns of :data:`~verl_rhyme.observability.events.STAGES`.
        info: Facts that the trainer logged (:func:`~verl_rhyme.observability.events.read_info`).
        unread: Messages about unreadable files and missing columns.
    """

    folder: Path
    requests: Columns
    stages: Columns
    info: dict[str, Any]
    unread: list[str]


def read(run: str | os.PathLike[str]) -> Run:
    """Read the event log in the folder of a run, of its checkpoints, or of the log. Raises RunError without one."""
    top = Path(run)
    if not top.is_dir():
        raise RunError(f"{top} is not a folder: pass a run folder, such as runs/tiny_cpu/histospec-qwen2-fsdp-sync")
    folders = [top, *sorted(top.glob("events")), *sorted(top.glob("*/events"))]
    folder = next((path for path in folders if any(path.glob("requests-*.arrow"))), None)
    if folder is None:
        raise RunError(
            f"{top}: no event log (requests-*.arrow) in this folder, in events/ or in checkpoints/events/: the run has "
            "not finished its first step, has rhyme.events.enable=false, or is stock verl, which writes none (a run "
            "with +rhyme=histospec and rhyme.drafting.enable=false decodes like stock verl and writes one)"
        )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        requests, stages = events.read_requests(folder), events.read_stages(folder)
    unread = [str(warning.message) for warning in caught]
    if not requests.num_rows:
        raise RunError(f"{folder}: no request can be read: {unread[0] if unread else 'the files are empty'}")
    columns = events.to_numpy(requests)
    lacking = {name: requests.column(name).null_count for name in _SIZES}
    lacking |= {name: requests.num_rows * (not np.isfinite(columns[name]).any()) for name in _TIMES}
    for count in sorted({*lacking.values()} - {0}):
        names = ", ".join(name for name, of in lacking.items() if of == count)
        unread.append(
            f"{folder}: {count} of {requests.num_rows} requests lack {names}: another version of verl-rhyme wrote the "
            "log, or the engines kept no statistics"
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
    """Return the requests for fitting a cost model. Raises RunError if none has start and end times."""
    columns = run.requests
    known = np.isfinite(columns["started_at"]) & np.isfinite(columns["finished_at"])
    if not known.any():
        raise RunError(
            f"{run.folder}: no request has start and end times: another version of verl-rhyme wrote the log, or the "
            "engines ran with disable_log_stats=true"
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
    """Return the tokens of each trained response, and the mean tokens of a prompt. Raises RunError without any."""
    kept = run.requests["trained"] & ~run.requests["validate"]
    columns = {name: run.requests[name][kept] for name in ("uid", "sample", "prompt_tokens", "response_tokens")}
    sample = _numbered([*zip(columns["uid"].tolist(), columns["sample"].tolist(), strict=True)])
    tokens = np.bincount(sample, columns["response_tokens"])  # a migrated or resumed sample has several requests
    if not tokens.any():
        raise RunError(f"{run.folder}: none of the {len(kept)} requests has a trained response with a length")
    prompt = _numbered(columns["uid"].tolist())
    prompt_tokens = np.full(prompt.max() + 1, np.inf)
    np.minimum.at(prompt_tokens, prompt, columns["prompt_tokens"])
    return tokens[tokens > 0].astype(float), float(prompt_tokens.mean())


def _steps(columns: Columns) -> npt.NDArray[np.float64]:
    """Return the decode steps of each request. Prefill makes the first token; tokens accepted beyond the end of the
    response do not count.
    """
    verified = columns["verify_steps"]
    plain = columns["response_tokens"] - columns["accepted_tokens"]
    return np.maximum(np.maximum(plain, np.where(verified > 0, verified + 1, 0)), 1).astype(float)


def _numbered(keys: list[Any]) -> npt.NDArray[np.int64]:
    numbers: dict[Any, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)


def _first_of_its_prompt(columns: Columns, prompt: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Whether a request is the first of its prompt on its replica with the same weights: it computes the prefix."""
    order = np.argsort(columns["started_at"], kind="stable")
    seen: set[tuple[int, int, int]] = set()
    first = np.zeros(len(prompt), dtype=bool)
    for row in order.tolist():
        key = int(columns["replica"][row]), int(prompt[row]), int(columns["policy_version_start"][row])
        first[row] = key not in seen
        seen.add(key)
    return first


#: Visits of a prompt from which on acceptance lengths are averaged.
_MOST_VISITS = 7


def acceptance(run: Run) -> Drafts:
    """Return acceptance lengths by the number of earlier visits of a prompt, and draft tokens per token gained.

    Acceptance lengths exclude text regenerated with itself as draft, which a simulation treats separately.
    """
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
