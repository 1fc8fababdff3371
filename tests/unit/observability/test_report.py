"""Summary and report of a run or two, from verl's metrics and from the event log."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.observability.logged_run import stock, write_metrics, write_run
from verl_rhyme.cli import app
from verl_rhyme.drafting.policy import SOURCES
from verl_rhyme.observability import metrics as m
from verl_rhyme.observability.events import EventLog
from verl_rhyme.observability.run import CONFIG_FILE, read
from verl_rhyme.observability.summary import compare


@pytest.fixture
def off(tmp_path: Path) -> Path:
    return write_metrics(tmp_path / "off", [stock(step, (step - 1) // 2) for step in range(1, 9)])


@pytest.fixture
def on(tmp_path: Path) -> Path:
    return write_run(tmp_path / "on", "histospec")


def test_without_an_event_log_the_folders_marker_names_the_run(off: Path) -> None:
    (off / "checkpoints").mkdir()
    (off / "checkpoints" / "run.json").write_text('{"run": "sorted-partial", "mode": "rhyme_sorted"}')
    assert read(off).summary["run"] == "sorted-partial"
    (off / "checkpoints" / "run.json").write_text("half a fi")
    assert read(off).summary["run"] == "off"


def test_a_stock_run_is_reported_from_its_metrics(off: Path) -> None:
    summary = read(off).summary
    assert set(summary) == {"run", "epochs", "staleness_mean", "staleness_max", "bubble_slots", "engine"}
    assert [row["epoch"] for row in summary["epochs"]] == [1, 2, 3, 4]
    unknown = dict.fromkeys(SOURCES)
    assert {name: value for name, value in summary["epochs"][0].items() if value is not None} == {
        **{"epoch": 1, "reward_mean": pytest.approx(0.15), "rollout_s": 8.0, "tokens": 1600, "accept_length": 1.0},
        **{"useful_tokens_per_s": 200.0, "staleness_mean": 0.0, "staleness_max": 0},
        **{"drafted_by_source": unknown, "accepted_by_source": unknown},
    }


def test_the_event_log_has_all_of_a_run(on: Path) -> None:
    summary = read(on).summary
    assert (summary["run"], summary["engine"], summary["bubble_slots"]) == ("histospec", "vllm test", 4)
    cold, warm = summary["epochs"][:2]
    assert (cold["accept_length"], cold["accept_rate"], cold["history_hit_rate"]) == (1.0, 0.0, 0.0)
    assert (warm["accept_length"], warm["accept_rate"], warm["history_hit_rate"]) == (2.5, 0.6, 1.0)
    assert (warm["rollout_s"], warm["tokens"], warm["useful_tokens_per_s"]) == (4.0, 1600, 400.0)
    assert (warm["accepted_share"], warm["accepted_by_source"]["history"]) == (480 / 1600, 480)
    assert warm["bubble_ratio"] == pytest.approx(1 - (1 + 2 + 2 + 3) / (4 * 3))
    write_metrics(on, [stock(step, 0, **{m.ROLLOUT_S: 99.0}) for step in range(1, 9)])
    assert read(on).summary["epochs"][1]["rollout_s"] == 4.0, "it takes precedence over the file"


def test_where_engines_continue_the_event_log_gives_the_bubble_ratio(on: Path) -> None:
    log = EventLog(on / "checkpoints" / "events")
    log.describe("histospec", rollout="step")
    (epoch, *_) = read(on).summary["epochs"]
    each = 1 - 32 / 3 / (4 * 4), 1 - 32 / 3 / (4 * 20)
    assert epoch["bubble_ratio"] == pytest.approx(sum(each) / 2), "the second lasts from the first batch to its own"


def test_a_resumed_run_counts_no_step_twice(tmp_path: Path) -> None:
    resumed = [{"step": 2, "data": {"val-core/x": 1.0}}, stock(3, 0, **{m.GEN_S: 10.0})]
    write_metrics(tmp_path, [*(stock(step, 0, **{m.GEN_S: 1.0}) for step in (1, 2, 3, 4)), *resumed])
    with (tmp_path / "metrics.jsonl").open("a") as file:  # killed while writing a line
        file.write('{"step": 4, "data": {"timing_s/')
    run = read(tmp_path)
    assert "metrics.jsonl, line 7" in run.problems[0]
    (epoch,) = run.summary["epochs"]
    assert epoch["rollout_s"] == 1.0 + 1.0 + 10.0
    for steps, seconds in ((range(1, 5), 1.0), (range(3, 4), 10.0)):
        log = EventLog(tmp_path / "events")
        for step in steps:
            log.append_metrics(step, 0, stock(step, 0, **{m.GEN_S: seconds, m.ENTROPY: np.array(1.5)})["data"])
    (tmp_path / "metrics.jsonl").unlink()
    (epoch,) = read(tmp_path).summary["epochs"]
    assert (epoch["rollout_s"], epoch["entropy"]) == (12.0, 1.5)


def test_unknown_values_are_null(tmp_path: Path) -> None:
    broken = {m.REWARD_MEAN: None, m.GEN_MS_PER_TOKEN: None, m.BUBBLE_RATIO: 0.1}
    write_metrics(tmp_path, [stock(1, 0), stock(2, 0, **broken), stock(3, 1, **broken)])
    part, nothing = read(tmp_path).summary["epochs"]
    assert (part["tokens"], part["rollout_s"], part["reward_mean"]) == (None, 8.0, pytest.approx(0.1))
    assert (nothing["tokens"], nothing["reward_mean"], nothing["useful_tokens_per_s"]) == (None, None, None)
    assert nothing["bubble_ratio"] is None, "misleading without the useful tokens"


def test_staleness_is_weighted_by_groups_or_that_of_trajectories(tmp_path: Path) -> None:
    sizes = ((0.0, 0, 8), (1.0, 1, 8), (2.0, 3, 24), (0.0, 0, 8))
    names = m.STALENESS_MEAN, m.STALENESS_MAX, m.STALENESS_GROUPS
    rows = [stock(at, (at - 1) // 2, **dict(zip(names, size, strict=True))) for at, size in enumerate(sizes, 1)]
    summary = read(write_metrics(tmp_path, rows)).summary
    assert (summary["staleness_mean"], summary["staleness_max"]) == ((8 + 48) / 48, 3)
    assert [(row["staleness_mean"], row["staleness_max"]) for row in summary["epochs"]] == [(0.5, 1), (1.5, 3)]
    of_verl = {m.VERL_STALENESS_MEAN: 1.5, m.VERL_STALENESS_MAX: 4.0}
    summary = read(write_metrics(tmp_path, [stock(1, 0, **of_verl), {"step": 2, "data": {m.EPOCH: 1}}])).summary
    assert (summary["staleness_mean"], summary["staleness_max"]) == (1.5, 4)
    assert summary["epochs"][1]["staleness_max"] is None, "not logged"


def test_rollout_of_stock_separate_async_lasts_whole_steps(off: Path) -> None:
    """Its ``timing_s/gen`` is only the time the trainer waited."""
    write_metrics(off, [stock(step, (step - 1) // 2, **{m.STEP_S: 20.0}) for step in range(1, 9)])
    config = off / CONFIG_FILE
    config.parent.mkdir(parents=True)
    modes = [f"trainer: {{v1: {{trainer_mode: {mode}}}}}" for mode in ("sync", "separate_async")]
    for text, seconds in zip([*modes, "trainer: ["], (8.0, 40.0, 8.0), strict=True):
        config.write_text(text)
        assert read(off).summary["epochs"][1]["rollout_s"] == seconds


def test_compare_is_a_ratio_of_medians_with_its_spread() -> None:
    def summary(name: str, seconds: list[float]) -> dict[str, Any]:
        rows = [{"epoch": at, "rollout_s": s, "tokens": 100} for at, s in enumerate(seconds, 1)]
        return {"run": name, "epochs": rows}

    result = compare(summary("off", [99, 4, 6, 10]), summary("x", [1, 2, 4, 2]))
    assert result["rollout_speedup_warm"] == 6 / 2
    assert result["rollout_speedup_warm_spread"] == [1.5, 5.0]
    cold = compare(summary("off", [4]), summary("x", [2]))
    assert cold["rollout_speedup_warm"] is None
    assert cold["rollout_speedup_warm_spread"] is None


def run_report(capfd: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[str], list[str]]:
    """Return the exit status of ``verl-rhyme report`` and its lines on standard output and on standard error."""
    with pytest.raises(SystemExit) as ended:
        app(["report", *map(str, arguments)])
    shown = capfd.readouterr()
    return int(ended.value.code or 0), shown.out.splitlines(), shown.err.splitlines()


def test_command_writes_and_lists_its_files(on: Path, capfd) -> None:
    status, shown, notes = run_report(capfd, on, "--name", "mine")
    assert (status, notes) == (0, [])
    assert shown[-2:] == [str(on / name) for name in ("summary.json", "report.html")]
    assert json.loads((on / "summary.json").read_text())["run"] == "mine"
    assert "draft tokens of the last epoch: history 100%; accepted: history 100%" in " ".join(shown)
    assert {"2.50", "33%"} <= set(next(line for line in shown if line.strip().startswith("2 ")).split())
    assert "<h1>mine</h1>" in (on / "report.html").read_text()


def test_command_compares_in_80_columns(off: Path, on: Path, capfd, tmp_path: Path) -> None:
    name = "sorted-partial-rolling-loaded-longest (a folder [of] mine)"
    status, shown, _ = run_report(capfd, on, off, "--out", tmp_path / "both", "--name", name)
    assert status == 0
    assert shown[:2] == [f"A  {name}", "B  off"]
    assert [line.split()[:2] for line in shown if " A " in line or " B " in line][:2] == [["1", "A"], ["B", "0.150"]]
    assert max(len(line) for line in shown if line.startswith(" ")) <= 80, "the table"
    result = json.loads((tmp_path / "both" / "summary.json").read_text())
    assert list(result["runs"]) == ["off", name]
    assert result["rollout_speedup_warm"] == 2.0
    assert "rollout speed 2.00x (2.00-2.00)" in " ".join(" ".join(shown).split())
    assert f"<h1>{name} vs. off</h1>" in (tmp_path / "both" / "report.html").read_text()


def test_a_wrong_folder_is_one_error(on: Path, capfd, tmp_path: Path) -> None:
    for name in ("one", "other"):
        shutil.copytree(on / "checkpoints", tmp_path / "runs" / name)
    several = f"contains several runs: give one of {tmp_path / 'runs' / 'one'}, {tmp_path / 'runs' / 'other'}"
    (tmp_path / "empty").mkdir()
    wrong = {"empty": "no finished training step", "nowhere": "no such folder", "runs": several}
    for folder, why in wrong.items():
        status, _, [note] = run_report(capfd, tmp_path / folder)
        assert (status, why in note) == (1, True)
    (on / "file").touch()
    status, _, notes = run_report(capfd, on, "--out", on / "file" / "x")
    why = f"cannot write to {on / 'file' / 'x'} (Not a directory): set --out to a writable folder"
    assert (status, why in notes[-1]) == (1, True)


def test_notes_on_two_runs_of_one_name_or_of_unequal_slots(on: Path, off: Path, capfd, tmp_path: Path) -> None:
    shutil.copytree(on, tmp_path / "again")
    status, _, [note] = run_report(capfd, on, tmp_path / "again")
    assert status == 0
    assert "both runs are named histospec: here they are histospec (on) and histospec (again)" in note
    assert list(json.loads((on / "summary.json").read_text())["runs"]) == ["histospec (again)", "histospec (on)"]
    status, _, [note] = run_report(capfd, on, on)
    assert (status, "are the same run" in note) == (1, True)
    EventLog(tmp_path / "again" / "checkpoints" / "events").describe("full", slots=8)
    _, _, [note] = run_report(capfd, on, tmp_path / "again")
    assert "can fill different numbers of request slots (histospec 4, histospec, then full 8)" in note
    assert "slots" not in run_report(capfd, on, off)[2][0], "a stock run has none"


def test_missing_data_are_reported_on_the_page_too(on: Path, off: Path, capfd) -> None:
    for path in (on / "checkpoints" / "events").glob("stages-*"):
        path.unlink()
    for run, why in ((on, "has no times of requests and stages"), (off, "has no event log")):
        status, _, [note] = run_report(capfd, run)
        page = (run / "report.html").read_text()
        assert (status, why in note, why in page) == (0, True, True)
        assert "Replicas over time" not in page
        assert "Reward, speed and length" in page


def test_the_trace_of_one_step(on: Path, capfd) -> None:
    assert run_report(capfd, on, "--perfetto", "--step", "3")[::2] == (0, [])
    spans = [event for event in json.loads((on / "trace.json").read_text())["traceEvents"] if event["ph"] == "X"]
    assert [event["args"]["step"] for event in spans] == [3] * 8
    status, _, [note] = run_report(capfd, on, "--perfetto", "--step", "99")
    assert (status, "no request of step 99 was logged; steps 1 to 8 are available" in note) == (0, True)
