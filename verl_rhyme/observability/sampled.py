"""The bubble ratio from outside a run, by what its servers say of themselves: for runs without our event log, too.

The definition is that of :func:`~verl_rhyme.observability.metrics.bubble_ratio`, over the windows of
:mod:`~verl_rhyme.observability.slot_time`; what differs is how ``r_k`` is known. A server is asked now and then how
many requests run, and an answer holds from halfway after the one before to halfway to the next. vLLM sets its gauge
(``vllm:num_requests_running``) at the end of every engine step, so requests are seen a step after they began: a rollout
seems that much shorter, and its bubble larger. All functions are pure: numpy arrays and seconds come in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from verl_rhyme.observability import metrics
from verl_rhyme.observability.slot_time import TRAINING_STAGES

Array = npt.NDArray[np.float64]
#: Of one server: seconds at which it answered, float64[k], ascending, and requests that ran then, float64[k].
Answers = tuple[Array, Array]

#: verl's stages after the harvest, in a step.
_AFTER = ("reward", *TRAINING_STAGES, "save_checkpoint", "update_weights")
#: Seconds between two answers that are no gap; of the window's time, what gaps may take beyond; answers of a window.
_GAP_S, _UNSEEN, _FEWEST = 1.0, 0.05, 5


class Unknown(ValueError):
    """A window's bubble ratio cannot be told; the message says why."""


@dataclass(frozen=True)
class Step:
    """When a step of verl's trainer was, by what it logs at its end; seconds.

    Attributes:
        harvested: Its batch was there, at the latest: before the stages after ``gen``, counted from the step's end,
            since what a step does before ``gen`` has no stage.
        between: Halfway from then to the end of the step: engines that stop while the actor trains stand still.
        ended: It ended; validation comes after.
        logged: Its line was seen.
    """

    harvested: float
    between: float
    ended: float
    logged: float

    @classmethod
    def of(cls, data: Mapping[str, Any], logged: float) -> Step:
        """Of the line that verl's ``file`` logger wrote.

        Raises:
            Unknown: The line has no ``timing_s/gen``.
        """
        if metrics.finite(data, metrics.GEN_S) is None:
            raise Unknown(f"verl logged no {metrics.GEN_S} of it")

        def seconds(stage: str) -> float:
            return metrics.finite(data, metrics.TIMING + stage) or 0.0

        ended = logged - seconds("testing")
        harvested = ended - sum(map(seconds, _AFTER))
        return cls(harvested, (harvested + ended) / 2, ended, logged)


def window(step: Step, before: Step | None, runs_on: bool) -> tuple[float, float, list[tuple[float, float]]]:
    """Where a step's rollout lies: from, to, and what is left out in between, for validation ran then.

    Args:
        step: The step.
        before: The one before; ``None`` for a start's first.
        runs_on: Engines go on while the actor trains: from harvest to harvest. Else rollout is what ran between two
            trainings.
    """
    tested = before is not None and before.logged > before.ended
    if runs_on:
        out = [(before.ended, before.logged)] if before is not None and tested else []
        return (before.harvested if before else -np.inf), step.harvested, out
    # A step's line is seen a while after its validation: all from the training on is left out.
    out = [(before.between, before.logged)] if before is not None and tested else []
    return (before.between if before else -np.inf), step.harvested, out


def bubble_ratio(
    servers: Mapping[str, Answers],
    slots: int,
    begin: float,
    end: float,
    without: Sequence[tuple[float, float]] = (),
    whole: bool = False,
) -> float:
    """Of a window, in [0, 1].

    Args:
        servers: Answers by address.
        slots: ``Q``, of all servers together.
        begin, end: The window; it shrinks to where something ran, at its beginning alone if it is ``whole``.
        without: Stretches that do not count.
        whole: Rollout goes on to the window's end.

    Raises:
        Unknown: There are no answers, or not enough.
    """
    if not servers:
        raise Unknown("no server was asked")
    cuts, total = _total(servers, begin, end, without)
    filled = np.flatnonzero(total > 0)
    if not len(filled):
        raise Unknown("no request was seen to run")
    first, last = filled[0], len(total) if whole else filled[-1] + 1
    _complete(servers, cuts[first], end if whole else cuts[last])
    total, seconds = total[first:last], np.diff(cuts)[first:last]
    counted = np.isfinite(total)
    busy = float(np.dot(total[counted].clip(0, slots), seconds[counted]))
    return min(max(1.0 - busy / (slots * float(seconds[counted].sum())), 0.0), 1.0)


def _total(
    servers: Mapping[str, Answers], begin: float, end: float, without: Sequence[tuple[float, float]]
) -> tuple[Array, Array]:
    """Borders of stretches, float64[k + 1], and requests that ran in each, float64[k]; NaN where it does not count."""
    edges = {}
    for address, (times, _) in servers.items():
        if not len(times):
            raise Unknown(f"{address} has not answered")
        edges[address] = (times[1:] + times[:-1]) / 2
    begin = max(begin, max(float(times[0]) for times, _ in servers.values()))
    if begin >= end:
        raise Unknown("the servers were first asked after it")
    cuts = np.unique(np.concatenate([*edges.values(), np.ravel(without), [begin, end]]))
    cuts = cuts[(cuts >= begin) & (cuts <= end)]
    middle = (cuts[1:] + cuts[:-1]) / 2
    total = np.zeros(len(middle))
    for address, (_, running) in servers.items():
        total += running[np.searchsorted(edges[address], middle)]
    for a, b in without:
        total[(middle > a) & (middle < b)] = np.nan
    return cuts, total


def _complete(servers: Mapping[str, Answers], begin: float, end: float) -> None:
    """Complain of servers that said too little between two times."""
    for address, (times, _) in servers.items():
        inside = times[(times > begin) & (times < end)]
        if len(inside) < _FEWEST:
            raise Unknown(f"{address} answered {len(inside)} times in {end - begin:.1f} s of rollout")
        gaps = np.diff(np.concatenate([[begin], inside, [end]]))
        unseen = float(np.maximum(gaps - _GAP_S, 0.0).sum())
        if unseen > _UNSEEN * (end - begin):
            raise Unknown(f"{address} did not answer for {gaps.max():.1f} of {end - begin:.1f} s of rollout")
