"""Output of ``verl-rhyme history`` for a store and for a snapshot."""

import json
import os
import re

import pytest
from typer.testing import CliRunner

from tests.unit.history.stores import NAMESPACE, open_store, trajectory
from verl_rhyme.cli import app


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path / "h") as opened:
        for epoch in range(2):
            opened.append([trajectory(i, range(100 + epoch * 50), epoch) for i in range(3)], epoch)
        yield opened


def run(path, *options):
    result = CliRunner().invoke(app, ["history", *options, str(path)])
    return result.exit_code, result.output


def test_a_live_store_and_its_snapshot_have_the_same_contents(store, tmp_path):
    store.snapshot(tmp_path / "step" / "history")
    for path in (tmp_path / "h", tmp_path / "step"):
        status, output = run(path)
        assert "3 prompts, 6 responses, 750 tokens" in output
        found = json.loads(run(path, "--json")[1])
        assert [found[name] for name in ("prompts", "responses", "tokens", "corrupt")] == [3, 6, 750, 0]
        assert (status, found["namespace"]) == (0, NAMESPACE)
    assert store.append([trajectory(9, [1])], 7).trajectories == 1, "the writer was not disturbed"


def test_checkpoints_come_in_the_order_of_their_steps(store, tmp_path):
    for step in (4, 12, 100):
        store.snapshot(tmp_path / "run" / f"global_step_{step}" / "history")
    assert re.findall(r"global_step_(\d+)", run(tmp_path / "run")[1]) == ["4", "12", "100"]


def test_nothing_to_read_is_an_error_with_its_path(store, tmp_path):
    store.snapshot(tmp_path / "s")
    os.truncate(tmp_path / "s" / "data.mdb", 5000)
    for path, fault in ((tmp_path / "s", "truncated"), (tmp_path / "nothing", "holds no history")):
        status, output = run(path)
        assert status == 1
        assert output.replace("\n", "").count(str(path)) == 1
        assert fault in output
