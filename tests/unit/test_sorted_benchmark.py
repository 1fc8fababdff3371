"""benchmarks.sorted: arms are what they say, train alike, and their figures are right."""

import json
import re

import numpy as np
import pytest
import typer
import yaml

from benchmarks import sorted as bench
from benchmarks import sorted_gradients, sorted_slots, traces
from benchmarks import sorted_measures as measures
from verl_rhyme.config import SortingConfig
from verl_rhyme.observability import metrics
from verl_rhyme.scheduling.rules import named
from verl_rhyme.simulation.recorded import Run


def rules_of(name):
    """What the scheduler goes by in an arm."""
    options = dict(option.split("=") for option in bench.ARMS[name].sorting)
    mode = dict(bench.ARMS[name].variables).get("SORTED_MODE", "on_policy")
    config = SortingConfig(mode=mode, **{key: yaml.safe_load(value) for key, value in options.items()})
    batch = bench.ARMS[name].batches * bench.BATCH
    names = ("load", "harvest", "start_order", "group_batches", "max_staleness")
    given = {key: getattr(config, key) for key in names}
    return config, named(mode, batch_prompts=batch, batch_samples=batch * bench.SAMPLES, **given)


@pytest.mark.parametrize("name", bench.ARMS)
@pytest.mark.parametrize("setting", ["learning-grpo", "bare-ppo"])
def test_every_arm_trains_alike(name, setting):
    """As many samples an epoch, in whole steps; the latter of two overrides counts."""
    told = dict(override.lstrip("+").split("=", 1) for override in bench.overrides(bench.Cell(setting, name, 1)))
    step = int(told["data.train_batch_size"])
    assert bench.PROMPTS % step == 0
    assert int(told["trainer.test_freq"]) * step == bench.PROMPTS * (1 if setting == "learning-grpo" else 2)
    assert step // int(told["actor_rollout_ref.actor.ppo_mini_batch_size"]) == bench.ARMS[name].mini_batches
    assert told["algorithm.adv_estimator"] == {"grpo": "grpo", "ppo": "gae"}[setting.split("-")[1]]


def test_arms_are_what_they_are_called():
    sorted_arms = [name for name, arm in bench.ARMS.items() if arm.system == "sorted"]
    loads = {name: rules_of(name)[1] for name in sorted_arms}
    usual = loads["sorted"]
    assert (usual.load, usual.harvest, usual.start_order, usual.max_staleness) == ("group", "shortest", "load", 0)
    large = {name for name, rules in loads.items() if rules.load_batches(None) * rules.batch_prompts == 32}
    assert set(sorted_arms) - large == {"one batch loaded", "partial, rolling"}
    assert loads["partial"].continues
    rolling = loads["partial, rolling"]
    assert (rolling.load, rolling.max_staleness, rolling.load_batches(None)) == ("rolling", 1, 2)
    assert [loads[f"{order} first"].start_order for order in ("short", "long")] == ["shortest", "longest"]
    assert loads["no grouped loading"].load == "refill"
    assert rules_of("no oversubscription")[0].oversubscription == 1
    whole = loads["finished batch sorted"]
    assert (whole.harvest, whole.load_batches(None), rules_of("finished batch sorted")[0].order) == ("loaded", 1, 1)
    assert bench.ARMS["finished batch sorted"].mini_batches == bench.ARMS["sync, large batch"].mini_batches == 4


def test_arms_take_turns_and_ablations_are_steady():
    cells = list(bench.cells(["steady-ppo", "bare-ppo"]))
    assert [cell.seed for cell in cells] == sorted(cell.seed for cell in cells)
    first = [(cell.setting, cell.arm) for cell in cells if cell.seed == 1]
    assert [arm for setting, arm in first if setting == "steady-ppo"] == [*bench.ARMS]
    assert [arm for setting, arm in first if setting == "bare-ppo"] == [*bench.SYSTEMS]
    assert {arm for setting in bench.SETTINGS.values() for arm in setting.arms or ()} <= bench.ARMS.keys()
    assert len({cell.folder(bench.Path("x")) for cell in cells}) == len(cells)


def requests(*spans, validate=()):
    begun, ended = np.array(spans, dtype=float).reshape(-1, 2).T
    kind = np.array([i in validate for i in range(len(begun))])
    stages = {"stage": ["gen", "testing"], "step": [4, 4], "started_at": [0.0, 10.0], "duration_s": [9.0, 5.0]}
    columns = {"started_at": begun, "finished_at": ended, "validate": kind}
    return Run(bench.Path(), columns, {name: np.array(values) for name, values in stages.items()}, {}, [])


@pytest.mark.parametrize(
    ("run", "seconds"),
    [
        (requests((1, 9), (16, 20)), 0),
        (requests((12, 20)), 3),
        (requests((12, 13), (12.5, 14), (14.5, 30)), 2.5),
        (requests((9, 30), (11, 12)), 5),
        (requests((10, 15), validate=[0]), 0),
        (requests((10, np.nan), (14, 16)), 1),
    ],
)
def test_seconds_of_training_rollout_beside_validation(run, seconds):
    assert measures.while_validating(run) == {4: pytest.approx(seconds)}


