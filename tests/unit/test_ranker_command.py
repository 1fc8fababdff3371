"""``verl-rhyme ranker``: from a run's log and from a history with its data; what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from examples.tiny_world import data
from tests.unit.lengths.test_ranker import world
from verl_rhyme.cli import app
from verl_rhyme.commands import ranker_data
from verl_rhyme.history.keys import data_key, prompt_key, template_label
from verl_rhyme.history.record import Trajectory
from verl_rhyme.history.store import HistoryStore
from verl_rhyme.lengths.pairs import Pairs
from verl_rhyme.observability.events import EventLog

TOKENIZER = Path(__file__).parents[2] / "examples" / "tiny_world" / "models" / "qwen2"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run folder whose log has responses to 64 prompts, in two steps."""
    folder, known = tmp_path_factory.mktemp("run"), world(64)
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


@pytest.fixture(scope="module")
def history(tmp_path_factory) -> tuple[Path, Path]:
    """A history of 32 puzzles, and their data file."""
    folder = tmp_path_factory.mktemp("history")
    file = data.write(folder, "train", 40, seed=0)
    tokens = ranker_data._tokenized([file], TOKENIZER, "prompt")
    with HistoryStore(folder / "h", "words", max_bytes=1 << 22, epochs=2) as store:
        for epoch in range(2):
            store.append(
                [
                    Trajectory(key, np.arange(len(ids) + epoch, dtype=np.int32), 1.0, epoch, epoch, 0)
                    for key, ids in list(tokens.items())[:32]
                ],
                epoch,
            )
    return folder / "h", file


def told(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["ranker", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["ranker", *map(str, arguments)])
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.output
    return result.output


def test_a_run_tells_prompts_and_lengths(run) -> None:
    known, found = world(64), ranker_data.read(run)
    assert {tuple(p) for p in found.prompts} == {tuple(p) for p in known.prompts}
    assert sum(map(len, found.lengths)) == sum(map(len, known.lengths))
    assert np.concatenate(found.lengths).sum() == np.concatenate(known.lengths).sum()


def test_a_history_and_its_data_tell_them_too(history) -> None:
    folder, file = history
    found = ranker_data.read(folder, [file], TOKENIZER)
    assert len(found) == 32
    row = pq.read_table(file).slice(0, 1).to_pylist()[0]
    policys = AutoTokenizer.from_pretrained(TOKENIZER)
    key = data_key({"raw_prompt": row["prompt"], "extra_info": row["extra_info"]}, template_label(policys))
    assert bytes.fromhex(key) in ranker_data._tokenized([file], TOKENIZER, "prompt"), "as a run finds it"
    for prompt, lengths in zip(found.prompts, found.lengths, strict=True):
        assert lengths.tolist() == [len(prompt), len(prompt) + 1]
    assert len(pq.read_table(file)) == 40


@pytest.mark.parametrize("kind", [("--boosting",), ("--epochs", "2", "--loss", "margin")])
def test_train_and_evaluate(run, tmp_path, kind) -> None:
    row = json.loads(told("train", run, "--out", tmp_path / "r", "--json", *kind))
    assert row["prompts"] == 51
    assert row["measured_on"] == 13
    again = json.loads(told("evaluate", run, tmp_path / "r", "--json"))
    assert again["measured_on"] == 13  # those that were left out, and no others
    assert again["share_20"] == row["share_20"]
    assert json.loads(told("evaluate", run, tmp_path / "r", "--all", "--json"))["measured_on"] == 64
    assert "13 prompts that it was not trained on" in told("evaluate", run, tmp_path / "r")


def test_it_begins_with_a_model(history, tmp_path) -> None:
    folder, file = history
    source = (folder, "--data", file, "--tokenizer", TOKENIZER)
    output = told("train", *source, "--out", tmp_path / "r", "--model", TOKENIZER, "--epochs", 1, "--rate", 1e-4)
    assert "20% of responses" in output
    assert "trained on 26 prompts" in output


def test_what_is_wrong_is_told(run, history, tmp_path) -> None:
    out = ("--out", tmp_path / "r")
    folder, file = history
    assert "is no folder" in refused("train", tmp_path / "none", *out)
    assert "events.responses=true" in refused("train", tmp_path, *out)
    assert "--data" in refused("train", folder, *out)
    assert "no column wrong" in refused(
        "train", folder, "--data", file, "--tokenizer", TOKENIZER, "--column", "wrong", *out
    )
    assert "--tokenizer" in refused("train", folder, "--data", file, "--tokenizer", tmp_path, *out)
    assert "config.json" in refused("train", run, "--model", tmp_path, *out)
    assert "listwise" in refused("train", run, "--loss", "lambda", *out)
    assert "--test" in refused("train", run, "--test", 2, *out)
    assert "no length ranker" in refused("evaluate", run, tmp_path)
    other = data.write(tmp_path, "test", 8, seed=3)
    assert "another run's data" in refused("train", folder, "--data", other, "--tokenizer", TOKENIZER, *out)
    source = (folder, "--data", file, "--tokenizer", TOKENIZER)
    assert "--template" in refused("train", *source, "--template", "[1]", *out)
    assert "no JSON" in refused("train", *source, "--template", "{", *out)
    another = json.dumps({"chat_template": "{{ messages[0].content }} again"})
    assert "apply_chat_template_kwargs" in refused("train", *source, "--template", another, *out)


def test_pairs_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="has no length"):
        Pairs([np.ones(2, np.int32)], [np.zeros(0, np.int32)])
