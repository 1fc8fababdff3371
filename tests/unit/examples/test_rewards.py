"""Every reward gives each response a score, in bounded time."""

import itertools
import random
import time

import pytest

from examples.data import logic_reward, math_reward
from examples.tiny_world import reward as tiny_reward

TRUTH = "Ann knight, Ben knave"
TAGS = ["<think>", "</think>", "<answer>", "</answer>", "Ann", "is a", "knight", ",", "\x00", "\ud800", "🗡", "(", "\\"]
MATH = [*"}{$\\\x00\ud800²٣,\n=(%", "\\boxed{", "Answer:", "####", "42"]


@pytest.mark.parametrize(
    ("reward", "pieces", "truth", "least", "most"),
    [
        (tiny_reward, TAGS, TRUTH, 0, 1),
        (logic_reward, TAGS, TRUTH, -3, 3),
        (math_reward, MATH, "1000", 0, 1),
    ],
)
def test_any_response_gets_a_score(reward, pieces, truth, least, most):
    rng = random.Random(0)
    for _ in range(2000):
        text = " ".join(rng.choices(pieces, k=rng.randint(0, 12)))
        assert least <= reward.compute_score("openai/gsm8k", text, truth)["score"] <= most
    for text, other in itertools.product((None, 3, b"x", pieces[:1], {}, r"\boxed{1}"), (None, 3, {}, truth)):
        assert reward.compute_score(None, text, other)["score"] == least
    start = time.monotonic()
    reward.compute_score(None, pieces[-4] * 100_000 + "answer: " * 100_000, "1")
    assert time.monotonic() - start < 2
