"""What ``verl-rhyme history`` tells of a store and of a snapshot."""

import json
import re

import numpy as np
import pytest
from typer.testing import CliRunner

from verl_rhyme.cli import app
from verl_rhyme.history.inspection import find, inspect, reusable
from verl_rhyme.history.record import PromptHistory, Trajectory
from verl_rhyme.history.store import HistoryStore

NAMESPACE = "vocabulary-a"


def trajectory(i, tokens, reward=1.0, epoch=0):
    return Trajectory(int(i).to_bytes(16, "big"), np.array(tokens, np.int32), reward, epoch, epoch, 0)


@pytest.fixture
def store(tmp_path):
    with HistoryStore(tmp_path / "h", NAMESPACE, max_bytes=1 << 22, epochs=2) as opened:
        for epoch in range(2):
            opened.append([trajectory(i, range(100 + epoch * 50), 0.5 + epoch, epoch) for i in range(3)], epoch)
        yield opened


def test_a_live_store_and_its_snapshot_say_the_same(store, tmp_path):
    store.snapshot(tmp_path / "step" / "history")
    for path in (tmp_path / "h", tmp_path / "step"):
        [folder] = find(path)
        found = inspect(folder)
        assert (found.prompts, found.responses, found.tokens, found.corrupt) == (3, 6, 750, 0)
        assert found.namespace == NAMESPACE
        assert found.visits[0] == {"responses": 3, "tokens": 450, "reward_mean": 1.5}
        assert found.visits[1] == {"responses": 3, "tokens": 300, "reward_mean": 0.5}
        assert found.reusable == pytest.approx((100 - 4) / (150 - 4))
    store.append([trajectory(9, [1])], 7)  # the writer was not disturbed


def test_a_prompt_with_one_epoch_has_nothing_to_compare():
    assert reusable(PromptHistory.build([trajectory(0, [1, 2, 3])])) == (0, 0)
    assert reusable(PromptHistory.build([])) == (0, 0)


def test_command_line(store, tmp_path):
    told = CliRunner().invoke(app, ["history", str(tmp_path / "h")])
    assert told.exit_code == 0
    assert "3 prompts, 6 responses, 750 tokens" in told.output
    assert "66% of the latest visits' tokens" in told.output
    found = json.loads(CliRunner().invoke(app, ["history", "--json", str(tmp_path / "h")]).output)
    assert found["responses"] == 6
    missing = CliRunner().invoke(app, ["history", str(tmp_path / "nothing")])
    assert missing.exit_code == 1
    assert "holds no history" in missing.output
    assert missing.output.count(str(tmp_path / "nothing")) == 1


def test_rewards_that_are_no_numbers_are_left_out_of_the_mean(store, tmp_path):
    """Python would write them as NaN, which is no JSON."""
    store.append([trajectory(i, [1, 2], reward, 7) for i, reward in enumerate([2.0, np.nan, np.inf])], 7)
    told = CliRunner().invoke(app, ["history", "--json", str(tmp_path / "h")]).output
    assert json.loads(told, parse_constant=pytest.fail)["visits"]["0"]["reward_mean"] == 2.0
    store.append([trajectory(i, [1, 2], np.nan, 8) for i in range(3)], 8)
    told = CliRunner().invoke(app, ["history", "--json", str(tmp_path / "h")]).output
    assert json.loads(told, parse_constant=pytest.fail)["visits"]["0"]["reward_mean"] is None
    assert "mean reward unknown" in CliRunner().invoke(app, ["history", str(tmp_path / "h")]).output


def test_checkpoints_come_in_the_order_of_their_steps(store, tmp_path):
    for step in (4, 8, 12, 100):
        store.snapshot(tmp_path / "run" / f"global_step_{step}" / "history")
    told = CliRunner().invoke(app, ["history", str(tmp_path / "run")])
    steps = [int(step) for step in re.findall(r"global_step_(\d+)", told.output)]
    assert steps == [4, 8, 12, 100]


def test_a_damaged_snapshot_is_an_error_that_names_it(store, tmp_path):
    store.snapshot(tmp_path / "s")
    with open(tmp_path / "s" / "data.mdb", "r+b") as file:
        file.truncate(5000)
    failed = CliRunner().invoke(app, ["history", str(tmp_path / "s")])
    assert failed.exit_code == 1
    assert str(tmp_path / "s") in failed.output.replace("\n", "")
