"""The report, from what verl logs, from the event log and from both."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from verl_rhyme.observability import metrics as m
from verl_rhyme.observability import report, steps
from verl_rhyme.observability.events import EventLog

EPOCH_KEYS = {
    "epoch",
    "reward_mean",
    "rollout_s",
    "tokens",
    "accept_length",
    "accept_rate",
    "history_hit_rate",
    "useful_tokens_per_s",
    "bubble_ratio",
    "staleness_max",
    "discarded_tokens",
    "reverified_tokens",
    "waiting_max",
    "length_rank_correlation",
}


def stock(step: int, epoch: int, **changes: Any) -> dict[str, Any]:
    """What stock verl logs of a step, as far as the report reads it."""
    data = {
        m.EPOCH: epoch,
        m.REWARD_MEAN: 0.1 * step,
        m.GEN_S: 4.0,
        m.GEN_MS_PER_TOKEN: 4000.0 / 800,
        m.STALENESS_MAX: 0,
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
    """Drafting from epoch 2 on: twice as fast, with more tokens; the event log knows the drafts."""
    rows = [
        stock(step, (step - 1) // 2, **({m.GEN_S: 2.0, m.GEN_MS_PER_TOKEN: 2000.0 / 1000} if step > 2 else {}))
        for step in range(1, 9)
    ]
    write_metrics(tmp_path / "on" / "metrics.jsonl", rows)
    log = EventLog(tmp_path / "on" / "checkpoints" / "events")
    log.describe(1, arm="histospec", slots=4, engine="vllm test")
    for step in range(1, 9):
        write_events(log, step, warm=step > 2)
    return tmp_path / "on"


def write_events(log: EventLog, step: int, warm: bool, validate: bool = False) -> None:
    log.append_requests(
        step,
        (step - 1) // 2,
        {
            "uid": ["a", "b", "c", "d"],
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


def test_without_an_event_log_the_folders_marker_names_the_arm(off: Path) -> None:
    (off / "checkpoints" / "events").mkdir(parents=True)
    (off / "checkpoints" / "events" / "run.json").write_text('{"slots": 4}')
    (off / "checkpoints" / "run.json").write_text('{"arm": "sorted-partial", "mode": "rhyme_sorted"}')
    assert report.summarize(off)["arm"] == "sorted-partial"
    assert report.summarize(off / "checkpoints", metrics_file=off / "metrics.jsonl")["arm"] == "sorted-partial"
    (off / "checkpoints" / "run.json").write_text("half a fi")
    assert report.summarize(off)["arm"] == "off"


def test_stock_run_is_reported_from_its_metrics_alone(off: Path) -> None:
    summary = report.summarize(off)
    assert set(summary) == {"arm", "epochs", "engine", "versions"}
    assert summary["arm"] == "off"
    assert summary["versions"]["numpy"] == np.__version__
    assert [row["epoch"] for row in summary["epochs"]] == [1, 2, 3, 4]
    assert all(set(row) == EPOCH_KEYS for row in summary["epochs"])
    first = summary["epochs"][0]
    assert first == {
        "epoch": 1,
        "reward_mean": pytest.approx(0.15),
        "rollout_s": 8.0,
        "tokens": 1600,
        "accept_length": 1.0,
        "accept_rate": None,
        "history_hit_rate": None,
        "useful_tokens_per_s": 200.0,
        "bubble_ratio": None,
        "staleness_max": 0,
        "discarded_tokens": None,
        "reverified_tokens": None,
        "waiting_max": None,
        "length_rank_correlation": None,
    }


def test_events_complete_the_metrics(on: Path) -> None:
    summary = report.summarize(on)
    assert (summary["arm"], summary["engine"]) == ("histospec", "vllm test")
    cold, warm = summary["epochs"][:2]
    assert (cold["accept_length"], cold["accept_rate"], cold["history_hit_rate"]) == (1.0, 0.0, 0.0)
    assert (warm["accept_length"], warm["accept_rate"], warm["history_hit_rate"]) == (2.5, 0.6, 1.0)
    assert (warm["rollout_s"], warm["tokens"]) == (4.0, 2000)
    assert warm["bubble_ratio"] == pytest.approx(1 - (1 + 2 + 2 + 3) / (4 * 3))
    assert warm["useful_tokens_per_s"] == 1600 / 4.0


def test_a_run_resumed_as_another_arm_names_both(on: Path) -> None:
    log = EventLog(on / "checkpoints" / "events")
    log.describe(3, arm="histospec")
    assert report.summarize(on)["arm"] == "histospec"
    log.describe(5, arm="histospec-undrafted")
    assert report.summarize(on)["arm"] == "histospec, from step 5 histospec-undrafted"


def test_no_bubble_without_the_useful_tokens_beside_it(tmp_path: Path) -> None:
    silent = {m.GEN_S: None, m.GEN_MS_PER_TOKEN: None}
    write_metrics(tmp_path / "metrics.jsonl", [stock(1, 0, **{m.BUBBLE_RATIO: 0.1, **silent})])
    (epoch,) = report.summarize(tmp_path)["epochs"]
    assert (epoch["useful_tokens_per_s"], epoch["bubble_ratio"]) == (None, None)


def test_events_alone_and_validation_left_out(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events")
    for step in (1, 2):
        log.append_stages(step, 0, {"stage": ["gen", "gen", "save_checkpoint"], "duration_s": [1.0, 3.0, 9.0]})
        write_events(log, step, warm=True)
        write_events(log, step, warm=False, validate=True)
    (epoch,) = report.summarize(tmp_path)["epochs"]
    assert epoch["reward_mean"] == pytest.approx(2 / 3)
    assert (epoch["rollout_s"], epoch["tokens"], epoch["useful_tokens_per_s"]) == (8.0, 1600, 200.0)
    assert (epoch["accept_length"], epoch["staleness_max"]) == (2.5, 0)


def test_resumed_run_counts_no_step_twice(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_metrics(path, [stock(step, 0, **{m.GEN_S: 1.0}) for step in (1, 2, 3, 4)])
    assert steps.set_aside(path) == tmp_path / "metrics-001.jsonl"
    # Resumed from step 2; killed in the middle of a line.
    write_metrics(path, [{"step": 2, "data": {"val-core/x": 1.0}}, stock(3, 0, **{m.GEN_S: 10.0})])
    with path.open("a") as file:
        file.write('{"step": 4, "data": {"timing_s/')
    assert steps.set_aside(path) == tmp_path / "metrics-002.jsonl"
    path.touch()  # a run that did nothing
    with pytest.warns(UserWarning, match=r"metrics-002.jsonl, line 3"):
        (epoch,) = report.summarize(tmp_path)["epochs"]
    assert epoch["rollout_s"] == 1.0 + 1.0 + 10.0


def test_unknown_is_null_not_a_guess(tmp_path: Path) -> None:
    broken = {m.REWARD_MEAN: None, m.GEN_MS_PER_TOKEN: None}
    write_metrics(tmp_path / "metrics.jsonl", [stock(1, 0), stock(2, 0, **broken), stock(3, 1, **broken)])
    part, nothing = report.summarize(tmp_path)["epochs"]
    assert (part["tokens"], part["rollout_s"], part["reward_mean"]) == (None, 8.0, pytest.approx(0.1))
    assert (nothing["tokens"], nothing["reward_mean"], nothing["useful_tokens_per_s"]) == (None, None, None)


def test_compare_takes_warm_epochs_only(off: Path, on: Path) -> None:
    result = report.compare(report.summarize(off), report.summarize(on))
    assert list(result["arms"]) == ["off", "histospec"]
    assert result["rollout_speedup_warm"] == 2.0
    assert result["rollout_speedup_warm_spread"] == [2.0, 2.0]
    assert result["tokens_per_s_speedup_warm"] == 2.5
    assert result["tokens_per_s_speedup_warm_spread"] == [2.5, 2.5]


def test_compare_is_a_ratio_of_medians_with_its_spread() -> None:
    def summary(arm: str, seconds: list[float]) -> dict[str, Any]:
        rows = [{"epoch": at, "rollout_s": s, "tokens": 100} for at, s in enumerate(seconds, 1)]
        return {"arm": arm, "epochs": rows}

    result = report.compare(summary("off", [99, 4, 6, 10]), summary("x", [1, 2, 4, 2]))
    assert result["rollout_speedup_warm"] == 6 / 2
    assert result["rollout_speedup_warm_spread"] == [1.5, 5.0]
    cold = report.compare(summary("off", [4]), summary("x", [2]))
    assert cold["rollout_speedup_warm"] is None
    assert cold["rollout_speedup_warm_spread"] is None
    with pytest.raises(report.ReportError, match="both arms are named 'x'"):
        report.compare(summary("x", [4]), summary("x", [2]))


def png_size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:24])
    return width, height


Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def cli() -> Cli:
    def call(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "verl_rhyme.observability.report", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    return call


def test_command_writes_and_names_both_files(on: Path, cli: Cli) -> None:
    done = cli(on, "--arm", "mine")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == [str(on / "summary.json"), str(on / "report.png")]
    assert json.loads((on / "summary.json").read_text())["arm"] == "mine"
    assert "2.50" in done.stdout
    assert "60%" in done.stdout
    width, height = png_size(on / "report.png")
    assert width > 800
    assert height > 500


def test_command_compares(off: Path, on: Path, cli: Cli, tmp_path: Path) -> None:
    done = cli("--compare", off, on, "--out", tmp_path / "both")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "both" / "summary.json").read_text())
    assert set(result["arms"]) == {"off", "histospec"}
    assert result["rollout_speedup_warm"] == 2.0
    assert "rollout time 2.00x (2.00-2.00)" in " ".join(done.stdout.split())
    png_size(tmp_path / "both" / "report.png")


def test_folder_without_a_run_is_one_clear_error(cli: Cli, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        done = cli(folder)
        assert done.returncode == 1
        assert "no finished training step" in done.stderr
        assert "Traceback" not in done.stderr
    assert cli().returncode == 2
