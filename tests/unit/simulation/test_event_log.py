"""A simulated run is reported as a real one: what the log tells is what the simulation counted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from verl_rhyme.cli import app
from verl_rhyme.observability import metrics, slot_time, steps
from verl_rhyme.observability.batches import SlotAccount
from verl_rhyme.observability.events import read_log
from verl_rhyme.observability.page import lanes
from verl_rhyme.observability.slot_time import BUSY
from verl_rhyme.observability.summary import read
from verl_rhyme.scheduling.attempts import Start
from verl_rhyme.simulation import cluster_file, event_log
from verl_rhyme.simulation.run import Simulation

EXAMPLE = Path(__file__).parents[3] / "examples" / "simulate" / "dapo32b.yaml"
SMALL = ["workload.prompts=32", "workload.samples=4", "batch_prompts=8", "drafts.acceptance=[1.0,2.0]"]
SMALL += ["replicas=[{count: 4, profile: qwen2.5-32b-h800-tp4, slots: 12}]", "training.reward=0"]


def simulate(out: Path, *overrides: str) -> list[dict]:
    told = CliRunner().invoke(app, ["simulate", str(EXAMPLE), *SMALL, *overrides, "--json", "--out", str(out)])
    assert told.exit_code == 0, told.output
    return [json.loads(line) for line in told.stdout.splitlines()]


@pytest.mark.parametrize(
    ("overrides", "fillable"),  # of 48 slots, with batches of 32 samples: as a run counts them (metrics.fillable_slots)
    [((), 32), (("preset=sorted", "max_staleness=2"), 48), (("preset=sorted",), 48)],
)
def test_engines_that_stop(tmp_path, overrides, fillable) -> None:
    *steps, whole = simulate(tmp_path / "a run", *overrides)
    run = read(tmp_path / "a run")
    assert (run.name, run.problems, len(run.steps)) == ("a run", [], 8)
    assert run.slot_time is not None
    assert (run.slot_time.slots, len(run.slot_time.replicas)) == (fillable, 4)
    # Rewards that wait would make the difference between the last end and the harvest.
    bubbles = {window.step: window.bubble(fillable) for window in run.slot_time.windows}
    for step in steps:
        if step["rollout"] > 0:
            assert bubbles[step["version"] + 1] == pytest.approx(step["bubble"], abs=1e-6)
    assert run.slot_time.bubble == pytest.approx(whole["bubble_ratio"], abs=1e-6)
    assert [row["tokens"] for row in run.epochs] == [sum(s["tokens"] for s in steps[k : k + 4]) for k in (0, 4)]
    if not overrides:
        assert [row["accept_length"] for row in run.epochs] == pytest.approx([1.0, 2.0], rel=0.02)
        assert run.requests["trained"].sum() == 2 * 32 * 4
        assert len(run.lengths()[0]) == 2 * 32 * 4
        warm = run.requests["epoch"] == 1
        assert np.corrcoef(run.predicted[warm], run.requests["response_tokens"][warm])[0, 1] > 0.3


def test_engines_that_run_on(tmp_path) -> None:
    simulate(tmp_path / "run", "preset=sorted", "max_staleness=1", "topology=separate")
    run = read(tmp_path / "run")
    assert run.runs_on
    assert run.slot_time is not None
    assert run.slot_time.shares.sum() == pytest.approx(1.0)
    assert run.slot_time.shares[BUSY] > 0.1
    logged = steps.from_log(read_log(tmp_path / "run" / "events"), run.slot_time.slots, "step")
    windows = {window.step: window.bubble(run.slot_time.slots) for window in run.slot_time.windows}
    assert {step: logged[step][metrics.BUBBLE_RATIO] for step in windows} == pytest.approx(windows)


@pytest.mark.parametrize(
    "overrides",
    [
        ("preset=sorted",),
        ("preset=full", "max_staleness=0"),
        ("preset=full", "max_staleness=2", "topology=separate"),
        ("preset=histopipe", "topology=separate"),
        ("preset=stream", "max_staleness=4", "scheduling.at_version=finish", "topology=separate"),
    ],
)
def test_a_response_is_filed_under_the_step_that_trains_it(tmp_path, overrides) -> None:
    """Also where it ended while an earlier batch was awaited; what was never trained is not called so."""
    *rows, _ = simulate(tmp_path / "run", *overrides, "training.token=1e-4")
    requests = read(tmp_path / "run").requests
    for row in rows:
        mine = requests["trained"] & (requests["step"] == row["version"] + 1)
        assert mine.sum() == row["samples"]
        assert requests["response_tokens"][mine].sum() == row["tokens"]
        assert (requests["finished_at"][mine] <= row["harvested"] + 1e-6).all()


@pytest.mark.parametrize("staleness", [0, 1])
def test_training_in_parts_is_seen(tmp_path, staleness) -> None:
    """Its stages lie within the rollout, and the page has a lane for them."""
    overrides = ["preset=stream", f"max_staleness={staleness}", "topology=separate", "training.token=1e-4"]
    *rows, whole = simulate(tmp_path / "run", *overrides)
    run = read(tmp_path / "run")
    assert run.slot_time is not None
    assert run.problems == []
    assert run.runs_on == (staleness > 0)
    assert whole["early"] > 0.3
    assert sum(whole[f"trainer_{name}"] for name in ("waiting", "parts", "training", "weights")) == pytest.approx(1.0)
    stages = run.stages
    for row in rows:
        mine = (stages["step"] == row["version"] + 1) & (stages["started_at"] < row["harvested"])
        trained = mine & np.isin(stages["stage"], ("old_log_prob", "update_actor"))
        assert stages["duration_s"][trained].sum() == pytest.approx(row["in_parts"])
        assert trained.sum() == 2 * row["parts"]
    bubbles = {window.step: window.bubble(run.slot_time.slots) for window in run.slot_time.windows}
    assert {row["version"] + 1: row["bubble"] for row in rows} == pytest.approx(bubbles, abs=1e-6)
    logged = steps.from_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [step[metrics.STREAM_EARLY] for step in logged.values()] == [row["early"] for row in rows]
    seconds = 0.0, run.slot_time.ended
    page = lanes.overview(run.slot_time, *seconds, "lanes")
    assert ">trainer</text>" in page
    simulate(tmp_path / "plain", *overrides[2:], "streaming.part=null")
    plain = read(tmp_path / "plain").slot_time
    assert ">trainer</text>" not in lanes.overview(plain, *seconds, "lanes")


@pytest.mark.parametrize("limit", [48, 77])
def test_what_a_run_says_of_its_bubble_is_what_its_log_tells(limit: int) -> None:
    """Engines that run on: replayed as the coordinator learns of it, from hand-outs, reports and harvests alone."""
    overrides = [*SMALL, "preset=sorted", "max_staleness=1", "topology=separate"]
    loaded = cluster_file.load(EXAMPLE, [*overrides, f"limit={limit}"])
    segments: list = []
    at_once = replace(loaded.scenario, rules=replace(loaded.scenario.rules, relayed=False))
    simulation = Simulation(at_once, loaded.prompts, loaded.updates, segments)
    heard: list[tuple[float, str, Any]] = []
    fill = simulation.dispatch.fill

    def told(*args: Any) -> list[Start]:
        starts = fill(*args)
        heard.append((simulation.cluster.now, "handed", [start.name for start in starts]))
        return starts

    simulation.dispatch.fill = told  # type: ignore[method-assign]
    steps = simulation.run()
    ran, timed = event_log.columns(simulation, segments, loaded.epoch_prompts)
    measured = slot_time.measure(ran, timed, loaded.scenario.slots, runs_on=True)
    assert measured is not None
    stretches: dict[str, list[dict[str, float]]] = {}
    for _, segment in segments:
        record = {"started_at": segment.began, "finished_at": segment.ended}
        stretches.setdefault(str(segment.request.name), []).append(record)
    heard += [(records[-1]["finished_at"], "ran", name) for name, records in stretches.items()]
    for step in steps:
        synced = step.ended - loaded.scenario.training.sync
        heard += [(step.harvested, "take", step.version + 1), (synced, "hold", None), (step.ended, "go", None)]

    account, running, said = SlotAccount(loaded.scenario.slots), set(), {}
    for now, what, which in sorted(heard, key=lambda event: (event[0], event[1] == "take")):
        if what == "handed":
            running.update(which)
            account.handed(which, now)
        elif what == "ran":
            running.discard(which)
            account.ran(stretches[which])
        elif what == "take":
            said[which] = account.take(now, running)
        else:
            getattr(account, what)(now)
    windows = {window.step: window.bubble(loaded.scenario.slots) for window in measured.windows}
    assert list(said) == list(windows)
    assert max(windows.values()) > 0.1
    assert [said[step] for step in windows] == pytest.approx(list(windows.values()), abs=0.01)


def test_a_folder_with_a_run_is_left_alone(tmp_path) -> None:
    simulate(tmp_path)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    told = CliRunner().invoke(app, ["simulate", str(EXAMPLE), *SMALL, "--out", str(tmp_path)])
    assert told.exit_code == 1
    assert told.stderr == f"verl-rhyme simulate: cannot write --out {tmp_path} (it holds a run): name another\n"
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("option", ["--timeline", "--out"])
def test_a_path_that_cannot_be_written_is_told_before_anything_runs(tmp_path, monkeypatch, option) -> None:
    monkeypatch.setattr(Simulation, "run", lambda *_: pytest.fail("it ran"))
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "x"
    told = CliRunner().invoke(app, ["simulate", str(EXAMPLE), *SMALL, option, str(path)])
    assert told.exit_code == 1
    assert f"cannot write {option} {path} (" in told.stderr
    assert told.stderr.endswith("): name another\n")
