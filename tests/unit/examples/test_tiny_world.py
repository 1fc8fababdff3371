"""Tiny world: exact puzzles, separate splits, verl's data format, and a reward that accepts any response."""

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest

from examples.tiny_world import data, puzzles, reward, tokenizer, traces

TRUTH = "Ann knight, Ben knave"


@pytest.fixture(scope="module")
def some():
    return list(itertools.islice(puzzles.generate(5, "train"), 150))


@pytest.fixture(scope="module")
def tok():
    return tokenizer.build()


def says(statement, knight):
    """Return a statement's truth, independent of the package; ``knight`` maps person to bool."""
    truth = [knight[c.person] == (c.knight ^ c.negated) for c in statement.claims]
    match statement.operator:
        case None:
            return truth[0]
        case "and":
            return all(truth)
        case "or":
            return any(truth)
        case "if":
            return truth[1] if truth[0] else True
        case "iff":
            return len(set(truth)) == 1


def renamed(puzzle, rng):
    """Return the same puzzle with other names, another order of people, swapped claims, and negated wording."""
    place = list(range(puzzle.people))
    rng.shuffle(place)
    statements = [None] * puzzle.people
    for speaker, statement in enumerate(puzzle.statements):
        claims = [
            replace(c, person=place[c.person], knight=not c.knight, negated=not c.negated) for c in statement.claims
        ]
        if statement.operator != "if":
            claims.reverse()
        statements[place[speaker]] = replace(statement, claims=tuple(claims))
    return puzzles.Puzzle(tuple(rng.sample(puzzles.NAMES, puzzle.people)), tuple(statements))


def test_solver_is_exact_and_every_puzzle_has_one_solution(some):
    assert {puzzle.people for puzzle in some} == set(range(2, 8))
    assert {s.operator for puzzle in some for s in puzzle.statements} == {None, *puzzles.OPERATORS}
    for puzzle in some:
        brute = [
            sum(1 << i for i, knight in enumerate(knights) if knight)
            for knights in itertools.product((False, True), repeat=puzzle.people)
            if all(says(s, knights) == knights[i] for i, s in enumerate(puzzle.statements))
        ]
        assert puzzles.solutions(puzzle) == brute
        assert len(brute) == 1


def test_solver_counts_none_and_several():
    ann, ben = puzzles.Claim(0, True), puzzles.Claim(1, True)
    names = ("Ann", "Ben")
    mutual = puzzles.Puzzle(names, (puzzles.Statement((ben,)), puzzles.Statement((ann,))))
    assert puzzles.solutions(mutual) == [0b00, 0b11]
    paradox = puzzles.Puzzle(names, (puzzles.Statement((replace(ann, negated=True),)), puzzles.Statement((ann,))))
    assert puzzles.solutions(paradox) == []


def test_fingerprint_ignores_names_order_and_wording(some):
    rng = random.Random(0)
    for puzzle in some:
        assert puzzles.fingerprint(renamed(puzzle, rng)) == puzzles.fingerprint(puzzle)
    large = {puzzles.fingerprint(puzzle): puzzle for puzzle in some if puzzle.people > 4}
    assert len(large) == sum(puzzle.people > 4 for puzzle in some)  # and different puzzles differ


def test_splits_are_disjoint():
    marks = {}
    for split, seed in itertools.product(("train", "test"), (0, 1)):
        made = list(itertools.islice(puzzles.generate(seed, split, set(), people=(2, 3, 4)), 80))
        found = [puzzles.fingerprint(puzzle) for puzzle in made]
        assert len(set(found)) == 80
        marks.setdefault(split, set()).update(found)
    assert not marks["train"] & marks["test"]


def test_generation_follows_the_seed_and_ends_without_new_puzzles():
    def texts(seed):
        return [puzzle.text() for puzzle in itertools.islice(puzzles.generate(seed, "train", set()), 10)]

    assert texts(3) == texts(3) != texts(4)
    pairs = list(puzzles.generate(0, "test", set(), people=(2,)))
    assert 0 < len(pairs) < 100
    with pytest.raises(ValueError, match="split must be"):
        next(puzzles.generate(0, "validation"))
    with pytest.raises(ValueError, match="2 to 7"):
        next(puzzles.generate(0, "train", people=(8,)))


