"""Tasks of the pretrained model, their reward, and the model's folder."""

import itertools
import json
import os
import random
from pathlib import Path

import pytest

from examples.smollm2 import data, model, reward
from tests.conftest import ONLY_SLOW


@pytest.mark.parametrize("kind", data.KINDS)
def test_only_the_tasks_own_solution_gets_the_reward(kind):
    rng = random.Random(1)
    tasks = [data.KINDS[kind](rng) for _ in range(50)]
    for task, other in itertools.pairwise(tasks):
        assert reward.compute_score("", task.solution, task.answer)["score"] == 1.0
        if other.answer != task.answer:
            assert reward.compute_score("", other.solution, task.answer)["score"] == 0.0
        assert reward.compute_score("", task.steps, task.answer)["score"] == 0.0


@pytest.mark.parametrize(
    ("said", "score"),
    [
        ("The answer is 12.", 1.0),
        ("the answer is x = 12", 1.0),
        ("The answer is 13. No: the answer is 12.", 1.0),
        ("The answer is 12. No: the answer is 13.", 0.0),
        ("The answer is 121.", 0.0),
        ("The answer is -12.", 0.0),
        ("The answer is", 0.0),
        ("12", 0.0),
        ("", 0.0),
        (None, 0.0),
    ],
)
def test_the_last_answer_counts(said, score):
    assert reward.compute_score("", said, "12")["score"] == score


def test_no_task_is_in_both_splits_and_every_prompt_shows_its_examples():
    splits = {
        split: [task.question for _, task in itertools.islice(data.tasks(1, split), 200)] for split in ("train", "test")
    }
    assert not set(splits["train"]) & set(splits["test"])
    shown = {task.question for kind in data.KINDS for task in data.examples(kind, 2)}
    assert not shown & {*splits["train"], *splits["test"]}
    assert all(len(set(questions)) == 200 for questions in splits.values())
    task = data.story(random.Random(3))
    for shots in (0, 2):
        turns = data.chat("stories", task, shots)
        assert [turn["role"] for turn in turns] == ["user", "assistant"] * shots + ["user"]
        assert turns[-1]["content"].startswith(task.question)


@ONLY_SLOW  # fetches 93 MB
@pytest.mark.timeout(300)
def test_the_model_is_converted_once_and_ends_its_turns(tmp_path, monkeypatch):
    """The conversion checks an answer."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    monkeypatch.setenv("UV_CACHE_DIR", os.environ.get("UV_CACHE_DIR") or str(caches / "uv"))  # 93 MB, once
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "verl_rhyme" / ".making-killed").mkdir(parents=True)
    folder = model.folder()
    made = (folder / "config.json").stat().st_mtime_ns
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["num_hidden_layers"], config["vocab_size"]) == ("llama", 30, 49152)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token == tokenizer.pad_token == model.END
    assert config["eos_token_id"] == tokenizer.convert_tokens_to_ids(model.END) == 2
    assert model.folder() == folder
    assert (folder / "config.json").stat().st_mtime_ns == made
    assert [path.name for path in Path(folder).parent.iterdir() if path.name.startswith(".making")] == []
