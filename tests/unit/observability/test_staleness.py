"""Staleness of a collected batch, by group and by token."""

from __future__ import annotations

from typing import Any

import pytest

from verl_rhyme.observability.batches import batch_metrics
from verl_rhyme.scheduling.attempts import AttemptReport
from verl_rhyme.scheduling.rollout import Rollout
from verl_rhyme.scheduling.rules import Rules, Unit


def record(name: str, tokens: int, version: int) -> dict[str, Any]:
    times = {"started_at": 0.0, "finished_at": 1.0}
    return {"id": f"{name}/{version}", "response_tokens": tokens, "policy_version_end": version, **times}


def staleness(data: dict[str, float]) -> dict[str, float]:
    return {name.removeprefix("training/staleness/"): v for name, v in data.items() if "staleness" in name}


def crossing(unit: Unit) -> dict[str, float]:
    """Return metrics of two groups. One sample of the first group spans two versions (30 tokens before, 10 after); the
    three other samples have 10 tokens of the policy that is trained."""
    rules = Rules(batch_prompts=2, batch_samples=4, max_staleness=1, unit=unit, separate=True)
    rollout = Rollout(rules)
    rollout.publish(0, None)
    rollout.add_prompts([("a", 2), ("b", 2)])
    (first,) = rollout.fill(1)
    rollout.ended(AttemptReport(first.attempt, "interrupted", 30, 0, [record(first.attempt.name, 30, 0)]))
    rollout.publish(1, None)
    for start in rollout.fill():
        crossed = start.predecessor is not None
        records = [*([record(first.attempt.name, 30, 0)] if crossed else []), record(start.attempt.name, 10, 1)]
        rollout.ended(AttemptReport(start.attempt, "generated", 40 if crossed else 10, 0 if crossed else 1, records))
        rollout.ended(AttemptReport(start.attempt, "finished"))
    return staleness(batch_metrics(rollout.take(), slots=4))


def test_a_group_is_as_stale_as_its_oldest_token() -> None:
    tokens = {"tokens/mean": 30 / 70, "tokens/max": 1.0}
    assert crossing("group") == pytest.approx({"mean": 0.5, "max": 1.0, "groups": 2.0, **tokens})
    assert crossing("trajectory") == pytest.approx({"mean": 0.25, "max": 1.0, "groups": 4.0, **tokens})
