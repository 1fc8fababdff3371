"""A run's event log, made in virtual time: ``verl-rhyme profile`` finds what made it, ``simulate`` plays it again."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from verl_rhyme.cli import app
from verl_rhyme.observability.events import EventLog
from verl_rhyme.planning.cost import ReplicaCost, StepCost, TrainingCost
from verl_rhyme.planning.profile import profile
from verl_rhyme.scheduling.attempts import Attempt
from verl_rhyme.scheduling.rules import Rules
from verl_rhyme.simulation import event_log, fitted, recorded
from verl_rhyme.simulation.cluster_file import load
from verl_rhyme.simulation.engine import Segment
from verl_rhyme.simulation.run import Simulation
from verl_rhyme.simulation.scenario import Drafts, Scenario, Step, Streaming
from verl_rhyme.simulation.workload import Lengths, Prompt

COST = ReplicaCost(StepCost(base=0.02, row=5e-4, draft=1e-4), slots=8)
TRAINING = TrainingCost(update=3.0, sync=0.5, reward=0.2, start=0.1)
DRAFTS = Drafts((1.0, 2.0), overhead=3.0)
SIZES = {"batch_prompts": 8, "batch_samples": 32}
START = 1.8e9


def simulated(rules: Rules, prompts: list[Prompt]) -> tuple[list[Step], list[tuple[str, Segment]]]:
    segments: list[tuple[str, Segment]] = []
    scenario = Scenario((COST,) * 2, rules, TRAINING, drafts=DRAFTS, response_limit=400)
    return Simulation(scenario, prompts, None, segments).run(), segments


def write(folder: Path, steps: list[Step], segments: list[tuple[str, Segment]], prompts: list[Prompt]) -> None:
    """As the trainer does, of a run in which nothing is cut short."""
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
    log.describe(1, arm="histospec", engine="virtual", slots=16, rollout="gen", replica=replica)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Run folder, prompts and steps."""
    prompts = list(Lengths({50: 100, 90: 250, 99: 380}, limit=400).epochs(32, 4, 2, 20))
    steps, segments = simulated(Rules(**SIZES, max_staleness=0), prompts)
    run = tmp_path_factory.mktemp("runs") / "a_run"
    write(run / "checkpoints" / "events", steps, segments, prompts)
    return run, prompts, steps


@pytest.fixture
def run(made, tmp_path):
    """A copy of one's own."""
    return Path(shutil.copytree(made[0], tmp_path / "run"))


