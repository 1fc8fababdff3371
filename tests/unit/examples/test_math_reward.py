"""Reward of mathematics: the same answer in any form, never another one, in bounded time, in verl's threads."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from examples.data import math_reward
from examples.data.math_reward import compute_score, extract_answer, is_equal


@pytest.mark.parametrize(
    ("truth", "answers"),
    [
        ("1/2", ["0.5", r"\frac12", r"\dfrac{1}{2}", r"\frac{2}{4}", "$0.50$"]),
        ("42", ["42", "42.", "$42$", r"\(42\)", "042", "42.0", r"\text{42}", "x=42", "6*7", "+42"]),
        ("-7", ["-7", "- 7", "x = -7"]),
        ("10080", ["10,080", "10{,}080", r"10,\!080", r"10\,080"]),
        ("18", [r"\$18", "$18", "18 dollars", r"18 \text{ dollars}", "18.00"]),
        ("5", ["5 cm", r"5\text{ cm}^2", r"5\ \mathrm{cm}"]),
        ("90", [r"90^\circ", r"90^{\circ}"]),
        (r"50\%", ["50", r"50\%", "50%"]),
        (r"3\sqrt{13}", [r"\sqrt{117}", r"3 \sqrt {13}"]),
        ("(x+1)^2", ["x^2+2x+1", "(1+x)^2"]),
        ("1,-2", ["-2, 1", r"\{1,-2\}", "x=1, x=-2"]),
        (r"\left( 3, \frac{\pi}{2} \right)", [r"(3,\pi/2)", r"(3, \frac{\pi}{2})"]),
        ("[0,1)", [r"\left[0, 1\right)", "[0,1.0)"]),
        (r"(-\infty,2)\cup(3,\infty)", [r"(3,\infty) \cup (-\infty, 2)"]),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", [r"\begin{bmatrix} 1 \\ 2 \end{bmatrix}"]),
        (r"\text{Evelyn}", ["Evelyn", r"\textbf{evelyn}"]),
        (r"\text{(C)}", ["C", "(C)", r"\textbf{(C)}"]),
    ],
)
def test_the_same_answer_in_other_words(truth, answers):
    for answer in answers:
        assert is_equal(truth, answer), answer


@pytest.mark.parametrize(
    ("truth", "answers"),
    [
        (
            "42",
            ["41", "420", "4.2", "-42", "", "?", "forty", "42 or 43", "$41$ or $42$", "41, 42", "42=43", "42 million"],
        ),
        ("2", ["2 pi", "2x", r"2\pi", "2 to 3", "two"]),
        ("1/3", ["0.333", "3", "1, 3"]),
        (r"\sqrt{2}", ["1.414", "2"]),
        ("(0,1)", ["(1,0)", "[0,1)", "0,1,2"]),
        ("1,-2", ["1", "-2", "1,-2,3"]),
        (r"\text{Evelyn}", ["lynEve", "Eve", "E"]),
        (r"\text{even}", ["odd", "neve"]),
        ("C", ["B", "(B)", "A, B, C"]),
        ("p - q", ["q - p"]),
        ("", ["", "0"]),
    ],
)
def test_another_answer(truth, answers):
    for answer in answers:
        assert not is_equal(truth, answer), answer


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"so \boxed{41}, no: \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{\left\{1, 2\right\}}", r"\left\{1, 2\right\}"),
        (r"\boxed{\{x \mid x > 0\}", None),  # cut off
        (r"\boxed{42} and then \boxed{4", "42"),
        ("Work.\nAnswer: 42", "42"),
        ("Work.\n**Answer:** 42\n", "42"),
        ("Answer: 41. Wait.\nFinal answer:\n42", "42"),
        ("Answer: $42$", "42"),
        ("Answer: the final answer is $42$.", "42"),
        (r"Answer: $\boxed{42}$", "42"),
        (r"\boxed{41}" + "\n\nAnswer: 42", "42"),
        ("Answer: 41\n\n" + r"or rather \boxed{42}", "42"),
        (r"<think> \boxed{41} </think> I do not know.", None),
        ("the number is 42", None),
        ("#### 42", None),
        ("", None),
    ],
)
def test_the_last_answer_counts(response, answer):
    assert extract_answer(response) == answer


def test_score_and_its_conventions():
    right, wrong = r"Thus \boxed{0.5}", r"Thus \boxed{0.6}"
    assert compute_score("math_dapo", right, "1/2") == {"score": 1.0, "acc": 1.0, "pred": "0.5"}
    assert compute_score("math_dapo", wrong, "1/2") == {"score": 0.0, "acc": 0.0, "pred": "0.6"}
    assert compute_score("math_dapo", wrong, "1/2", wrong_score=-1) == {"score": -1.0, "acc": 0.0, "pred": "0.6"}
    assert compute_score("math_dapo", "", "1/2", {"index": 0}, reward_router_address=None)["pred"] == ""
    assert compute_score("openai/gsm8k", "5 + 5 = 10\n#### 1,010 apples", "1010")["acc"] == 1
    assert compute_score("openai/gsm8k", "#### 10 \\boxed{12}", "10")["acc"] == 0


def test_votes_are_counted_for_the_answer_not_for_its_spelling():
    preds = {compute_score(None, rf"\boxed{{{answer}}}", "1")["pred"] for answer in ("1,000", r"\$1000", "1000 ")}
    assert preds == {"1000"}


@pytest.mark.parametrize(
    "answer",
    [
        "10^{10^{10}}",
        "9^{9^{9}}!",
        "(" * 140 + "1" + ")" * 140,
        "(x+1)^{5000}",
        r"\frac{" * 50,
        "{" * 250,
        "9" * 100_000,
        r"\boxed{" * 40 + "}" * 40,
    ],
)
def test_hostile_answers_end_in_time(answer):
    is_equal("1/2", "0.5")  # the process that compares runs
    start = time.monotonic()
    assert compute_score("math_dapo", rf"\boxed{{{answer}}}", r"\frac{7}{3}", time_limit=1)["acc"] == 0
    assert time.monotonic() - start < 4
    assert is_equal(r"\frac{7}{3}", "14/6")  # and the next answer is not the worse for it


def test_threads_get_their_own_answers():
    def right(i):
        assert threading.current_thread() is not threading.main_thread()
        return compute_score(None, rf"\boxed{{\frac{{{i}}}{{7}}}}", f"{2 * i}/14" if i % 2 else f"{2 * i + 1}/14")[
            "acc"
        ]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(right, range(1, 41))) == [float(i % 2) for i in range(1, 41)]


def test_a_lost_process_is_replaced_and_a_broken_one_is_an_error(monkeypatch):
    checker = math_reward._Checker()
    assert checker.is_equal("1/2", "0.5", 5)
    checker._process.kill()
    checker._process.wait()
    assert checker.is_equal("1/2", "0.5", 5)
    checker.close()
    monkeypatch.setattr(math_reward, "_COMMAND", ["true"])
    with pytest.raises(RuntimeError, match="fails at its start"):
        checker.is_equal("1/2", "0.5", 5)
