"""Reward of Knights and Knaves as Logic-RL has it."""

import pytest

from examples.data.logic_reward import compute_score

TRUTH = "Ann knight, Ben knave"


@pytest.mark.parametrize(
    ("answer", "score", "acc"),
    [
        ("Ann is a knight, Ben is a knave", 3, 1),
        ("Ann knight, Ben knave", 3, 1),
        ("(1) Ann is a knight\n(2) Ben is a knave", 3, 1),
        ("- **Ann**: Knight\n- **Ben**: Knave", 3, 1),
        ("ben is the knave and ann is the knight.", 3, 1),
        ("Ann is a knave, Ben is a knight", -0.5, 0),
        ("Ann is a knight, Ben is a knight", -0.5, 0),
        ("Ann is a knight", -1, 0),
        ("Ann is a knight, Ann is a knave, Ben is a knave", -1, 0),
        ("Ann is a knight, Ben is a knave, Ben is a knave", -1, 0),
        ("Ann is a knight, Ben is a knave, Cal is a knave", -1, 0),
        ("Ann is a knight, Ben is not a knight", -1, 0),
        ("Ann is not a knave, Ben is a knave", -1, 0),
        ("Ann and Ben are knights", -1, 0),
        ("Ann is a knight or a knave, Ben is a knave", -1, 0),
        ("", -1, 0),
    ],
)
def test_answer(answer, score, acc):
    result = compute_score("kk", f"<think> hm </think>\n<answer> {answer} </answer>\n", TRUTH, {"split": "test"})
    assert (result["score"], result["acc"], result["format"]) == (score, acc, 1)
    assert bool(result["pred"]) == (score != -1)


@pytest.mark.parametrize(
    "response",
    [
        "Ann is a knight, Ben is a knave",
        "<answer> Ann is a knight, Ben is a knave </answer>",
        "<think> hm <answer> Ann is a knight, Ben is a knave </answer>",
        "hm </think> <answer> Ann is a knight, Ben is a knave </answer>",
        "<think> hm </think> <answer> Ann is a knight, Ben is a knave </answer> I am sure.",
        "<think> hm </think> so <answer> Ann is a knight, Ben is a knave </answer>",
        "<think> </think> <answer> Ann knight, Ben knave </answer> <answer> Ann knight, Ben knave </answer>",
        "<think> <think> </think> <answer> Ann knight, Ben knave </answer>",
        "<answer> Ann knight, Ben knave </answer> <think> </think>",
        "",
    ],
)
def test_without_the_format_the_answer_earns_nothing(response):
    assert compute_score("kk", response, TRUTH) == {"score": -3, "acc": 0, "format": 0, "pred": ""}


def test_a_template_may_begin_the_thought():
    response = "hm </think> <answer> Ann is a knight, Ben is a knave </answer>"
    assert compute_score("kk", response, TRUTH, think_in_prompt=True)["score"] == 3
