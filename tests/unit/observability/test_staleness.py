"""Staleness by group and by token: of a collected batch, of the event log and of the summary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from verl_rhyme.observability import metrics as m
from verl_rhyme.observability import steps
from verl_rhyme.observability.batches import batch_metrics
from verl_rhyme.observability.events import EventLog, read_log
from verl_rhyme.observability.page import document
from verl_rhyme.observability.summary import read
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


def test_on_policy_staleness_is_logged_as_zero() -> None:
    rollout = Rollout(Rules(batch_prompts=1, batch_samples=2, max_staleness=0))
    rollout.publish(7, None)
    rollout.add_prompts([("a", 2)])
    for start in rollout.fill():
        rollout.ended(AttemptReport(start.attempt, "generated", 5, 7, [record(start.attempt.name, 5, 7)]))
        rollout.ended(AttemptReport(start.attempt, "finished"))
    assert staleness(batch_metrics(rollout.take(), slots=2)) == {
        **{"mean": 0.0, "max": 0.0, "groups": 1.0},
        **{"tokens/mean": 0.0, "tokens/max": 0.0},
    }


def test_the_event_log_gives_the_same_staleness(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events")
    columns = {
        "uid": ["a", "a", "a", "b", "b", "c"],
        "response_tokens": [30, 10, 10, 10, 10, 99],
        "policy_version_end": [0, 1, 1, 1, 1, 0],
        "trained": [True, True, True, True, True, False],
        "validate": False,
    }
    log.append_requests(2, 0, columns)
    assert staleness(steps.from_log(read_log(tmp_path / "events"))[2]) == pytest.approx(crossing("group"))


def write(folder: Path, *rows: dict[str, float]) -> Path:
    lines = ({"step": step, "data": {m.EPOCH: (step - 1) // 2, **data}} for step, data in enumerate(rows, 1))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_summary_weights_steps_by_groups(tmp_path: Path) -> None:
    sizes = ((0.0, 0, 8), (1.0, 1, 8), (2.0, 3, 24), (0.0, 0, 8))
    rows = [{m.STALENESS_MEAN: mean, m.STALENESS_MAX: most, m.STALENESS_GROUPS: many} for mean, most, many in sizes]
    summary = read(write(tmp_path, *rows)).summary
    assert (summary["staleness_mean"], summary["staleness_max"]) == ((8 + 48) / 48, 3)
    assert [(row["staleness_mean"], row["staleness_max"]) for row in summary["epochs"]] == [(0.5, 1), (1.5, 3)]


def test_without_the_pipeline_staleness_is_that_of_trajectories(tmp_path: Path) -> None:
    summary = read(write(tmp_path, *[{m.VERL_STALENESS_MEAN: 1.5, m.VERL_STALENESS_MAX: 4.0}] * 2, {})).summary
    assert (summary["staleness_mean"], summary["staleness_max"]) == (1.5, 4)
    assert summary["epochs"][1]["staleness_max"] is None, "not logged"


def test_the_page_shows_staleness_in_its_table_and_a_curve(tmp_path: Path) -> None:
    pages = []
    for stale in (0, 1):
        folder = tmp_path / str(stale)
        folder.mkdir()
        rows = [{m.STALENESS_MEAN: 0.75 * stale, m.STALENESS_MAX: 2.0 * stale, m.STALENESS_GROUPS: 8.0}] * 4
        pages.append(document.page([read(write(folder, *rows))], 2))
    assert all("<th>staleness, mean</th><th>staleness, max</th>" in page for page in pages)
    assert pages[1].count("<td>0.75</td><td>2</td>") == 2, "both epochs"
    assert ['id="staleness"' in page for page in pages] == [False, True], "on-policy runs have no curve"
