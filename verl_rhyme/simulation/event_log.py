"""A simulated run as a real one logs itself: the same columns, so that report, page and timeline need no other case.

A row of the log is a stretch of a request in a slot (one that is preempted has several). A response's tokens stand in
the row in which it ends, under the step that trained it; what was not trained is under the step whose batch was taken
next. Times are seconds of the simulation.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl_rhyme.observability import metrics
from verl_rhyme.observability.events import EventLog
from verl_rhyme.scheduling.attempts import Attempt
from verl_rhyme.simulation.engine import Segment
from verl_rhyme.simulation.run import Simulation
from verl_rhyme.simulation.scenario import Scenario, Step

Columns = dict[str, np.ndarray]

_ENDED = {"done": "completed", "withdrawn": "aborted", "preempted": "preempted"}


def requests(simulation: Simulation, segments: Sequence[tuple[str, Segment]], epoch_prompts: int) -> Columns:
    """Columns of ``events.REQUESTS``.

    Args:
        simulation: That ended, and was asked for segments.
        segments: Stretches of requests in slots, with their replica's name.
        epoch_prompts: Prompts of an epoch, of which an attempt's name tells the number.
    """
    steps, predicted = simulation.steps, simulation.predicted
    harvested, ended = (np.array([getattr(step, name) for step in steps]) for name in ("harvested", "ended"))
    finished = np.array([segment.ended for _, segment in segments])
    started = np.array([segment.began for _, segment in segments])
    attempts = [Attempt.named(str(segment.request.name)) for _, segment in segments]
    done = np.array([segment.why == "done" for _, segment in segments], dtype=bool)
    by = np.array([simulation.trained_by.get(str(segment.request.name), 0) for _, segment in segments], dtype=np.int64)
    emitted = np.array([segment.emitted for _, segment in segments])
    before = np.array([segment.request.emitted for _, segment in segments])
    made = np.maximum(0.0, emitted - before)
    pace = np.array([segment.request.pace for _, segment in segments])
    drafts = np.array([segment.request.drafts for _, segment in segments])
    verified = np.where(drafts > 0, made / pace, 0.0)
    return {
        "step": np.where(by > 0, by, np.minimum(np.searchsorted(harvested, finished) + 1, max(1, len(steps)))),
        "epoch": np.array([int(attempt.uid) // epoch_prompts for attempt in attempts], dtype=np.int64),
        "uid": np.array([attempt.uid for attempt in attempts], dtype=object),
        "prompt_key": np.array([_key(segment.request.prompt) for _, segment in segments], dtype=object),
        "sample": np.array([attempt.number for attempt in attempts], dtype=np.int64),
        "attempt": np.array([attempt.attempt for attempt in attempts], dtype=np.int64),
        "replica": np.array([int(name.rpartition("-")[2]) for name, _ in segments], dtype=np.int64),
        "queued_at": np.full(len(segments), np.nan),
        "started_at": started,
        "finished_at": finished,
        "prompt_tokens": np.array([segment.request.prompt_tokens for _, segment in segments], dtype=np.int64),
        "response_tokens": np.rint(np.where(done, emitted, made)).astype(np.int64),
        "policy_version_start": np.searchsorted(ended, started, side="right"),
        "policy_version_end": np.searchsorted(ended, started, side="right"),
        "drafted_tokens": np.rint(drafts * verified).astype(np.int64),
        "accepted_tokens": np.rint((pace - 1) * verified).astype(np.int64),
        "verify_steps": np.rint(verified).astype(np.int64),
        "predicted_tokens": np.array(
            [predicted.get(str(segment.request.name), np.nan) for _, segment in segments]
        ).round(),
        "stop_reason": np.array([_ENDED[segment.why] for _, segment in segments], dtype=object),
        "trained": done & (by > 0),
        "validate": np.zeros(len(segments), dtype=bool),
    }


def stages(steps: Sequence[Step], scenario: Scenario, epochs: Sequence[int]) -> Columns:
    """Columns of ``events.STAGES``, by verl's names; ``epochs`` are those of the steps."""
    rows: list[tuple[int, int, str, float, float]] = []
    for step, epoch in zip(steps, epochs, strict=True):
        number, synced = step.version + 1, max(step.harvested, step.ended - scenario.held)
        spans = [("gen", step.began, step.harvested), ("step", step.began, step.ended)]
        spans += [*_trained(step, synced, scenario), ("update_weights", synced, step.ended)]
        rows += [(number, epoch, stage, began, ended - began) for stage, began, ended in spans]
    names = ("step", "epoch", "stage", "started_at", "duration_s")
    return {name: np.array(values) for name, values in zip(names, zip(*rows, strict=True), strict=True)}