def test_what_a_load_made_for_later_ones_and_had_from_before_is_carried():
    """The rollout of step 4 goes from 1 to 9, and then training beside a validation from 10 on."""
    run = requests((0, 0.5), (1, 5), (2, 8), (6, 8), (8, 12), (6, 8), validate=[5])
    run.stages["started_at"][0], run.stages["duration_s"][0] = 1.0, 8.0
    run.requests["response_tokens"] = np.array([1, 10, 100, 1000, 10000, 100000])
    run.requests["step"] = np.array([4, 4, 5, 5, 5, 5])
    run.requests["trained"] = np.array([True, True, True, False, True, True])
    assert measures.carried(run, 4, 4) == 100 - 1


def test_speed_leaves_out_what_was_carried_into_a_load(tmp_path, monkeypatch):
    folder = write(tmp_path / "run", [(10, 5, 100, None)] * 4)
    monkeypatch.setattr(measures, "_carried", lambda folder, loads: np.array([-1280.0]) if loads == [[3, 4]] else None)
    row = measures.measure(folder, 64, 128, 128)
    assert row["carried"] == 0.1
    assert row["tokens_per_rollout_s"] == 1152
    # A tenth of what was trained was made before: the rollout of it all takes 10 / 0.9 s beside 10 s of the rest.
    assert row["tokens_per_s"] == pytest.approx(12800 / (10 + 10 / 0.9), rel=1e-3)
    assert row["points"] == [[100, 1152]]
    assert row["update_s"] == pytest.approx(5 + 5 / 0.9, rel=1e-3)


