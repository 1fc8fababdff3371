"""``verl-rhyme ranker``: data from a run's log or a history, and errors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from examples.tiny_world import data
from tests.unit.lengths.worlds import pairs
from verl_rhyme.cli import app
from verl_rhyme.commands import ranker_data
from verl_rhyme.history.keys import data_key, prompt_key, template_label
from verl_rhyme.history.record import Trajectory
from verl_rhyme.history.store import HistoryStore
from verl_rhyme.lengths.pairs import Pairs
from verl_rhyme.observability.events import EventLog

TOKENIZER = Path(__file__).parents[3] / "examples" / "tiny_world" / "models" / "qwen2"


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


@pytest.fixture(scope="module")
def history(tmp_path_factory) -> tuple[Path, Path]:
    """History of 32 puzzles, and their data file."""
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


def output_of(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["ranker", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def error_of(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["ranker", *map(str, arguments)])
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.output
    return result.output


def test_prompts_and_lengths_from_a_run(run) -> None:
    known, found = pairs(64), ranker_data.read(run)
    assert {tuple(p) for p in found.prompts} == {tuple(p) for p in known.prompts}
    assert sum(map(len, found.lengths)) == sum(map(len, known.lengths))
    assert np.concatenate(found.lengths).sum() == np.concatenate(known.lengths).sum()


def test_prompts_and_lengths_from_a_history_and_its_data(history) -> None:
    folder, file = history
    pairs = ranker_data.read(folder, [file], TOKENIZER)
    assert len(pairs) == 32
    row = pq.read_table(file).slice(0, 1).to_pylist()[0]
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    key = data_key({"raw_prompt": row["prompt"], "extra_info": row["extra_info"]}, template_label(tokenizer))
    assert bytes.fromhex(key) in ranker_data._tokenized([file], TOKENIZER, "prompt"), "the key of a run"
    for prompt, lengths in zip(pairs.prompts, pairs.lengths, strict=True):
        assert lengths.tolist() == [len(prompt), len(prompt) + 1]
    assert len(pq.read_table(file)) == 40


def test_train_and_evaluate(run, tmp_path) -> None:
    row = json.loads(output_of("train", run, "--out", tmp_path / "r", "--json", "--epochs", "2"))
    assert row["prompts"] == 51
    assert row["measured_on"] == 13
    again = json.loads(output_of("evaluate", run, tmp_path / "r", "--json"))
    assert again["measured_on"] == 13  # exactly the held-out prompts
    assert again["share_20"] == row["share_20"]
    assert json.loads(output_of("evaluate", run, tmp_path / "r", "--all", "--json"))["measured_on"] == 64
    assert "13 unseen prompts" in output_of("evaluate", run, tmp_path / "r")


def test_training_starts_from_a_model(history, tmp_path) -> None:
    folder, file = history
    source = (folder, "--data", file, "--tokenizer", TOKENIZER)
    output = output_of("train", *source, "--out", tmp_path / "r", "--model", TOKENIZER, "--epochs", 1, "--rate", 1e-4)
    assert "20% of responses" in output
    assert "trained on 26 prompts" in output


def test_error_messages(run, history, tmp_path) -> None:
    out = ("--out", tmp_path / "r")
    folder, file = history
    assert "is not a folder" in error_of("train", tmp_path / "none", *out)
    assert "events.responses=true" in error_of("train", tmp_path, *out)
    assert "--data" in error_of("train", folder, *out)
    assert "cannot read column wrong" in error_of(
        "train", folder, "--data", file, "--tokenizer", TOKENIZER, "--column", "wrong", *out
    )
    assert "--tokenizer" in error_of("train", folder, "--data", file, "--tokenizer", tmp_path, *out)
    assert "config.json" in error_of("train", run, "--model", tmp_path, *out)
    assert "positive rate" in error_of("train", run, "--rate", 0, *out)
    assert "--test" in error_of("train", run, "--test", 2, *out)
    assert "no length ranker" in error_of("evaluate", run, tmp_path)
    other = data.write(tmp_path, "test", 8, seed=3)
    assert "another run's data" in error_of("train", folder, "--data", other, "--tokenizer", TOKENIZER, *out)
    source = (folder, "--data", file, "--tokenizer", TOKENIZER)
    assert "--template" in error_of("train", *source, "--template", "[1]", *out)
    assert "not JSON" in error_of("train", *source, "--template", "{", *out)
    another = json.dumps({"chat_template": "{{ messages[0].content }} again"})
    assert "apply_chat_template_kwargs" in error_of("train", *source, "--template", another, *out)


def test_pairs_without_lengths_are_an_error() -> None:
    with pytest.raises(ValueError, match="has no length"):
        Pairs([np.ones(2, np.int32)], [np.zeros(0, np.int32)])
