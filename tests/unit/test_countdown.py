"""The numbers game: its searches are right, its reward knows, its vocabulary is closed, its prompts are untrained."""

import random

import numpy as np
import pyarrow.parquet as pq
import pytest

from benchmarks import traces
from examples.countdown.make import make_data, vocabulary
from examples.countdown.reward import compute_score
from examples.countdown.sums import GREATEST, LIMIT, draw, search, steps
from examples.tiny_world import tokenizer as tokenizers
from examples.tiny_world.sampling import encode_prompt


def test_flawless_searches_earn_all_and_pass_through_the_tokenizer():
    rng, tokenizer = random.Random(0), tokenizers.build(vocabulary())
    for _ in range(200):
        task = draw(rng, supervised=True)
        prompt, response = tokenizer.encode(task.text()), tokenizer.encode(search(task, rng, flawed=False))
        assert tokenizer.unk_token_id not in prompt + response
        assert compute_score(None, tokenizer.decode(response), task.text())["score"] == 1.0


def test_flawed_searches_earn_less():
    rng = random.Random(1)
    scores = []
    for _ in range(400):
        task = draw(rng, supervised=True)
        scores.append(compute_score(None, search(task, rng), task.text())["score"])
    assert 0.1 < np.mean(np.array(scores) < 1) < 0.5


def test_steps_are_all_there_are():
    rng = random.Random(2)
    found = {step.result for step, _ in steps((12, 4), rng)}
    assert found == {16, 8, 48, 3}
    assert {step.result for step, _ in steps((GREATEST, GREATEST), rng)} == {40, 1}  # neither 0 nor 400
    for step, rest in steps((20, 7, 5), rng):
        assert 1 <= step.result <= LIMIT
        assert sorted((*rest, step.a, step.b)) == sorted((20, 7, 5, step.result))


def test_an_answer_must_be_steps_to_the_goal():
    task = "make 26 from 9, 4, 2"
    form = "<think> 9 + 4 = 13. </think> <answer> {} </answer>"
    for right in ("9 + 4 = 13, 13 * 2 = 26", "4+9=13,2*13=26"):
        assert compute_score(None, form.format(right), task) == {"score": 1.0, "acc": 1.0}
    wrong = (
        "",
        "26",
        "13 * 2 = 26",  # there is no 13
        "9 + 4 = 13",  # not the goal
        "9 + 4 = 14, 14 + 12 = 26",
        "9 * 2 = 18, 18 + 9 = 27, 27 - 1 = 26",  # 9 twice
        "13 / 0 = 26",
        "9 + 4 = 13, 13 * 2 = 26,",
    )
    for answer in wrong:
        assert compute_score(None, form.format(answer), task) == {"score": 0.1, "acc": 0.0}
    for malformed in ("9 + 4 = 13", "<think> a <answer> 9 + 4 = 13 </answer>", None):
        assert compute_score(None, malformed, task)["score"] == 0.0


def test_a_goal_may_be_made_of_some_of_the_numbers_and_by_parts():
    form = "<think> a </think> <answer> {} </answer>"
    assert compute_score(None, form.format("9 + 4 = 13"), "make 13 from 9, 4, 2")["acc"] == 1.0
    assert compute_score(None, form.format("8 / 2 = 4, 4 + 9 = 13"), "make 13 from 9, 8, 2")["acc"] == 1.0
    assert compute_score(None, form.format("9 / 2 = 4, 4 + 8 = 12"), "make 12 from 9, 8, 2")["acc"] == 0.0
    # what comes out as a number of the task adds one more of it
    assert compute_score(None, form.format("4 - 2 = 2, 2 + 9 = 11"), "make 11 from 9, 4, 2")["acc"] == 1.0


@pytest.mark.parametrize("seed", [0, 6])
def test_prompts_are_different_and_never_trained_on(tmp_path, seed):
    make_data(tmp_path, 64, seed)
    texts = [
        row["prompt"][0]["content"]
        for split in ("train", "test")
        for row in pq.read_table(tmp_path / f"{split}.parquet").to_pylist()
    ]
    assert len(set(texts)) == 128
    rng = random.Random(seed)
    trained = [draw(rng, supervised=True) for _ in range(2000)]
    assert all(task.supervised() for task in trained)
    assert not {task.text() for task in trained} & set(texts)


def test_the_trace_is_whole_and_of_the_prompts_its_recipe_makes(tmp_path):
    make_data(tmp_path, 64, seed=6)
    tokenizer = tokenizers.build(vocabulary())
    rows = pq.read_table(tmp_path / "train.parquet").to_pylist()
    prompts = {tuple(encode_prompt(tokenizer, row["prompt"][0]["content"])) for row in rows}
    steps = traces.load(traces.FOLDER / "countdown.parquet")
    assert [len(step) for step in steps] == [128] * 24
    for epoch in range(6):
        assert {tuple(r.prompt) for step in steps for r in step if r.epoch == epoch} == prompts
    first = steps[0][0]
    scored = compute_score(None, tokenizer.decode(first.tokens, skip_special_tokens=True), text_of(tokenizer, first))
    assert scored["score"] == pytest.approx(first.reward)


def text_of(tokenizer, response):
    return tokenizer.decode(response.prompt, skip_special_tokens=True)
