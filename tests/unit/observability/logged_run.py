"""Run folders for the report: stock runs with verl's metrics, and runs with an event log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from verl_rhyme.drafting.policy import SOURCES
from verl_rhyme.observability import metrics as m
from verl_rhyme.observability.events import EventLog


def stock(step: int, epoch: int, **changes: Any) -> dict[str, Any]:
    """Return a line of verl's metrics file with what the report reads."""
    data = {
        m.EPOCH: epoch,
        m.REWARD_MEAN: 0.1 * step,
        m.GEN_S: 4.0,
        m.GEN_MS_PER_TOKEN: 4000.0 / 800,
        m.VERL_STALENESS_MEAN: 0.0,
        m.VERL_STALENESS_MAX: 0,
        "actor/grad_norm": None,
    }
    return {"step": step, "data": {**data, **changes}}


def write_metrics(folder: Path, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def write_run(folder: Path, name: str, steps: int = 8, slower: float = 1.0) -> Path:
    """Write a run of two steps an epoch, on two replicas that stop while the actor trains. Drafts begin with the second
    epoch, and halve the rollout of four seconds."""
    log = EventLog(folder / "checkpoints" / "events")
    log.describe(name, slots=4, engine="vllm test", rollout="gen")
    for step in range(1, steps + 1):
        warm, epoch, at = step > 2, (step - 1) // 2, 1.7e9 + 20 * slower * step
        rollout, tokens = slower * (2.0 if warm else 4.0), np.array([100, 200, 200, 300])
        columns = {
            "uid": np.array([f"{step}{prompt}" for prompt in "abcd"]),
            "sample": np.zeros(4, dtype=int),
            "stop_reason": np.array(["completed"] * 4),
            "replica": np.array([0, 0, 1, 1]),
            "queued_at": np.full(4, at),
            "started_at": np.full(4, at),
            "finished_at": at + rollout * np.array([1.0, 2.0, 2.0, 3.0]) / 3,
            "response_tokens": tokens,
            "drafted_tokens": np.full(4, 100 * warm),
            "accepted_tokens": np.full(4, 60 * warm),
            "verify_steps": np.full(4, 40 * warm),
            "reverified_tokens": np.zeros(4, dtype=int),
            "by_source": np.tile(np.array([[100 * warm, 60 * warm], *[[0, 0]] * (len(SOURCES) - 1)]), (4, 1, 1)),
            "draft_errors": np.zeros(4, dtype=int),
            "draft_seconds": np.zeros(4),
            "engine_steps": np.full(4, 100),
            "waiting_steps": np.full(4, 25 * warm),
            "history_hit": np.full(4, warm),
            "trained": np.full(4, True),
        }
        log.append_requests(step, epoch, {**columns, "validate": False})
        lasts = {"gen": rollout, "update_actor": 3.0, "update_weights": 1.0, "step": rollout + 4}
        begins = [at, at + rollout, at + rollout + 3, at]
        log.append_stages(step, epoch, {"stage": [*lasts], "started_at": begins, "duration_s": [*lasts.values()]})
        data = {
            m.EPOCH: epoch,
            m.REWARD_MEAN: 0.1 * step,
            **{m.TIMING + stage: seconds for stage, seconds in lasts.items()},
            m.GEN_MS_PER_TOKEN: 1000.0 * rollout / tokens.sum(),
            m.RESPONSE_LENGTH_MEAN: tokens.mean(),
            m.LENGTH_CORRELATION: 0.6,
            m.STALENESS_MEAN: 0.0,
            m.STALENESS_MAX: 0,
            m.ROLLOUT_S: rollout,
            "actor/grad_norm": None,
            "x": "text",
        }
        log.append_metrics(step, epoch, {**data, **m.step_metrics(columns, 4, rollout)})
    return folder
