"""Rewards: the same answer in any form and never another one, for any response, in bounded time, in verl's threads."""

import itertools
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from examples.data import logic_reward, math_reward
from examples.data.math_reward import compute_score, extract_answer, is_equal
from examples.tiny_world import reward as tiny_reward
from tests.conftest import cpu_seconds

TRUTH = "Ann knight, Ben knave"


@pytest.mark.parametrize(
    ("truth", "right", "wrong"),
    [
        ("1/2", ["0.5", r"\frac12", r"\dfrac{1}{2}", "$0.50$"], ["2", "1, 2", "0.501"]),
        ("42", ["42.", r"\(42\)", "042", r"\text{42}", "x=42", "6*7"], ["420", "-42", "", "42 or 43", "42=43"]),
        ("10080", ["10,080", "10{,}080", r"10,\!080", r"10080\text{ cm}^2"], ["10.080", "10080 pi", "10080x"]),
        (r"50\%", ["50", "50%"], ["0.5"]),
        ("1,-2", ["-2, 1", r"\{1,-2\}", "x=1, x=-2"], ["1", "1,-2,3"]),
        ("[0,1)", [r"\left[0, 1\right)"], ["(0,1)", "(1,0]"]),
        (r"\text{Evelyn}", ["Evelyn", r"\textbf{evelyn}"], ["lynEve", "E"]),
    ],
)
def test_equal_answers(truth, right, wrong):
    assert [is_equal(truth, answer) for answer in right + wrong] == [True] * len(right) + [False] * len(wrong)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"so \boxed{41}, no: \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("Work.\n**Answer:** 42\n", "42"),
        ("Answer: the final answer is $42$.", "42"),
        (r"<think> \boxed{41} </think> I do not know.", None),
        ("#### 42", None),
    ],
)
def test_the_last_answer_counts(response, answer):
    assert extract_answer(response) == answer


def test_scores_and_their_conventions():
    wrong = r"Thus \boxed{0.6}"
    assert compute_score("math_dapo", r"Thus \boxed{0.5}", "1/2") == {"score": 1.0, "acc": 1.0, "pred": "0.5"}
    assert compute_score("math_dapo", wrong, "1/2", wrong_score=-1) == {"score": -1.0, "acc": 0.0, "pred": "0.6"}
    assert compute_score("openai/gsm8k", "5 + 5 = 10\n#### 1,010 apples", "1010")["acc"] == 1
    dapo = math_reward.compute_dapo_score
    assert dapo("math_dapo", "Answer: 0.5", "\\frac{1}{2}")["score"] == -1.0, "verl compares text"
    assert dapo("math-ai/amc23", "Answer: 0.5", "\\frac{1}{2}")["score"] == 1.0


@pytest.mark.parametrize("answer", ["9^{9^{9}}!", "(x+1)^{5000}"])
def test_hostile_answers_end_in_time(answer):
    is_equal("1/2", "0.5")  # the process that compares runs
    start = time.monotonic()
    assert compute_score("math_dapo", rf"\boxed{{{answer}}}", r"\frac{7}{3}", time_limit=1)["acc"] == 0
    assert time.monotonic() - start < 4
    assert is_equal(r"\frac{7}{3}", "14/6")


def test_threads_get_their_own_answers_from_a_process_that_is_replaced():
    def right(i):
        return is_equal(f"{2 * i + (i % 2)}/14", rf"\frac{{{i}}}{{7}}")

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(right, range(1, 41))) == [i % 2 == 0 for i in range(1, 41)]
    checker = math_reward._Checker()
    assert checker.is_equal("1/2", "0.5", 5)
    checker._process.kill()
    assert checker.is_equal("1/2", "0.5", 5)


@pytest.mark.parametrize(
    ("text", "logic", "tiny"),
    [
        ("<think> x </think> <answer> Ann knight, Ben knave </answer>", 3, 1.0),
        ("<think> x </think>\n<answer>\n- **Ben**: Knave\n- **Ann**: Knight</answer>\n", 3, None),
        ("<think> x </think> <answer> Ann knight, Ben knight </answer>", -0.5, 0.15),
        ("<think> x </think> <answer> Ann knight </answer>", -1, 0.15),
        ("<think> x </think> <answer> Ann knight, Ben knave, Cal knave </answer>", -1, 0.1),
        ("<think> x </think> <answer> Ann is not a knave, Ben is a knave </answer>", -1, None),
        ("<think> <think> </think> <answer> Ann knight, Ben knave </answer>", -3, 0),
        ("x </think> <answer> Ann knight, Ben knave </answer>", -3, 0),
    ],
)
def test_puzzles_are_scored_by_format_and_answer(text, logic, tiny):
    assert logic_reward.compute_score("kk", text, TRUTH)["score"] == logic
    assert tiny is None or tiny_reward.compute_score("", text, TRUTH)["score"] == pytest.approx(tiny)
    if text.startswith("x"):
        assert logic_reward.compute_score("kk", text, TRUTH, think_in_prompt=True)["score"] == 3


TAGS = ["<think>", "</think>", "<answer>", "</answer>", "Ann", "is a", "knight", ",", "\x00", "\ud800", "🗡", "(", "\\"]
MATH = [*"}{$\\\x00\ud800²٣,\n=(%", "\\boxed{", "Answer:", "####", "42"]


@pytest.mark.parametrize(
    ("reward", "pieces", "truth", "least", "most"),
    [(tiny_reward, TAGS, TRUTH, 0, 1), (logic_reward, TAGS, TRUTH, -3, 3), (math_reward, MATH, "1000", 0, 1)],
)
def test_any_response_gets_a_score(reward, pieces, truth, least, most):
    rng = random.Random(0)
    for _ in range(1000):
        text = " ".join(rng.choices(pieces, k=rng.randint(0, 12)))
        assert least <= reward.compute_score("openai/gsm8k", text, truth)["score"] <= most
    for text, other in itertools.product((None, 3, b"x", {}, r"\boxed{1}"), (None, {}, truth)):
        assert reward.compute_score(None, text, other)["score"] == least
    assert cpu_seconds(lambda: reward.compute_score(None, pieces[-4] * 100_000 + "answer: " * 100_000, "1")) < 2
