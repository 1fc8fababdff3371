"""The replay counts right, and on a real trace our drafter is ahead of the paper's."""

import dataclasses
import json

import numpy as np
import pytest
import typer

from benchmarks import full_scale, placement, real_run, systems, traces
from benchmarks.arms import Hindsight, NoDrafts, Rhyme, released
from benchmarks.draft_quality import summary
from benchmarks.real_sizes import budget, planning
from benchmarks.replay import replay
from benchmarks.studies import (
    allocation,
    eviction,
    length_pairs,
    lengths,
    placement_real,
    ranker,
    scheduler,
    simulated_fleet,
)
from benchmarks.studies.regrowth import Regrown, previous_of
from examples.roads import maps
from verl_rhyme.config import DraftingConfig
from verl_rhyme.lengths.ranker import LOSSES
from verl_rhyme.simulation import recorded


@pytest.fixture(scope="module")
def two_epochs():
    steps = traces.load(traces.FOLDER / "qwen2-t1.parquet")
    return [step for step in steps if step[0].epoch < 2]


def figures(steps, arm):
    tallies = replay(steps, arm)
    return summary([tallies[0]]), summary([tallies[1]])


def test_the_trace_is_whole(two_epochs):
    assert [len(step) for step in two_epochs] == [128] * 8
    for response in two_epochs[0]:
        assert len(response.tokens) == len(response.logprobs) > 0
        assert (response.logprobs <= 0).all()
        assert len(response.key) == 16


def test_plain_decoding_emits_a_token_a_step(two_epochs):
    tallies = replay(two_epochs, NoDrafts())
    for tally in tallies.values():
        assert tally.emitted == tally.steps
        assert tally.drafted == tally.accepted == 0
    tokens = sum(len(r.tokens) - 1 for step in two_epochs for r in step)
    assert sum(t.emitted for t in tallies.values()) == tokens


def test_hindsight_is_always_right(two_epochs):
    for tally in replay(two_epochs, Hindsight()).values():
        assert tally.accepted == tally.drafted > 0
        assert tally.emitted <= tally.steps + tally.accepted


def test_ours_is_ahead_of_both_histospecs_at_no_higher_cost(two_epochs):
    cold, warm = figures(two_epochs, Rhyme(DraftingConfig(floor=0.3, weigh_cost=False)))
    _, paper = figures(two_epochs, Rhyme(DraftingConfig(policy="paper")))
    _, theirs = figures(two_epochs, released())
    assert cold["tokens_per_step"] > 2, "the first epoch gains from live texts"
    assert warm["tokens_per_step"] > 1.3 * paper["tokens_per_step"]
    assert warm["tokens_per_step"] > 1.5 * theirs["tokens_per_step"]
    assert warm["verified_per_token"] < 1.1 * paper["verified_per_token"]
    assert np.isfinite(warm["us_per_request_step"])


def test_an_interrupted_text_is_worth_more_than_all_else_known(two_epochs):
    config = DraftingConfig(weigh_cost=False, tail_weight=1.0)
    previous = previous_of(two_epochs, 1, 0.93)
    arm = Regrown(config, previous)
    tally = replay(two_epochs, arm)[1]
    _, without = figures(two_epochs, Rhyme(config))
    assert set(previous) == {r.id for step in two_epochs for r in step if r.epoch == 1}
    assert summary([tally])["tokens_per_step"] > 1.7 * without["tokens_per_step"]
    assert 0.5 * arm.accepted < arm.reverified <= arm.accepted <= tally.accepted


@pytest.mark.parametrize("certain", [False, True])
def test_a_wide_batch_drafts_what_pays(certain):
    """At a real vocabulary, by a GPU's cost; the bounds as they were leave little of it."""
    past, now = budget.responses()

    def granted(bounds):
        return budget.drive(256, certain, budget.gpu, bounds, past[-8:], now).granted

    pays = granted(budget.unbounded)
    assert np.mean(pays) > 200
    assert granted(budget.after) == pays
    assert max(granted(budget.before)) < np.mean(pays) / 2


