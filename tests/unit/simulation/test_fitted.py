"""``verl-rhyme profile``: costs fitted to the event log of a simulated run equal those of the simulation."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from verl_rhyme.cli import app
from verl_rhyme.observability.events import EventLog
from verl_rhyme.planning.cost import ReplicaCost, StepCost, TrainingCost
from verl_rhyme.planning.profile import profile
from verl_rhyme.scheduling.attempts import Attempt
from verl_rhyme.scheduling.rules import Rules
from verl_rhyme.simulation import fitted, recorded
from verl_rhyme.simulation.engine import Segment
from verl_rhyme.simulation.run import Simulation
from verl_rhyme.simulation.scenario import Drafts, Scenario, Step
from verl_rhyme.simulation.workload import Lengths, Prompt

COST = ReplicaCost(StepCost(base=0.02, row=5e-4, draft=1e-4), slots=8)
TRAINING = TrainingCost(update=3.0, sync=0.5, reward=0.2, start=0.1)
DRAFTS = Drafts((1.0, 2.0), overhead=3.0)
SIZES = {"batch_prompts": 8, "batch_samples": 32}
START = 1.8e9
TRACES = Path(__file__).parents[3] / "benchmarks" / "traces" / "simulator"


def simulated(rules: Rules, prompts: list[Prompt]) -> tuple[list[Step], list[tuple[str, Segment]]]:
    segments: list[tuple[str, Segment]] = []
    scenario = Scenario((COST,) * 2, rules, TRAINING, drafts=DRAFTS, response_limit=400)
    return Simulation(scenario, prompts, None, segments).run(), segments


def write(folder: Path, steps: list[Step], segments: list[tuple[str, Segment]], prompts: list[Prompt]) -> None:
    """Write the event log of a run without aborted requests, as the trainer does."""
    log = EventLog(folder)
    for step in steps:
        rows: dict[str, list[Any]] = {}
        for replica, segment in segments:
            if not step.began <= segment.began < step.ended:
                continue
            request, attempt = segment.request, Attempt.named(str(segment.request.name))
            made = round(segment.emitted)
            taken = math.ceil(made / request.pace)
            row = {"uid": attempt.uid, "sample": attempt.number, "replica": int(replica[-1])}
            row |= {"prompt_key": prompts[int(attempt.uid)].key.rjust(32, "0"), "prompt_tokens": request.prompt_tokens}
            row |= {"queued_at": START + step.began + int(attempt.uid) / 1e3, "started_at": START + segment.began}
            row |= {"first_token_at": START + segment.began + 1e-3, "finished_at": START + segment.ended}
            row |= {"response_tokens": made, "accepted_tokens": made - taken}
            row |= {"drafted_tokens": round(taken * request.drafts), "verify_steps": (taken - 1) * (request.pace > 1)}
            row |= {"policy_version_start": step.version, "stop_reason": "completed", "trained": True}
            for name, value in {**row, "validate": False}.items():
                rows.setdefault(name, []).append(value)
        epoch = int(prompts[int(rows["uid"][0])].epoch)
        log.append_requests(step.version + 1, epoch, rows)
        stages = {"gen": (step.began, step.rollout), "step": (step.began, step.seconds)}
        stages["update_weights"] = (step.ended - TRAINING.sync, TRAINING.sync)
        columns = {"stage": list(stages), "started_at": [START + began for began, _ in stages.values()]}
        log.append_stages(step.version + 1, epoch, {**columns, "duration_s": [s for _, s in stages.values()]})
    replica = {"slots": 8, "room": 4096, "gpus": 2}
    log.describe(1, run="histospec", engine="virtual", slots=16, rollout="gen", replica=replica)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The run folder, the prompts and the steps of a simulated run."""
    prompts = list(Lengths({50: 100, 90: 250, 99: 380}, limit=400).epochs(32, 4, 2, 20))
    steps, segments = simulated(Rules(**SIZES, max_staleness=0), prompts)
    run = tmp_path_factory.mktemp("runs") / "a_run"
    write(run / "checkpoints" / "events", steps, segments, prompts)
    return run, prompts, steps