def _trained(step: Step, synced: float, scenario: Scenario) -> Iterator[tuple[str, float, float]]:
    """Stages of training, with when they began and ended; log-probabilities apart where they may come first."""
    cost, streaming = scenario.training, scenario.streaming
    if streaming is None:
        yield "update_actor", step.harvested, synced
        return
    for part in step.parts:
        known = part.began + cost.token * cost.logprobs * part.tokens if streaming.update else part.ended
        yield "old_log_prob", part.began, known
        if streaming.update:
            yield "update_actor", known, part.ended
    known = min(synced, step.harvested + cost.token * cost.logprobs * step.rest)
    yield "old_log_prob", step.harvested, known
    yield "update_actor", known, synced


def columns(
    simulation: Simulation, segments: Sequence[tuple[str, Segment]], epoch_prompts: int
) -> tuple[Columns, Columns]:
    """Requests and stages; arguments as of :func:`requests`."""
    scenario, steps = simulation.scenario, simulation.steps
    epochs = [step.version * scenario.rules.batch_prompts // epoch_prompts for step in steps]
    return requests(simulation, segments, epoch_prompts), stages(steps, scenario, epochs)


def check(folder: Path) -> None:
    """See that there is no run in a folder.

    Raises:
        FileExistsError: There is.
    """
    if (folder / "events").exists() or (folder / "metrics.jsonl").exists():
        raise FileExistsError(errno.EEXIST, "it holds a run", str(folder))


def write(
    folder: Path, about: str, simulation: Simulation, segments: Sequence[tuple[str, Segment]], epoch_prompts: int
) -> None:
    """A run folder that ``verl-rhyme report`` reads: ``metrics.jsonl`` and ``events``.

    Args:
        folder: Made where it is missing; its name is the run's.
        about: What is simulated.
        simulation, segments, epoch_prompts: As above.

    Raises:
        FileExistsError: There is a run in it.
        OSError: It cannot be written.
    """
    check(folder)
    folder.mkdir(parents=True, exist_ok=True)
    log = EventLog(folder / "events")
    scenario, steps = simulation.scenario, simulation.steps
    first = scenario.replicas[0]
    log.describe(
        1,
        folder.resolve().name,
        engine=about,
        slots=scenario.slots,
        rollout="gen" if scenario.rests else "step",
        replica={"slots": first.slots, "room": int(first.room) if math.isfinite(first.room) else 0, "gpus": first.gpus},
    )
    ran, timed = columns(simulation, segments, epoch_prompts)
    lines = []
    for step in steps:
        number = step.version + 1
        epoch = int(timed["epoch"][timed["step"] == number][0])
        for table, append in ((ran, log.append_requests), (timed, log.append_stages)):
            mine = table["step"] == number
            append(number, epoch, {name: v[mine] for name, v in table.items() if name not in ("step", "epoch")})
        lines.append(json.dumps({"step": number, "data": _metrics(step, epoch, scenario)}))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def _metrics(step: Step, epoch: int, scenario: Scenario) -> dict[str, Any]:
    """What verl and we log of a step."""
    sync = min(scenario.held, step.ended - step.harvested)
    return {
        metrics.EPOCH: epoch,
        metrics.GEN_S: step.rollout,
        metrics.ROLLOUT_S: step.rollout if scenario.rests else step.seconds,
        metrics.TIMING + "update_actor": step.ended - step.harvested - sync,
        metrics.TIMING + "update_weights": sync,
        metrics.STEP_S: step.seconds,
        metrics.GEN_MS_PER_TOKEN: 1000.0 * step.rollout / max(1, step.tokens),
        metrics.RESPONSE_LENGTH_MEAN: step.tokens / max(1, step.samples),
        metrics.TRAINED_TOKENS: step.tokens,
        metrics.REQUESTS: step.samples,
        metrics.BUBBLE_RATIO: step.bubble,
        metrics.STALENESS_MAX: step.staleness_max,
        metrics.SORTED_DISCARDED: step.wasted,
        **{metrics.LENGTHS + name: value for name, value in step.lengths.items()},
        **_streamed(step, scenario),
    }


def _streamed(step: Step, scenario: Scenario) -> dict[str, float]:
    if scenario.streaming is None:
        return {}
    return {metrics.STREAM_EARLY: step.early, metrics.STREAM_PARTS: len(step.parts) + (step.rest > 0)}


def _key(prompt: object) -> bytes:
    return hashlib.blake2b(str(prompt).encode(), digest_size=16).digest()
