"""Report from verl's metrics, from the event log and from both."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from verl_rhyme.cli import app
from verl_rhyme.drafting.policy import SOURCES
from verl_rhyme.observability import metrics as m
from verl_rhyme.observability import report, steps
from verl_rhyme.observability.events import EventLog
from verl_rhyme.observability.summary import compare, read


def stock(step: int, epoch: int, **changes: Any) -> dict[str, Any]:
    """Return the metrics of stock verl for a step that the report reads."""
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


def write_metrics(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def off(tmp_path: Path) -> Path:
    write_metrics(tmp_path / "off" / "metrics.jsonl", [stock(step, (step - 1) // 2) for step in range(1, 9)])
    return tmp_path / "off"


@pytest.fixture
def on(tmp_path: Path) -> Path:
    """Run with drafting from epoch 2 on: twice as fast, with more tokens and drafts in the event log."""
    rows = [
        stock(step, (step - 1) // 2, **({m.GEN_S: 2.0, m.GEN_MS_PER_TOKEN: 2000.0 / 1000} if step > 2 else {}))
        for step in range(1, 9)
    ]
    write_metrics(tmp_path / "on" / "metrics.jsonl", rows)
    log = EventLog(tmp_path / "on" / "checkpoints" / "events")
    log.describe(1, run="histospec", slots=4, engine="vllm test")
    for step in range(1, 9):
        write_events(log, step, warm=step > 2)
        gen = {"stage": ["gen"], "started_at": [10.0 * step], "duration_s": [4.0 if step <= 2 else 2.0]}
        log.append_stages(step, (step - 1) // 2, gen)
    return tmp_path / "on"


def write_events(log: EventLog, step: int, warm: bool, validate: bool = False) -> None:
    log.append_requests(
        step,
        (step - 1) // 2,
        {
            "uid": ["a", "b", "c", "d"],
            "replica": [0, 0, 1, 1],
            "started_at": np.zeros(4) + 10 * step,
            "finished_at": np.array([1.0, 2.0, 2.0, 3.0]) + 10 * step,
            "response_tokens": [100, 200, 200, 300],
            "drafted_tokens": [100 if warm else 0] * 4,
            "accepted_tokens": [60 if warm else 0] * 4,
            "verify_steps": [40 if warm else 0] * 4,
            "history_hit": [warm] * 4,
            "policy_version_end": step - 1,
            "reward": [0.0, 1.0, 1.0, None],
            "trained": not validate,
            "validate": validate,
        },
    )


def test_without_an_event_log_the_folders_marker_names_the_run(off: Path) -> None:
    (off / "checkpoints").mkdir()
    (off / "checkpoints" / "run.json").write_text('{"run": "sorted-partial", "mode": "rhyme_sorted"}')
    assert read(off).summary["run"] == "sorted-partial"
    (off / "checkpoints" / "run.json").write_text("half a fi")
    assert read(off).summary["run"] == "off"


def test_a_stock_run_is_reported_from_its_metrics(off: Path) -> None:
    summary = read(off).summary
    assert set(summary) == {
        *("run", "epochs", "staleness_mean", "staleness_max", "bubble_slots", "engine", "versions"),
    }
    assert summary["run"] == "off"
    assert summary["versions"]["numpy"] == np.__version__
    assert [row["epoch"] for row in summary["epochs"]] == [1, 2, 3, 4]
    unknown = dict.fromkeys(SOURCES)
    assert {name: value for name, value in summary["epochs"][0].items() if value is not None} == {
        **{"epoch": 1, "reward_mean": pytest.approx(0.15), "rollout_s": 8.0, "tokens": 1600, "accept_length": 1.0},
        **{"useful_tokens_per_s": 200.0, "staleness_mean": 0.0, "staleness_max": 0},
        **{"drafted_by_source": unknown, "accepted_by_source": unknown},
    }


def test_events_complete_the_metrics(on: Path) -> None:
    summary = read(on).summary
    assert (summary["run"], summary["engine"]) == ("histospec", "vllm test")
    cold, warm = summary["epochs"][:2]
    assert (cold["accept_length"], cold["accept_rate"], cold["history_hit_rate"]) == (1.0, 0.0, 0.0)
    assert (warm["accept_length"], warm["accept_rate"], warm["history_hit_rate"]) == (2.5, 0.6, 1.0)
    assert (warm["rollout_s"], warm["tokens"]) == (4.0, 2000)
    assert warm["bubble_ratio"] == pytest.approx(1 - (1 + 2 + 2 + 3) / (4 * 3))
    assert warm["useful_tokens_per_s"] == 1600 / 4.0


def test_a_run_resumed_under_another_name_has_both(on: Path) -> None:
    log = EventLog(on / "checkpoints" / "events")
    log.describe(3, run="histospec")
    assert read(on).summary["run"] == "histospec"
    log.describe(5, run="histospec-undrafted")
    assert read(on).summary["run"] == "histospec, from step 5 histospec-undrafted"


def test_no_bubble_ratio_without_the_useful_tokens(tmp_path: Path) -> None:
    missing = {m.GEN_S: None, m.GEN_MS_PER_TOKEN: None}
    write_metrics(tmp_path / "metrics.jsonl", [stock(1, 0, **{m.BUBBLE_RATIO: 0.1, **missing})])
    (epoch,) = read(tmp_path).summary["epochs"]
    assert (epoch["useful_tokens_per_s"], epoch["bubble_ratio"]) == (None, None)


def test_events_alone_without_validation(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events")
    for step in (1, 2):
        log.append_stages(step, 0, {"stage": ["gen", "gen", "save_checkpoint"], "duration_s": [1.0, 3.0, 9.0]})
        write_events(log, step, warm=True)
        write_events(log, step, warm=False, validate=True)
    (epoch,) = read(tmp_path).summary["epochs"]
    assert epoch["reward_mean"] == pytest.approx(2 / 3)
    assert (epoch["rollout_s"], epoch["tokens"], epoch["useful_tokens_per_s"]) == (8.0, 1600, 200.0)
    assert (epoch["accept_length"], epoch["staleness_max"]) == (2.5, 0)


def test_resumed_run_counts_no_step_twice(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    resumed = [{"step": 2, "data": {"val-core/x": 1.0}}, stock(3, 0, **{m.GEN_S: 10.0})]
    write_metrics(path, [*(stock(step, 0, **{m.GEN_S: 1.0}) for step in (1, 2, 3, 4)), *resumed])
    with path.open("a") as file:  # killed while writing a line
        file.write('{"step": 4, "data": {"timing_s/')
    run = read(tmp_path)
    assert "metrics.jsonl, line 7" in run.problems[0]
    (epoch,) = run.summary["epochs"]
    assert epoch["rollout_s"] == 1.0 + 1.0 + 10.0


def everything(folder: Path, capfd: pytest.CaptureFixture[str]) -> tuple[str, str, str]:
    """Return table, summary and page of a run's report."""
    assert main([str(folder), "--out", str(folder)]) == 0
    return capfd.readouterr().out, *((folder / name).read_text() for name in ("summary.json", "report.html"))