@pytest.fixture
def run(made, tmp_path):
    """A copy of the run folder."""
    return Path(shutil.copytree(made[0], tmp_path / "run"))


def invoke(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout, result.stderr


def test_fitted_costs_equal_those_of_the_simulation(made):
    found = fitted.fit(recorded.read(made[0]), "a run")
    for rows, drafts in ((1, 0.0), (8, 0.0), (8, 24.0)):
        assert found.cost.step.seconds(rows, 0, drafts) == pytest.approx(COST.step.seconds(rows, 0, drafts), rel=0.05)
    for name, value in ((name, value) for name, value in vars(TRAINING).items() if value is not None):
        assert getattr(found.training, name) == pytest.approx(value, rel=0.05, abs=0.01), name
    assert found.drafts.acceptance == (1.0, pytest.approx(2.0, rel=0.05))
    assert (found.cost.slots, found.cost.room, found.cost.gpus) == (8, 4096, 2)
    assert found.steps.error < 0.03


def test_a_missing_number_of_slots_is_noted(run):
    (run / "checkpoints" / "events" / "run.json").unlink()
    found = fitted.fit(recorded.read(run), "a run")
    assert found.cost.slots == 256
    assert "does not have max_num_seqs: the profile has 256 slots" in found.notes[0]


def test_without_stages_the_replicas_are_still_fitted(run):
    for path in (run / "checkpoints" / "events").glob("stages-*"):
        path.unlink()
    status, _, error = invoke("profile", run)
    assert status == 0
    assert "the costs of the trainer are unknown" in error
    assert profile("profile.yaml", run / "cluster.yaml")[0].step.base == pytest.approx(COST.step.base, rel=0.05)


def test_training_in_parts_is_noted_and_not_fitted(made):
    run = recorded.read(made[0])
    early = {"step": 3, "stage": "old_log_prob", "started_at": START, "duration_s": 0.1}
    stages = {name: np.append(values, early.get(name, 0)) for name, values in run.stages.items()}
    found = fitted.fit(replace(run, stages=stages), "a run")
    assert found.training == TrainingCost()
    assert "batches were trained in parts: profile a run with rhyme.streaming.part=null" in found.notes[-1]


def test_the_trainers_seconds_grow_with_tokens_where_they_do(made):
    """The trainer takes 0.5 s and 1 ms per token, of which a quarter is for log-probabilities."""
    run = recorded.read(made[0])
    columns, rows = run.requests, []
    for step in range(1, 9):
        of = columns["step"] == step
        trained = float((columns["prompt_tokens"] + columns["response_tokens"])[of].sum()) * 1e-3 + 0.5
        began = float(columns["finished_at"][of].max())
        rows += [(step, "gen", began - 9, 9.0), (step, "step", began - 9, 9.2 + trained)]
        rows += [(step, "old_log_prob", began, trained / 4), (step, "update_actor", began, trained * 3 / 4)]
        rows += [(step, "update_weights", began + trained, 0.2)]
    names = ("step", "stage", "started_at", "duration_s")
    stages = {name: np.array(values) for name, values in zip(names, zip(*rows, strict=True), strict=True)}
    cost = fitted.fit(replace(run, stages=stages), "a run").training
    assert (cost.token, cost.update) == (pytest.approx(1e-3, rel=0.01), pytest.approx(0.5, rel=0.05))
    assert (cost.logprobs, cost.sync) == (pytest.approx(0.25), pytest.approx(0.2))


def test_simulate_reads_the_profile(run):
    status, output, error = invoke("profile", run)
    assert status == 0
    assert str(run / "profile.yaml") in error
    assert output == (run / "profile.yaml").read_text()
    assert "acceptance:" in output
    cost, source, *_ = profile("profile.yaml", run / "cluster.yaml")
    assert (cost.slots, cost.room, cost.gpus) == (8, 4096, 2)
    assert source.startswith("measured: run, virtual, 2027-01-15; error of the seconds of ")


@pytest.mark.parametrize("name", ["fit", "no_drafts", "sync", "partial_sticky_group"])
def test_requests_of_real_runs_are_fitted_within_2_per_cent(name):
    """Runs of the tiny world, with steps of at least 75 ms."""
    found = fitted.fit(recorded.read(TRACES / name), name)
    assert found.steps.error < 0.02
    assert found.steps.worst < 0.07
    assert found.cost.step.seconds(1) == pytest.approx(0.075, rel=0.05)


def test_recorded_lengths_are_the_runs(made):
    folder, prompts, _ = made
    lengths, tokens = recorded.lengths(recorded.read(folder))
    assert sorted(lengths) == sorted(length for prompt in prompts for length in prompt.lengths)
    assert tokens == 20


def test_the_requests_of_a_resumed_sample_are_one_response(tmp_path):
    """Partial rollout."""
    log = EventLog(tmp_path)
    log.append_requests(
        2,
        0,
        {
            **{"uid": "u", "prompt_key": ["0" * 32] * 2, "replica": 0, "sample": 0, "validate": False, "trained": True},
            **{"prompt_tokens": [20, 60], "response_tokens": [40, 60], "accepted_tokens": [20, 0]},
            **{"verify_steps": [19, 0], "stop_reason": ["aborted", "completed"], "policy_version_start": [0, 1]},
            **{"queued_at": START, "started_at": [START, START + 2], "finished_at": [START + 1, START + 9]},
        },
    )
    run = recorded.read(tmp_path)
    lengths, tokens = recorded.lengths(run)
    assert (lengths.tolist(), tokens) == ([100], 20)
    assert recorded.requests(run).own.tolist() == [0, 40]


@pytest.mark.parametrize(("bound", "refill"), [(0, "always"), (0, "when_empty"), (1, "when_empty")])
def test_a_delayed_start_is_no_bubble(bound, refill):
    """Time before the first requests reach the engines is not idle, and makes the step longer."""
    prompts = list(Lengths({50: 100, 90: 250}, limit=400).epochs(32, 4, 1, 20))
    rules = Rules(**SIZES, max_staleness=bound, in_flight=1 + (refill == "when_empty"), refill=refill)
    steps = {}
    for start in (0.0, 2.0):
        training = TrainingCost(update=1.0, start=start)
        steps[start] = Simulation(Scenario((COST,) * 2, rules, training, response_limit=400), prompts).run()
    for late, soon in zip(steps[2.0], steps[0.0], strict=True):
        assert late.seconds == pytest.approx(soon.seconds + 2.0)
        assert late.bubble == pytest.approx(soon.bubble)


def test_a_profile_is_written_to_out_and_an_error_is_one_line(run, tmp_path):
    (tmp_path / "file").touch()
    status, _, error = invoke("profile", run, "--out", tmp_path / "file" / "x.yaml")
    assert status == 1
    assert len(error.splitlines()) == 1
    assert invoke("profile", run, "--out", tmp_path / "made" / "x.yaml")[0] == 0


def test_acceptance_goes_by_a_prompts_visits_and_not_by_epochs(tmp_path):
    """The data repeat a prompt within a single epoch."""
    log = EventLog(tmp_path)
    for step, verify_steps in enumerate([0, 19, 9, 9]):
        columns = {"uid": f"u{step}", "prompt_key": ["0" * 32], "replica": 0, "sample": [0], "validate": False}
        columns |= {"prompt_tokens": 20, "response_tokens": 40, "drafted_tokens": 40, "verify_steps": verify_steps}
        columns |= {"accepted_tokens": [0, 20, 30, 30][step], "queued_at": START + step, "trained": True}
        log.append_requests(step + 1, 0, columns)
    found = recorded.acceptance(recorded.read(tmp_path))
    assert found.acceptance == (1.0, 2.0, 4.0, 4.0)
    assert found.overhead == 2.0
