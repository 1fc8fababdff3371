"""The second task: its searches are right, its reward knows, its vocabulary is closed."""

import random

import numpy as np

from examples.roads.make import vocabulary
from examples.roads.maps import draw, search
from examples.roads.reward import compute_score
from examples.tiny_world import tokenizer as tokenizers


def test_flawless_searches_earn_all_and_pass_through_the_tokenizer():
    rng, tokenizer = random.Random(0), tokenizers.build(vocabulary())
    for _ in range(200):
        task = draw(rng)
        prompt, response = tokenizer.encode(task.text()), tokenizer.encode(search(task, rng, flawed=False))
        assert tokenizer.unk_token_id not in prompt + response
        assert compute_score(None, tokenizer.decode(response), task.text())["score"] == 1.0


def test_flawed_searches_earn_less():
    rng = random.Random(1)
    scores = []
    for _ in range(400):
        task = draw(rng)
        scores.append(compute_score(None, search(task, rng), task.text())["score"])
    assert 0.1 < np.mean(np.array(scores) < 1) < 0.5


def test_an_answer_must_be_a_way():
    task = "roads: hull: york. york: hull bath. bath: york. from hull to bath"
    form = "<think> at hull: york. </think> <answer> {} </answer>"
    assert compute_score(None, form.format("hull york bath"), task) == {"score": 1.0, "acc": 1.0}
    for wrong in ("hull bath", "york bath", "hull york", "hull", "", "hull york hull bath"):
        assert compute_score(None, form.format(wrong), task) == {"score": 0.1, "acc": 0.0}
    for malformed in ("hull york bath", "<think> a <answer> hull york bath </answer>", None):
        assert compute_score(None, malformed, task)["score"] == 0.0