@pytest.mark.parametrize("left", [None, "", "half a li"])
def test_a_lost_metrics_file_loses_nothing(on: Path, capfd, left: str | None) -> None:
    log = EventLog(on / "checkpoints" / "events")
    metrics = on / "metrics.jsonl"
    for line in map(json.loads, metrics.read_text().splitlines()):
        measured = {m.BUBBLE_RATIO: np.float32(0.25), m.ENTROPY: np.array(1.5), "actor/grad_norm": None, "x": "text"}
        log.append_metrics(line["step"], line["data"][m.EPOCH], line["data"] | measured)
    before = everything(on, capfd)
    assert '"entropy": 1.5' in before[1]
    metrics.unlink()
    if left is not None:
        metrics.write_text(left)
    table, summary, page = everything(on, capfd)
    assert (table, json.loads(summary)) == (before[0], json.loads(before[1]))
    if left != "half a li":  # the page reports the line
        assert page == before[2]


def test_metrics_of_a_resumed_run_replace_later_steps(on: Path) -> None:
    for steps_, seconds in ((range(1, 9), 1.0), (range(3, 6), 10.0)):
        log = EventLog(on / "checkpoints" / "events")
        for step in steps_:
            log.append_metrics(step, (step - 1) // 2, stock(step, (step - 1) // 2, **{m.GEN_S: seconds})["data"])
    (on / "metrics.jsonl").unlink()
    assert [row["rollout_s"] for row in read(on).summary["epochs"]] == [2.0, 20.0, 10.0]


def test_unknown_values_are_null(tmp_path: Path) -> None:
    broken = {m.REWARD_MEAN: None, m.GEN_MS_PER_TOKEN: None}
    write_metrics(tmp_path / "metrics.jsonl", [stock(1, 0), stock(2, 0, **broken), stock(3, 1, **broken)])
    part, nothing = read(tmp_path).summary["epochs"]
    assert (part["tokens"], part["rollout_s"], part["reward_mean"]) == (None, 8.0, pytest.approx(0.1))
    assert (nothing["tokens"], nothing["reward_mean"], nothing["useful_tokens_per_s"]) == (None, None, None)


def test_rollout_of_stock_separate_async_lasts_whole_steps(off: Path) -> None:
    """Its ``timing_s/gen`` is only the time the trainer waited."""
    rows = [stock(step, (step - 1) // 2, **{m.STEP_S: 20.0}) for step in range(1, 9)]
    write_metrics(off / "metrics.jsonl", rows)
    assert read(off).summary["epochs"][1]["rollout_s"] == 8.0
    config = off / steps.CONFIG_FILE
    config.parent.mkdir(parents=True)
    for mode, seconds in (("sync", 8.0), ("separate_async", 40.0)):
        config.write_text(f"trainer: {{v1: {{trainer_mode: {mode}}}}}")
        assert read(off).summary["epochs"][1]["rollout_s"] == seconds
    config.write_text("trainer: [")
    assert read(off).summary["epochs"][1]["rollout_s"] == 8.0


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


def test_the_report_names_the_sources_of_draft_tokens() -> None:
    epoch = {
        "drafted_by_source": {"history": 300, "siblings": 0, "own": 99, "others": 1, "new": None},
        "accepted_by_source": {"history": 100, "siblings": 0, "own": 0, "others": 0, "new": 0},
    }
    assert report._sources({"epochs": [{}, epoch]}) == (
        "draft tokens of the last epoch: history 75%, own 25%; accepted: history 100%"
    )
    assert report._sources({"epochs": [epoch | {"accepted_by_source": dict.fromkeys(SOURCES)}]}) == ""
    assert report._sources({"epochs": [{}]}) == report._sources({"epochs": []}) == ""


def main(arguments: list[str]) -> int:
    """Return the exit status of ``verl-rhyme report``."""
    with pytest.raises(SystemExit) as ended:
        app(["report", *arguments])
    return int(ended.value.code or 0)


def test_command_writes_and_lists_its_files(on: Path, capfd) -> None:
    assert main([str(on), "--name", "mine"]) == 0
    shown = capfd.readouterr().out
    assert shown.splitlines()[-2:] == [str(on / name) for name in ("summary.json", "report.html")]
    assert json.loads((on / "summary.json").read_text())["run"] == "mine"
    assert "2.50" in shown
    assert "60%" in shown
    assert "<h1>mine</h1>" in (on / "report.html").read_text()


def test_command_compares(off: Path, on: Path, capfd, tmp_path: Path) -> None:
    assert main([str(on), str(off), "--out", str(tmp_path / "both")]) == 0
    shown = capfd.readouterr().out
    result = json.loads((tmp_path / "both" / "summary.json").read_text())
    assert list(result["runs"]) == ["off", "histospec"]
    assert result["rollout_speedup_warm"] == 2.0
    assert "rollout speed 2.00x (2.00-2.00)" in " ".join(shown.split())
    assert [line.split()[:2] for line in shown.splitlines() if line.split()[:1] == ["1"]] == [["1", "histospec"]]
    assert "<h1>histospec vs. off</h1>" in (tmp_path / "both" / "report.html").read_text()


def test_bubble_ratios_with_unequal_slots_are_noted() -> None:
    note = ["bubble ratios are not comparable: the runs can fill different numbers of request slots (on 4, off 8)"]
    for slots, expected in ((8, note), (4, []), (None, [])):  # a stock run has none
        assert (
            report._unequal_slots([{"run": "on", "bubble_slots": 4}, {"run": "off", "bubble_slots": slots}]) == expected
        )


def test_the_logged_bubble_ratio_takes_precedence(on: Path) -> None:
    write_metrics(on / "metrics.jsonl", [stock(step, 0, **{m.BUBBLE_RATIO: 0.25}) for step in range(1, 9)])
    assert read(on).summary["epochs"][0]["bubble_ratio"] == 0.25
    assert read(on / "checkpoints").summary["epochs"][0]["bubble_ratio"] != 0.25, "from the event log"


def test_the_table_of_two_runs_with_long_names_fits_into_80_columns(off: Path, on: Path, capfd, tmp_path: Path) -> None:
    name = "sorted-partial-rolling-loaded-longest (a folder [of] mine)"
    assert main([str(on), str(off), "--out", str(tmp_path), "--name", name]) == 0
    table = capfd.readouterr().out.partition("against")[0].splitlines()
    assert f"A  {name}" in table
    assert max(map(len, table)) <= 80
    warm = next(line for line in table if "2 000" in line).split()
    assert {"2.50", "60%"} <= set(warm)


def run_report(capfd: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[str]]:
    """Return the exit status and the lines on standard error."""
    status = main([*map(str, arguments)])
    return status, capfd.readouterr().err.splitlines()


def test_a_folder_without_one_run_is_one_error(on: Path, capfd, tmp_path: Path) -> None:
    for name in ("one", "other"):
        shutil.copytree(on / "checkpoints", tmp_path / "runs" / name)
    several = f"contains several runs: give one of {tmp_path / 'runs' / 'one'}, {tmp_path / 'runs' / 'other'}"
    (tmp_path / "empty").mkdir()
    wrong = {"empty": "no finished training step", "nowhere": "no such folder", "runs": several}
    for folder, why in wrong.items():
        status, lines = run_report(capfd, tmp_path / folder)
        assert (status, len(lines)) == (1, 1)
        assert why in lines[0]


def test_runs_of_one_name_get_the_names_of_their_folders(on: Path, capfd, tmp_path: Path) -> None:
    shutil.copytree(on, tmp_path / "again")
    status, lines = run_report(capfd, on, tmp_path / "again")
    assert (status, len(lines)) == (0, 1)
    assert "both runs are named histospec: here they are histospec (on) and histospec (again)" in lines[0]
    assert list(json.loads((on / "summary.json").read_text())["runs"]) == ["histospec (again)", "histospec (on)"]
    status, lines = run_report(capfd, on, on)
    assert (status, len(lines)) == (1, 1)
    assert "are the same run" in lines[0]


def test_an_error_names_a_folder_that_is_not_writable(off: Path, capfd) -> None:
    (off / "file").touch()
    status, lines = run_report(capfd, off, "--out", off / "file" / "x")
    assert status == 1
    assert f"cannot write to {off / 'file' / 'x'} (Not a directory): set --out to a writable folder" in lines[-1]


def test_missing_data_are_reported_on_the_page_too(on: Path, off: Path, capfd) -> None:
    for path in (on / "checkpoints" / "events").glob("stages-*"):
        path.unlink()
    stages = "has no stages (stages-*.arrow): training and weight sync count as other"
    for run, why, shown in ((on, stages, True), (off, "has no event log", False)):
        status, lines = run_report(capfd, run)
        assert (status, len(lines)) == (0, 1)
        page = (run / "report.html").read_text()
        assert why in lines[0]
        assert why in page
        assert ("Replicas over time" in page) == shown
        assert "Reward, speed and length" in page


def test_the_trace_of_one_step(on: Path, capfd) -> None:
    for arguments, traced in (([], set(range(1, 9))), (["--step", "3"], {3})):
        assert run_report(capfd, on, "--perfetto", *arguments) == (0, [])
        spans = [event for event in json.loads((on / "trace.json").read_text())["traceEvents"] if event["ph"] == "X"]
        assert {event["args"]["step"] for event in spans} == traced
        assert len(spans) == 5 * len(traced)
    status, lines = run_report(capfd, on, "--perfetto", "--step", "99")
    assert status == 0
    assert "no request of step 99 was logged; steps 1 to 8 are available" in lines[0]


def test_the_table_of_two_runs_keeps_its_figures_in_80_columns() -> None:
    row = {
        **{"epoch": 1, "reward_mean": 0.123, "rollout_s": 123.4, "tokens": 1234567, "accept_length": 1.23},
        **{"accept_rate": 0.5, "history_hit_rate": 1.0, "bubble_ratio": 0.25, "staleness_mean": 0.3},
        "staleness_max": 1,
    }
    names = ["full-k2-no_drafting-qwen2-fsdp-separate_async", "off"]
    console = Console(width=80, file=io.StringIO())
    console.print(report._table([{"epochs": [row]}] * 2, names))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text
    assert text.count("(1)") == 2
    assert max(map(len, text.splitlines())) <= 80
