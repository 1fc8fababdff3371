"""``verl-rhyme ranker``: data from a run's event log, and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.unit.lengths.worlds import pairs
from verl_rhyme.cli import app
from verl_rhyme.commands import ranker
from verl_rhyme.history.keys import prompt_key
from verl_rhyme.observability.events import EventLog

MODEL = Path(__file__).parents[3] / "examples" / "tiny_world" / "models" / "qwen2"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Run folder whose log has responses to 64 prompts, in two steps."""
    folder, known = tmp_path_factory.mktemp("run"), pairs(64)
    log = EventLog(folder / "checkpoints" / "events")
    for step in (1, 2):
        rows = [(p, n) for p, of in zip(known.prompts, known.lengths, strict=True) for n in of[2 * step - 2 : 2 * step]]
        columns = {
            "prompt_key": [prompt_key(prompt) for prompt, _ in rows],
            "sample": 0,
            "prompt": [prompt.tolist() for prompt, _ in rows],
            "tokens": [[1] * n for _, n in rows],
        }
        log.append_responses(step, 0, columns)
    return folder


def output_of(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["ranker", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_prompts_and_lengths_of_a_run(run) -> None:
    known, found = pairs(64), ranker.read(run)
    lengths = {tuple(prompt): of.tolist() for prompt, of in zip(known.prompts, known.lengths, strict=True)}
    assert {tuple(p): of.tolist() for p, of in zip(found.prompts, found.lengths, strict=True)} == lengths


def test_train_and_evaluate(run, tmp_path) -> None:
    row = json.loads(output_of("train", run, "--out", tmp_path / "r", "--json", "--epochs", "2"))
    assert (row["prompts"], row["measured_on"]) == (51, 13)
    again = json.loads(output_of("evaluate", run, tmp_path / "r", "--json"))
    assert (again["measured_on"], again["share_20"]) == (13, row["share_20"]), "not exactly the held-out prompts"
    assert "13 unseen prompts" in output_of("evaluate", run, tmp_path / "r")
    output = output_of("train", run, "--out", tmp_path / "r", "--model", MODEL, "--epochs", 1, "--rate", 1e-4)
    assert "20% of responses" in output
    assert "trained on 51 prompts" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "{empty}", "--out", "{empty}"], "events.responses=true"),
        (["train", "{run}", "--out", "{empty}", "--model", "{empty}"], "config.json"),
        (["train", "{run}", "--out", "{empty}", "--test", "2"], "--test"),
        (["evaluate", "{run}", "{empty}"], "no length ranker"),
    ],
)
def test_error_messages(run, tmp_path, arguments, message) -> None:
    result = CliRunner().invoke(app, ["ranker", *(each.format(run=run, empty=tmp_path) for each in arguments)])
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert message in result.output
