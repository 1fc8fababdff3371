"""Requests and stages of a step as spans in RL-Insight, where verl's logger of that name is on.

verl's own spans there say when a replica generates at all, and it has a way for finished spans that it does not use yet
(``RLInsightLogger.trace_span``). Ours are those of the event log, one for each request in a lane for its slot:
no two lie over each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from verl.utils.tracking import RLInsightLogger

#: Of a request's record, what a span tells.
_TOLD = ("prompt_key", "sample", "attempt", "prompt_tokens", "response_tokens", "drafted_tokens", "accepted_tokens")


class Insight:
    """Keeps track of the lanes. Spans that come late find a lane of their own."""

    def __init__(self) -> None:
        self._taken: dict[str, list[float]] = {}  # by lanes' common name, until when each is

    def requests(self, rows: Iterable[Mapping[str, Any]], step: int) -> None:
        """Records of requests (``RequestRecord``); those that never ran are left out."""
        if not RLInsightLogger.enabled():
            return
        ran = [row for row in rows if row["finished_at"] > row["started_at"]]  # not where one is NaN
        for row in sorted(ran, key=lambda row: row["started_at"]):
            about = {name: row[name] for name in _TOLD if row.get(name) is not None}
            self._send("request", f"replica_{row['replica']}/slot", row["started_at"], row["finished_at"], step, about)

    def stages(self, stages: Sequence[tuple[str, float, float]], step: int) -> None:
        """verl's timers, as (name, start, seconds)."""
        if not RLInsightLogger.enabled():
            return
        for name, began, seconds in sorted(stages, key=lambda stage: (stage[1], -stage[2])):
            if seconds > 0:
                self._send(name, "trainer/lane", began, began + seconds, step, {})

    def _send(self, name: str, lanes: str, began: float, ended: float, step: int, about: Mapping[str, Any]) -> None:
        taken = self._taken.setdefault(lanes, [])
        lane = next((k for k, until in enumerate(taken) if until <= began), len(taken))
        taken[lane : lane + 1] = [ended]
        RLInsightLogger.trace_span(
            name,
            start_time_ns=int(began * 1e9),
            end_time_ns=int(ended * 1e9),
            attributes={
                **about,
                "global_steps": step,
                "state_name": name,
                "state_lane_id": f"{lanes}_{lane}",
                "monitor.trace_segment": "state_interval",  # what RL-Insight's panels of lanes ask for
            },
        )