def test_flawless_traces_end_in_the_right_answer_and_vary(some):
    rng = random.Random(1)
    for puzzle in some:
        truth = puzzles.describe(puzzles.solutions(puzzle)[0], puzzle.names)
        responses = {traces.trace(puzzle, rng) for _ in range(3)}
        assert all(reward.compute_score(None, text, truth)["score"] == pytest.approx(1) for text in responses)
        assert len(responses) == 3


def test_flawed_traces_lose_reward(some):
    rng = random.Random(2)
    for flaw, mean, form in (("slip", 0.2, 1.0), ("untagged", 0.01, 0.0), ("guess", 0.7, 1.0)):
        scores = [
            reward.compute_score(
                None, traces.trace(p, rng, {flaw: 1.0}), puzzles.describe(puzzles.solutions(p)[0], p.names)
            )
            for p in some
        ]
        assert sum(score["score"] for score in scores) / len(scores) < mean
        assert {score["format"] for score in scores} == {form}


def test_tokenizer_round_trips_and_keeps_tags_in_decoded_text(some, tok, tmp_path):
    from transformers import AutoTokenizer

    tok.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    rng = random.Random(3)
    for puzzle in some:
        for text in (puzzle.text(), traces.trace(puzzle, rng, traces.FLAWS)):
            ids = loaded.encode(text)
            assert tok.unk_token_id not in ids
            assert loaded.decode([*ids, tok.eos_token_id], skip_special_tokens=True) == text
    chat = [{"role": "user", "content": some[0].text()}]
    ids = loaded.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert loaded.convert_ids_to_tokens([ids[0], ids[-2], ids[-1]]) == ["<|user|>", "<|im_end|>", "<|assistant|>"]
    assert (loaded.eos_token, loaded.pad_token) == ("<|im_end|>", "<|pad|>")


@pytest.mark.parametrize(
    ("text", "score", "acc", "form"),
    [
        ("<think> so Ann knight. </think> <answer> Ann knight, Ben knave </answer>", 1.0, 1, 1),
        ("<think>\nx\n</think>\n<answer>Ben knave , Ann knight</answer>\n", 1.0, 1, 1),
        ("<think> </think> <answer> Ann knight, Ben knight </answer>", 0.15, 0, 1),
        ("<think> </think> <answer> Ann knight </answer>", 0.15, 0, 1),
        ("<think> </think> <answer> Ann knight, Ben knave, Cal knave </answer>", 0.1, 0, 1),
        ("<think> </think> <answer> Ann knight, Ann knave, Ben knave </answer>", 0.1, 0, 1),
        ("<think> </think> <answer> </answer>", 0.1, 0, 1),
        ("<think> Ann knight, Ben knave", 0.0, 0, 0),
        ("Ann knight, Ben knave", 0.0, 0, 0),
        (
            "<think> </think> <answer> Ann knight, Ben knave </answer> <answer> Ann knight, Ben knave </answer>",
            0.0,
            0,
            0,
        ),
        ("<think> <think> </think> <answer> Ann knight, Ben knave </answer>", 0.0, 0, 0),
        ("<answer> Ann knight, Ben knave </answer> <think> </think>", 0.0, 0, 0),
        ("", 0.0, 0, 0),
    ],
)
def test_reward(text, score, acc, form):
    result = reward.compute_score(data.DATA_SOURCE, text, TRUTH, {"split": "train"})
    assert result == {"score": pytest.approx(score), "acc": acc, "format": form}


def test_verl_loads_the_data(tok, tmp_path):
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset

    files = [str(data.write(tmp_path, split, 20, seed=0)) for split in ("train", "test")]
    config = OmegaConf.create({"max_prompt_length": 160, "filter_overlong_prompts": True, "cache_dir": str(tmp_path)})
    dataset = RLHFDataset(files, tok, config)
    assert len(dataset) == 40  # no prompt was too long
    item = dataset[0]
    assert item["raw_prompt"][0]["role"] == "user"
    assert item["raw_prompt"][0]["content"].endswith("who is who?")
    assert item["reward_model"]["style"] == "rule"
    assert item["extra_info"]["split"] == "train"
    assert reward.parse_answer(item["reward_model"]["ground_truth"])
    assert Counter(row["extra_info"]["split"] for row in dataset) == {"train": 20, "test": 20}


def test_data_refuses_more_puzzles_than_exist(tmp_path):
    with pytest.raises(ValueError, match="allow more people"):
        data.write(tmp_path, "test", 500, seed=0, people=(2,))