def told(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout, result.stderr


def test_what_made_the_run_comes_back(made):
    found = fitted.fit(recorded.read(made[0]))
    for rows, drafts in ((1, 0.0), (8, 0.0), (8, 24.0)):
        assert found.cost.step.seconds(rows, 0, drafts) == pytest.approx(COST.step.seconds(rows, 0, drafts), rel=0.05)
    for name, value in ((name, value) for name, value in vars(TRAINING).items() if value is not None):
        assert getattr(found.training, name) == pytest.approx(value, rel=0.05, abs=0.01), name
    assert found.drafts.acceptance == (1.0, pytest.approx(2.0, rel=0.05))
    assert (found.cost.slots, found.cost.room, found.cost.gpus) == (8, 4096, 2)
    assert found.steps.error < 0.03


def test_slots_that_the_log_does_not_tell_are_seen(run):
    (run / "checkpoints" / "events" / "run.json").unlink()
    found = fitted.fit(recorded.read(run))
    assert found.cost.slots == 8
    assert "does not tell max_num_seqs: 8 slots" in found.notes[0]


def test_without_stages_the_replicas_are_told_all_the_same(run):
    for path in (run / "checkpoints" / "events").glob("stages-*"):
        path.unlink()
    status, output, _ = told("profile", run)
    assert status == 0
    assert "nothing is known of the trainer" in output
    assert profile("profile.yaml", run / "cluster.yaml")[0].step.base == pytest.approx(COST.step.base, rel=0.05)


def test_the_profile_is_one_that_simulate_reads(run, made):
    status, output, _ = told("profile", run)
    assert status == 0
    assert "of a request in it" in output
    assert "tokens a decoding step by visits of a prompt: 1.00, 1.99" in output
    cost, source, *_ = profile("profile.yaml", run / "cluster.yaml")
    assert (cost.slots, cost.room, cost.gpus) == (8, 4096, 2)
    assert source.startswith("measured: run, virtual, 2027-01-15")
    cluster = run / "cluster.yaml"
    cluster.write_text(output.partition("plays this run again:\n")[2])
    loaded = load(cluster)
    again = Simulation(loaded.scenario, loaded.prompts, loaded.updates).run()
    _, _, steps = made
    assert [step.tokens for step in again] == [step.tokens for step in steps]
    for ours, theirs in zip(again, steps, strict=True):
        assert ours.seconds == pytest.approx(theirs.seconds, rel=0.05)
        assert ours.bubble == pytest.approx(theirs.bubble, abs=0.03)
    plain = load(cluster, ["drafts.acceptance=[1]"])
    slower = Simulation(plain.scenario, plain.prompts, plain.updates).run()
    assert slower[-1].rollout > 1.5 * again[-1].rollout


@pytest.mark.parametrize(("staleness", "update"), [(0, True), (0, False), (1, True)])
def test_a_streamed_run_is_streamed_again(tmp_path, staleness, update):
    """Its parts' costs come back, and what it would have been without parts is another."""
    prompts = list(Lengths({50: 100, 90: 250, 99: 380}, limit=400).epochs(48, 4, 1, 20))
    rules = Rules(**SIZES, max_staleness=staleness, take="loaded", separate=True, relayed=True, drafts=False)
    training = TrainingCost(token=1e-3, logprobs=0.4, update=1.0, part=0.2, sync=0.3)
    plan = (COST,) * 2, rules, training, Streaming(4, update), False
    segments: list[tuple[str, Segment]] = []
    simulation = Simulation(Scenario(*plan, response_limit=400), prompts, None, segments)
    steps = simulation.run()
    event_log.write(tmp_path / "run", "virtual", simulation, segments, 48)
    EventLog(tmp_path / "run" / "events").describe(
        9, arm="stream" if staleness else "stream-k0", slots=16, rollout="step" if staleness else "gen"
    )
    status, output, _ = told("profile", tmp_path / "run")
    assert status == 0
    found = fitted.fit(recorded.read(tmp_path / "run"))
    assert found.gradients is update
    assert found.training_error < 0.03
    for name in ("token", "logprobs", "part", "update", "sync") if update else ("sync",):
        assert getattr(found.training, name) == pytest.approx(getattr(training, name), rel=0.1, abs=0.02), name
    cluster, as_it_was = tmp_path / "run" / "cluster.yaml", ["placement.policy=null"]
    cluster.write_text(output.partition("plays this run again:\n")[2])
    loaded = load(cluster, ["batch_prompts=8", *as_it_was])
    assert loaded.scenario.rules == simulation.scenario.rules
    assert loaded.scenario.streaming == Streaming(4, update)
    again = Simulation(loaded.scenario, loaded.prompts, loaded.updates).run()
    # A response that was cut short is read in pieces, each rounded.
    assert sum(s.tokens for s in again) == pytest.approx(sum(s.tokens for s in steps), rel=1e-3 * staleness)
    assert again[-1].ended == pytest.approx(steps[-1].ended, rel=0.05)
    if staleness:
        return
    whole = load(cluster, ["streaming.part=null", *as_it_was])
    assert Simulation(whole.scenario, whole.prompts, whole.updates).run()[-1].ended > 1.05 * steps[-1].ended


@pytest.mark.parametrize(
    ("arm", "bound", "take"),
    [
        ("sorted-k1-no_drafting", 1, "finished"),
        ("histopipe", 1, "loaded"),
        ("full-k4", 4, "finished"),
        ("off", 7, "finished"),
    ],
)
def test_the_cluster_file_of_a_run_has_its_preset_and_bound(run, arm, bound, take):
    EventLog(run / "checkpoints" / "events").describe(
        9, arm=arm, engine="virtual", slots=16, rollout="step", replica={}
    )
    out = run / "elsewhere" / "mine.yaml"
    status, output, _ = told("profile", run, "--out", out)
    assert status == 0
    (out.parent / "cluster.yaml").write_text(output.partition("plays this run again:\n")[2])
    scenario = load(out.parent / "cluster.yaml").scenario
    assert (len(scenario.replicas), scenario.colocated, scenario.rules.batch_prompts) == (2, False, 8)
    assert (scenario.rules.max_staleness, scenario.rules.take, scenario.streaming) == (bound, take, None)


def test_a_recorded_workload_is_the_runs(made):
    folder, prompts, _ = made
    found = recorded.prompts(recorded.read(folder))
    assert [prompt.lengths.tolist() for prompt in found] == [prompt.lengths.tolist() for prompt in prompts]
    assert [(int(p.key), p.epoch, p.tokens) for p in found] == [(int(p.key), p.epoch, 20) for p in prompts]


def test_what_was_generated_anew_has_the_lengths_it_had_then(tmp_path):
    """A sample's first attempt was cut short after 30 tokens, its second came to 80; another's first was discarded."""
    log = EventLog(tmp_path)
    common = {"uid": "u", "prompt_key": "0" * 32, "replica": 0, "prompt_tokens": 20, "validate": False}
    times = {"queued_at": START, "started_at": START, "first_token_at": START}

    def add(step: int, **columns: list[Any]) -> None:
        log.append_requests(step, 0, {**common, **times, "finished_at": START + step, "accepted_tokens": 0, **columns})

    add(1, sample=[0, 1], response_tokens=[30, 50], stop_reason=["aborted", "completed"], trained=[False, False])
    anew = {"policy_version_start": [1, 1], "stop_reason": ["completed"] * 2, "trained": [True, True]}
    add(2, sample=[0, 1], response_tokens=[80, 20], **anew)
    [prompt] = recorded.prompts(recorded.read(tmp_path))
    assert prompt.lengths.tolist() == [80, 20]
    assert [prompt.response(0, version)[0] for version in (0, 1, 2)] == [80, 80, 80]
    assert [prompt.response(1, version)[0] for version in (0, 1, 2)] == [50, 20, 20]


def test_samples_that_go_on_keep_what_they_have(tmp_path):
    """Partial rollout: a sample's requests are one response, of which each part had its own pace."""
    log = EventLog(tmp_path)
    log.append_requests(
        2,
        0,
        {
            **{"uid": "u", "prompt_key": "0" * 32, "replica": 0, "sample": 0, "validate": False, "trained": True},
            **{"prompt_tokens": [20, 60], "response_tokens": [40, 60], "accepted_tokens": [20, 0]},
            **{"verify_steps": [19, 0], "stop_reason": ["aborted", "completed"], "policy_version_start": [0, 1]},
            **{"queued_at": START, "started_at": [START, START + 2], "finished_at": [START + 1, START + 9]},
        },
    )
    run = recorded.read(tmp_path)
    [prompt] = recorded.prompts(run)
    assert (prompt.tokens, prompt.lengths.tolist()) == (20, [100])
    assert prompt.response(0, 0) == (100, 2.0)
    assert prompt.response(0, 1) == (100, 1.0)
    assert recorded.requests(run).own.tolist() == [0, 40]


@pytest.mark.parametrize(("bound", "refill"), [(0, "always"), (0, "when_empty"), (1, "when_empty")])
def test_a_delayed_start_is_no_bubble(bound, refill):
    """Until the first requests are in the engines nothing is counted as idle, and the step is as much longer."""
    prompts = list(Lengths({50: 100, 90: 250}, limit=400).epochs(32, 4, 1, 20))
    rules = Rules(**SIZES, max_staleness=bound, in_flight=1 + (refill == "when_empty"), refill=refill)
    steps = {}
    for start in (0.0, 2.0):
        training = TrainingCost(update=1.0, start=start)
        steps[start] = Simulation(Scenario((COST,) * 2, rules, training, response_limit=400), prompts).run()
    for late, soon in zip(steps[2.0], steps[0.0], strict=True):
        assert late.seconds == pytest.approx(soon.seconds + 2.0)
        assert late.bubble == pytest.approx(soon.bubble)


def test_a_profile_that_cannot_be_written_is_told_before_it_is_fitted(run, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "x.yaml"
    with monkeypatch.context() as patched:
        patched.setattr(fitted, "fit", lambda _: pytest.fail("it was fitted"))
        status, _, error = told("profile", run, "--out", path)
    assert status == 1
    assert f"cannot write --out {path} (" in error
    assert told("profile", run, "--out", tmp_path / "made" / "x.yaml")[0] == 0


def replayed(folder: Path, run: Path, *overrides: str) -> tuple[dict[str, Any], str]:
    """The last object of ``simulate --json`` over a recorded run, and what it says beside."""
    cluster = folder / "cluster.yaml"
    cluster.write_text(
        "replicas: [{count: 2, profile: qwen2.5-32b-h800-tp4}]\nbatch_prompts: 8\n"
        f"workload: {{lengths: {{run: {run}}}}}\n"
    )
    status, output, error = told("simulate", cluster, "--json", *overrides)
    assert status == 0, error
    return json.loads(output.splitlines()[-1]), error


def test_what_of_a_recorded_run_is_not_played_is_told(run, tmp_path):
    whole, error = replayed(tmp_path, run)
    assert (whole["prompts"], whole["unread"]) == (64, [])
    assert "64 prompts, 8 updates of 8" in error
    paths = sorted((run / "checkpoints" / "events").glob("requests-*.arrow"))
    paths[-1].write_bytes(paths[-1].read_bytes()[:-100])  # torn
    table = pa.ipc.open_file(pa.py_buffer(paths[0].read_bytes())).read_all()
    without = table.drop_columns(["verify_steps"])
    unknown = pa.array([None] * 3 + table["response_tokens"].to_pylist()[3:], pa.int32())
    without = without.set_column(without.schema.get_field_index("response_tokens"), "response_tokens", unknown)
    with pa.OSFile(str(paths[0]), "wb") as file, pa.ipc.new_file(file, without.schema) as writer:
        writer.write_table(without)
    whole, error = replayed(tmp_path, run)
    assert whole["prompts"] < 56
    for words in ("is unreadable and left out", "3 of 224 requests do not tell response_tokens", "tell verify_steps"):
        assert any(words in line for line in whole["unread"]), words
    assert "of 56 prompts have no length of each sample, and are left out" in whole["unread"][-1]
    assert all(line in error for line in whole["unread"])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("workload.lengths.run=nowhere", "is no folder"),
        ("workload.lengths.run=.", "no events of a run"),
        ("workload.lengths.path=x", "did you mean|known here: run"),
        ("workload.prompts=3", "brings its own: drop workload.prompts"),
        ("drafts.siblings=0.1", "drop drafts.siblings, or set drafts.acceptance"),
        ("workload.epochs=3", "brings its own: drop workload.epochs"),
        ("workload={alike: 0.1, unseen: 0.5, seed: 1}", "drop workload.alike, workload.unseen, workload.seed"),
        ("batch_prompts=99", "64 prompts are fewer prompts than batch_prompts=99"),
    ],
)
def test_recorded_workloads_that_cannot_be(made, tmp_path, override, words):
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(
        "replicas: [{count: 2, profile: qwen2.5-32b-h800-tp4}]\nbatch_prompts: 8\n"
        f"workload: {{lengths: {{run: {made[0]}}}}}\n"
    )
    status, _, error = told("simulate", cluster, override)
    assert status == 1
    assert any(word in error for word in words.split("|")), error


def test_acceptance_goes_by_a_prompts_visits_and_not_by_epochs(tmp_path):
    """Of data that repeat a prompt within their only epoch; a prompt of which the log has no key is one of its own."""
    log = EventLog(tmp_path)
    for step, verify_steps in enumerate([0, 19, 9, 9]):
        columns = {"uid": f"u{step}", "prompt_key": "0" * 32, "replica": 0, "sample": [0], "validate": False}
        columns |= {"prompt_tokens": 20, "response_tokens": 40, "drafted_tokens": 40, "verify_steps": verify_steps}
        columns |= {"accepted_tokens": [0, 20, 30, 30][step], "queued_at": START + step, "trained": True}
        log.append_requests(step + 1, 0, columns)
    found = recorded.acceptance(recorded.read(tmp_path))
    assert found.acceptance == (1.0, 2.0, 4.0, 4.0)
    assert found.overhead == 2.0
