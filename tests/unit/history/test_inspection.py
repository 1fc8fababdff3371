"""Output of ``verl-rhyme history`` for a store and for a snapshot."""

import json
import re

import pytest
from typer.testing import CliRunner

from tests.unit.history.stores import NAMESPACE, open_store, trajectory
from verl_rhyme.cli import app
from verl_rhyme.history.inspection import find, inspect


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path / "h") as opened:
        for epoch in range(2):
            opened.append([trajectory(i, range(100 + epoch * 50), epoch) for i in range(3)], epoch)
        yield opened


def test_a_live_store_and_its_snapshot_have_the_same_contents(store, tmp_path):
    store.snapshot(tmp_path / "step" / "history")
    for path in (tmp_path / "h", tmp_path / "step"):
        [folder] = find(path)
        found = inspect(folder)
        assert (found.prompts, found.responses, found.tokens, found.corrupt) == (3, 6, 750, 0)
        assert found.namespace == NAMESPACE
    store.append([trajectory(9, [1])], 7)  # the writer was not disturbed


def test_command_line(store, tmp_path):
    result = CliRunner().invoke(app, ["history", str(tmp_path / "h")])
    assert result.exit_code == 0
    assert "3 prompts, 6 responses, 750 tokens" in result.output
    found = json.loads(CliRunner().invoke(app, ["history", "--json", str(tmp_path / "h")]).output)
    assert found["responses"] == 6
    missing = CliRunner().invoke(app, ["history", str(tmp_path / "nothing")])
    assert missing.exit_code == 1
    assert "holds no history" in missing.output
    assert missing.output.count(str(tmp_path / "nothing")) == 1


def test_checkpoints_come_in_the_order_of_their_steps(store, tmp_path):
    for step in (4, 8, 12, 100):
        store.snapshot(tmp_path / "run" / f"global_step_{step}" / "history")
    result = CliRunner().invoke(app, ["history", str(tmp_path / "run")])
    steps = [int(step) for step in re.findall(r"global_step_(\d+)", result.output)]
    assert steps == [4, 8, 12, 100]


def test_a_damaged_snapshot_is_an_error_with_its_path(store, tmp_path):
    store.snapshot(tmp_path / "s")
    with open(tmp_path / "s" / "data.mdb", "r+b") as file:
        file.truncate(5000)
    failed = CliRunner().invoke(app, ["history", str(tmp_path / "s")])
    assert failed.exit_code == 1
    assert str(tmp_path / "s") in failed.output.replace("\n", "")