def test_planning_is_timed_with_all_histories_there_and_while_they_come(capsys):
    planning.main(as_json=True, quick=True, threads=[2])
    (row,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert row["errors"] == 0
    assert row["tokens_a_row"] > 1.5, "histories were drafted from"
    assert row["loading_steps"] > 0
    assert row["us_a_row"] > 0


def test_the_store_hits_what_it_has_room_for_and_oldest_first_far_less():
    tokens = eviction.lengths(200, 500)
    before = eviction.summary(eviction.oldest_first(0.4, tokens, passes=4, batch=10, seed=1))
    after = eviction.summary(eviction.by_hash(0.4, tokens, passes=4, batch=10, seed=1))
    assert before["hit_rate"] == pytest.approx(0.4 * 0.4 / 2, abs=0.04)
    assert after["hit_rate"] == pytest.approx(0.4, abs=0.04)
    assert after["written"] < 0.55
    assert before["written"] == 1


def test_groups_come_together_and_home_within_the_bound():
    least = placement.measure("least_loaded", "sync", 8, 600)
    group = placement.measure("sticky_group", "sync", 8, 600)
    assert least["pairs"] == pytest.approx(1 / 8, abs=0.02)
    assert least["home"] == pytest.approx(1 / 8, abs=0.05)
    assert group["pairs"] > 0.99
    assert group["home"] > 0.9
    assert least["requests_to_mean_greatest"] == 1 < group["requests_to_mean_greatest"] <= 1.25


@pytest.mark.parametrize("arm", scheduler.ARMS)
def test_the_scheduler_is_timed_at_every_kind_of_event(arm):
    run = scheduler.Run(arm, 256, 1)
    for version in range(5):
        run.update(version)
    kinds = {"begin", "start", "generate", "finish", "harvest"} | ({"interrupt"} if run.rules.stops else set())
    assert set(run.microseconds) == kinds
    assert len(run.microseconds["harvest"]) == 5
    assert run.scheduler.ledger.loaded == 32, "four updates train as many prompts as were loaded first"


def test_a_start_takes_the_slot_that_was_free_longest_and_pauses_do_not_count():
    worker = {"begun": np.array([0.1, 0.1, 1.3, 1.4, 6.0]), "freed": np.array([1.0, 1.2, 3.0])}
    windows = [(0.0, 2.0), (5.0, 7.0)]
    assert simulated_fleet.latencies([worker], 2, windows) == pytest.approx([0.3, 0.2])


@pytest.mark.parametrize("task", ["puzzles", "roads"])
def test_rankers_are_measured_between_chance_and_an_oracle(task):
    rows = {row["arm"]: row for row in ranker.rows(quick=True, seed=0, only=task, fresh=False)}
    for row in rows.values():
        assert (row["task"], row["trained_on"], row["measured_on"]) == (task, 96, 48)
        assert all(0 <= row[f"share_{tail}"] <= 1.5 for tail in (20, 10, 5)), "who knows means may miss a tail"
        told = row["arm"].startswith(("ranker", "boosting"))
        assert row["forecasts"]["ranked"] == told
    chance = rows.pop("history")
    assert chance["recall_20"] == pytest.approx(0.2)
    assert {f"ranker, {loss}" for loss in LOSSES} < set(rows)
    assert rows["prompt length"]["rank_correlation"] > 0.2
    if task == "roads":  # the prompt tells it, to who reads the map
        assert rows["searches"]["rank_correlation"] > 0.9
        assert rows["boosting, map read"]["rank_correlation"] > 0.7 > rows["boosting"]["rank_correlation"]


def test_who_reads_a_map_sees_its_roads():
    way = maps.Map((("bath", "bury"), ("bury", "cork"), ("deal", "bath"), ("derby", "deal")), "bath", "cork")
    assert length_pairs.seen_in_a_map(way) == [5, 4, 2, 1, 2, 6 / 5, 2, 10 / 5, 4, 2]


def test_arms_on_many_gpus_keep_their_bounds_of_staleness():
    for row in full_scale.compare(full_scale.QUICK, ", drafts", quick=True):
        assert row["staleness_max"] <= row["max_staleness"]
        assert (row["early"] > 0) <= row["separate"]


def test_what_is_recorded_of_many_gpus_is_what_todays_code_gives():
    """A table which its command does not reproduce does not stand."""
    rows = full_scale.recorded()
    old = {row["commit"] for row in rows if row["fingerprint"] != full_scale.fingerprint()}
    assert not old, f"results/full_scale.jsonl has rows of other code ({old}): make them again (its docstring says how)"
    [arm] = [arm for arm in full_scale.ARMS if arm.label == "full, k=2, separate, drafts"]
    made = full_scale.simulate(arm, full_scale.Setting(1024, full_scale.GPUS[1024]))
    assert any(made.items() <= row.items() for row in rows), "what the command gives is not recorded"
    assert full_scale.table(rows) in (full_scale.ROOT / "docs" / "full_scale.md").read_text(), "see --table"


def test_forecasts_of_lengths_come_near_to_what_siblings_tell():
    """What is left is what no history can know: the spread of a prompt's own responses."""
    rows = list(lengths.evaluate(*lengths.made_up(between=0.8, within=0.3, prompts=512, epochs=2)))
    last = {row["arm"]: row for row in rows if row["epoch"] == 1}
    ours, ceiling = last["ours"], last["siblings' mean"]
    assert ours["rank_correlation"] > 0.97 * ceiling["rank_correlation"]
    assert last["ours, half a group on"]["recall_10"] > ours["recall_10"]
    assert ours["coverage_90"] == pytest.approx(0.9, abs=0.03)
    assert abs({row["arm"]: row for row in rows if row["epoch"] == 0}["ours"]["rank_correlation"]) < 0.2


def test_real_placements_take_turns_and_what_is_kept_is_not_run_again(tmp_path, monkeypatch, capsys):
    ran = []
    figures = {"steps_s": [4.0, 6.0, 5.0], "step_s": 5.0, "tokens_per_s": 100.0, "bubble_ratio": 0.2, "moved": 1}
    figures |= {
        "staleness_max": 1,
        "response_length": [90.0, 80.0],
        "reward": [0.2, None],
        "faults": [],
    }
    monkeypatch.setattr(placement_real, "train", lambda cell, out: ran.append(cell) or out.mkdir(exist_ok=True))
    monkeypatch.setattr(
        placement_real,
        "measure",
        lambda cell, folder: {"setting": cell.setting, "arm": cell.arm, "seed": cell.seed, **figures},
    )

    def slice_of(runs):
        placement_real.main(["3 replicas"], runs=runs, as_json=True, out=tmp_path)
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    assert slice_of(3) == []
    rows = slice_of(100)
    compared = [arm for arm in placement_real.ARMS if arm not in placement_real.CHECKS]
    assert [(cell.arm, cell.seed) for cell in ran] == [(arm, seed) for seed in (1, 2) for arm in compared]
    assert slice_of(0) == rows
    medians = [row for row in rows if row.get("median")]
    assert [row["arm"] for row in medians] == compared
    assert {row["runs"] for row in medians} == {2}
    assert medians[0]["step_s_range"] == [5.0, 5.0]
    assert (medians[0]["moved"], medians[0]["staleness_max"]) == (2, 1), "a sum and a greatest"
    assert medians[0]["reward"] == [0.2, None]
    with pytest.raises(typer.BadParameter, match="there are: 2 replicas"):
        placement_real.main(["4 replicas"], out=tmp_path)


def test_systems_take_turns_and_what_is_kept_is_not_run_again(tmp_path, monkeypatch, capsys):
    ran = []
    numbers = ("step_s", "tokens_per_s", "staleness_mean", "wasted_tokens", "staleness_max")
    lists = ("reward", "response_length", "bubble_ratio", "acceptance_length")
    figures = dict.fromkeys(numbers, 2) | {name: [0.4] for name in lists} | {"faults": []}
    monkeypatch.setattr(systems, "train", lambda cell, out: ran.append(cell) or out.mkdir(exist_ok=True))
    monkeypatch.setattr(systems, "measure", lambda cell, folder: {**dataclasses.asdict(cell), **figures})

    def slice_of(runs):
        systems.main(["steady"], runs=runs, as_json=True, out=tmp_path, repeats=2)
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    assert slice_of(5) == []
    rows = slice_of(100)
    assert [(cell.arm, cell.seed) for cell in ran] == [(arm, seed) for seed in (1, 2) for arm in systems.ARMS]
    assert slice_of(0) == rows
    medians = [row for row in rows if row.get("median")]
    assert [row["arm"] for row in medians] == [*systems.ARMS]
    assert (medians[0]["staleness_max"], medians[0]["tokens_per_s_range"], medians[0]["reward"]) == (2, [2, 2], [0.4])
    with pytest.raises(typer.BadParameter, match="there are: sync, drafts; full, staleness 0"):
        systems.main(["steady"], arm=["sink"], out=tmp_path)


def test_what_is_wrong_with_a_response_is_found():
    """In the log of a run whose responses went on at other replicas under later versions."""
    run = recorded.read(traces.FOLDER / "simulator" / "partial_sticky_group")
    request, trained = run.requests, run.requests["trained"]
    lengths = np.bincount(request["step"][trained], request["response_tokens"][trained])[1:] / 32
    by_step = {step: {"response_length/mean": length} for step, length in enumerate(lengths, 1)}
    assert real_run.faults(run, by_step, 32, limit=384, staleness=1) == {"spanning": 11, "faults": []}
    killed = {step: row for step, row in by_step.items() if step != 2}
    assert real_run.faults(run, killed, 32, limit=384, staleness=1)["faults"] == [], "metrics of a step are lost"
    within = real_run.faults(run, by_step, 32, limit=384, staleness=0)
    assert all("behind" in fault for fault in within["faults"])
    assert within["faults"], "it trained what an earlier version made"

    found = {}
    cut = np.flatnonzero(trained & (request["stop_reason"] == "aborted"))[0]
    for column, value in (("response_tokens", 400), ("stop_reason", "completed"), ("trained", False)):
        changed = request[column].copy()
        changed[cut] = value
        other = dataclasses.replace(run, requests={**request, column: changed})
        found[column] = " ".join(real_run.faults(other, by_step, 32, limit=384, staleness=1)["faults"])
    assert "longer than 384 tokens" in found["response_tokens"]
    assert "went on after its end" in found["stop_reason"]
    assert "the engines made" in found["trained"]


def test_the_planner_is_near_the_best_simulated_split():
    rows = list(allocation.splits(quick=True))
    assert [row["max_staleness"] for row in rows] == list(allocation.BOUNDS)
    for row in rows:
        assert 0.97 <= row["near"] <= 1.05
        assert row["near"] <= row["half"] + 0.02
        assert abs(row["estimate"]) < 0.25, "of 16 prompts"


def test_generation_on_cheaper_gpus_is_worth_something():
    [row] = allocation.kinds(quick=True)
    assert row["samples_per_price"] > 1
    assert row["with_h20"]["step_s"] <= row["alone"]["step_s"]
    assert row["transfer_share"] < 0.05