def write(folder, rows, held_out=()):
    folder.mkdir(parents=True)
    lines = []
    for step, (seconds, gen, length, bubble) in enumerate(rows, 1):
        data = {metrics.STEP_S: seconds, metrics.GEN_S: gen, metrics.RESPONSE_LENGTH_MEAN: length}
        data |= {metrics.EPOCH: 0, metrics.REWARD_MEAN: 0.5, metrics.SORTED_DISCARDED: 10.0, "actor/grad_norm": 1.0}
        data |= {} if bubble is None else {metrics.BUBBLE_RATIO: bubble}
        data |= {"training/off_policy/trajectory_staleness_worst/max": 1.0, metrics.TOTAL_TOKENS: 1.0}
        if step in dict(held_out):
            data |= {"val-core/puzzles/acc/mean@2": dict(held_out)[step], "val-aux/puzzles/score/mean@2": 0.75}
        lines.append(json.dumps({"step": step, "data": data}) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def test_speed_is_of_loads_into_which_no_validation_came(tmp_path, monkeypatch):
    first, disturbed = [(90, 80, 100, 0.5), (10, 5, 100, 0.5)], [(10, 5, 90, 0.9), (14, 9, 90, 0.9)]
    rows = [*first, *disturbed, (10, 5, 50, 0.1), (20, 10, 100, 0.2)]
    folder = write(tmp_path / "run", rows, held_out=[(2, 0.1), (6, 0.3)])
    monkeypatch.setattr(measures, "_validating", lambda folder, count: [0.0, 2.0, 0.0, 0.0, 0.0, 0.0])
    row = measures.measure(folder, 64, 128, 128)
    assert row["steps"] == 6
    assert row["update_s"] == pytest.approx((10 + 20) / 2)
    assert row["tokens_per_s"] == pytest.approx(150 * 64 / 30)
    assert row["tokens_per_rollout_s"] == pytest.approx(150 * 64 / 15, rel=1e-3)
    assert row["bubble_ratio"] == pytest.approx((5 * 0.1 + 10 * 0.2) / 15, rel=1e-3)
    assert row["wasted"] == pytest.approx(20 / (150 * 64), rel=1e-3)
    # The first step counts as a median one; two seconds of the third one's rollout were beside the validation.
    assert row["held_out"] == [[128, 22.0, 0.1, 0.75], [384, 78.0, 0.3, 0.75]]
    assert row["rewards"] == [[128, 22.0, 0.5], [256, 48.0, 0.5], [384, 78.0, 0.5]]
    assert row["points"] == [[75.0, pytest.approx(150 * 64 / 15, rel=1e-3)]]
    assert row["bubble_ratio_sampled"] is None
    (folder / "sampled.jsonl").write_text(json.dumps({"step": 6, "data": {measures.SAMPLED: 0.25}}) + "\n")
    assert measures.measure(folder, 64, 128, 128)["bubble_ratio_sampled"] == 0.25
    with pytest.raises(ValueError, match="a validation came into each load"):
        measures.measure(write(tmp_path / "each", rows[:4], held_out=[(2, 0.1)]), 64, 128, 128)


def test_runs_together_and_their_table(tmp_path):
    made = []
    for seed, accuracy in ((1, 0.1), (2, 0.2)):
        for arm, speed, length in (("sync", 10, 100), ("sync, drafts", 4, 50), ("sorted", 5, 100)):
            rows = [(2 * speed, speed, length, None if arm == "sync" else 0.1)] * 4
            folder = write(tmp_path / f"{arm} {seed}", rows, held_out=[(4, accuracy)])
            made.append({"setting": "steady-grpo", "arm": arm, "seed": seed, **measures.measure(folder, 64, 128, 128)})
    sync, drafts, ours = measures.together(made)
    assert (sync["bubble_ratio"], ours["bubble_ratio"]) == (None, 0.1)
    assert ours["matched"] == [2.0, 2.0]
    assert ours["held_out"] == [[256, 40.0, pytest.approx(0.15), pytest.approx(0.05)]]
    assert ours["to_accuracy"]["0.16"] == [[None, None], [256, 40.0]]
    assert (ours["tokens_over_drafts"], ours["responses_over_drafts"]) == ([1.6, 1.6], [0.8, 0.8])
    assert (drafts["tokens_over_drafts"], sync["responses_over_drafts"]) == ([1.0, 1.0], [0.4, 0.4])
    made[-1]["points"] = [[100, 1600.0], [100, 960.0]]  # of which the last one is the run's end
    (*_, ours) = measures.together(made)
    assert ours["before_end_over_drafts"] == [1.6, 2.0]
    lines = list(measures.table([sync, ours]))
    cells = "| sorted | 2 | 10% | 1280 | 1.60, 1.60 | 1.60, 2.00 | 0.80, 0.80 | 640 | 10.0 |"
    assert any(line.startswith(cells) for line in lines)
    assert any(line.startswith("| sync | 2 | - |") for line in lines)


def test_the_untrained_model_is_no_accuracy_that_was_reached():
    held_out = [[0, 0.0, 0.5, 0.5], [64, 9.0, 0.1, 0.2], [128, 18.0, 0.3, 0.4]]
    assert measures.reached(held_out, 0.3) == [128, 18.0]
    assert measures.reached(held_out, 0.4) == [None, None]


def test_the_documents_tell_what_each_arm_is():
    text = (bench.Path(__file__).parents[2] / "docs" / "studies" / "sorted.md").read_text()
    (_, section) = text.split("\n## Its parts, one by one\n")
    rows = re.findall(r"^\| (`.*?) \|", section.split("\n### ")[0], re.MULTILINE)
    assert re.findall(r"`([^`]+)`", " ".join(rows)) == [*bench.ARMS]


def test_runs_that_are_there_are_not_made_again(tmp_path, monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(bench, "train", lambda cell, out, quick: ran.append(cell))
    row = measures.measure(write(tmp_path / "run", [(2, 1, 9, 0.1)] * 4, [(4, 0.5)]), 64, 128, 128)
    monkeypatch.setattr(bench, "measure", lambda cell, folder: {**vars(cell), **row})
    out = tmp_path / "kept"
    out.mkdir()
    for runs, seed in ((1, 2), (None, 2), (1, 1), (0, 2)):
        bench.main(["bare-grpo"], runs=runs, seed=[seed], out=out, table=runs == 0)
    assert [(cell.arm, cell.seed) for cell in ran] == [*((arm, 2) for arm in bench.SYSTEMS), ("sync", 1)]
    assert "| sync | 1 |" in capsys.readouterr().out, "only of the seed that was asked for"
    with pytest.raises(typer.BadParameter, match="no arm sink"):
        bench.main(["bare-grpo"], arm=["sink"], out=out)


def test_updates_of_a_load_have_whole_groups_the_short_first():
    lengths = np.arange(32) % 7 + np.repeat([9, 2, 40, 20], sorted_gradients.GROUP)
    found = dict(sorted_gradients.orders(lengths))["groups"]
    assert sorted(found) == list(range(32))
    assert [int(i) // sorted_gradients.GROUP for i in found[:: sorted_gradients.GROUP]] == [1, 0, 3, 2]
    assert all(len({int(i) // sorted_gradients.GROUP for i in part}) == 1 for part in np.split(found, 4))


def test_a_synchronous_update_takes_as_many_steps_as_its_slots_need():
    lengths = [np.array([10])] * 7 + [np.array([50])]
    assert sorted_slots.synchronous(lengths, np.random.default_rng(0), 64) == (56 * 10 + 8 * 50, 50)
    assert sorted_slots.synchronous(lengths, np.random.default_rng(0), 8) == (56 * 10 + 8 * 50, 7 * 10 + 50)
    assert sorted_slots.synchronous(lengths * 2, np.random.default_rng(0), 1)[1] == 2 * (56 * 10 + 8 * 50)


@pytest.mark.parametrize("unit", ["group", "trajectory"])
def test_more_slots_leave_sorting_more_to_gain(unit):
    path = traces.FOLDER / "qwen2-t1.parquet"
    few, many = (sorted_slots.measure(path, "fresh", unit, share, 2) for share in (0.125, 2.0))
    assert 0.9 < few["tokens_ratio"] < 1.15
    assert many["tokens_ratio"] > 1.2
    assert many["bubble"] < many["bubble_sync"]
    assert many["wasted"] > few["wasted"] > 0
    partial = sorted_slots.measure(path, "partial", unit, 2.0, 2)
    assert partial["wasted"] == pytest.approx(0, abs=1e-3)
    assert partial["tokens_ratio"] > many["tokens_ratio"]
