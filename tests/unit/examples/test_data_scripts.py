"""Data preparation: small files with the real schemas become files that verl reads and its rewards score."""

import asyncio
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from examples.data import logic_reward, math_reward, prepare
from examples.tiny_world import puzzles, tokenizer

DAPO_PROMPT = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\nRemember to put your answer on its "
    'own line after "Answer:".'
)
KEYS = {"split", "index", "id", "level"}


def verl_row(problem, truth, index):
    """Return a row in the schema of BytedTsinghua-SIA."""
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": DAPO_PROMPT.format(problem), "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": truth, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


def math500_row(i):
    return {
        "problem": f"What is {i}/2?",
        "solution": f"\\boxed{{\\frac{{{i}}}{{2}}}}",
        "answer": f"\\frac{{{i}}}{{2}}",
        "subject": "Algebra",
        "level": 1 + i % 5,
        "unique_id": f"test/algebra/{i}.json",
    }


def gsm8k_row(i):
    return {"question": f"Ann has {i} apples and buys 1000. How many?", "answer": f"<<{i}+1000>>\n#### 1,{i:03}"}


def answer_row(i):
    return {"id": i, "question": f"What is the weight of {i} kg in N?", "answer": f"9.81 \\times {i}"}


def olympiad_row(i):
    """Return rows as on the hub; some answers have several parts."""
    return {
        "id": 1600 + i,
        "question": f"Find all $x$ with $x^2 = {i * i}$.",
        "final_answer": [f"${i}$", f"$-{i}$"] if i % 2 else [f"${i},-{i}$"],
        "is_multiple_answer": True,
        "answer_type": "Numerical",
    }


def put(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def run(*args):
    return CliRunner().invoke(prepare.app, [str(arg) for arg in args])


def done(*args):
    result = run(*args)
    assert result.exit_code == 0, result.output
    return result.output


def failed(*args):
    result = run(*args)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    return result.stderr


def rows_of(path):
    table = pq.read_table(path)
    assert table.schema.equals(prepare.SCHEMA)
    rows = table.to_pylist()
    assert [row["extra_info"]["index"] for row in rows] == list(range(len(rows)))
    return rows


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Local copies with the files and columns of the hub's."""
    folder = tmp_path_factory.mktemp("sources")
    dapo = [verl_row(f"What is {i} + {i}?", str(2 * i), f"uuid-{i}") for i in range(20)]
    put(folder / "dapo" / "data" / "dapo-math-17k.parquet", dapo * 100)
    put(folder / "aime" / "data" / "aime-2024.parquet", [verl_row(f"AIME {i}", str(i), i) for i in range(30)] * 32)
    put(folder / "math500" / "test.jsonl", [math500_row(i) for i in range(15)])
    for split, numbers in (("train", range(12)), ("test", range(12, 18))):
        put(folder / "gsm8k" / "main" / f"{split}-00000-of-00001.parquet", [gsm8k_row(i) for i in numbers])
        put(folder / "gsm8k" / "socratic" / f"{split}-00000-of-00001.parquet", [gsm8k_row(999)])
    put(folder / "amc" / "test-00000-of-00001.parquet", [answer_row(i) | {"answer": f"{i}.0"} for i in range(4)])
    put(folder / "minerva" / "test.jsonl", [answer_row(i) for i in range(5)])
    for config in ("OE_TO_maths_en_COMP", "OE_TO_physics_en_COMP"):
        rows = [olympiad_row(i) for i in range(1, 7 if "maths" in config else 2)]
        put(folder / "olympiad" / "OlympiadBench" / config / f"{config}.parquet", rows)
    return folder


@pytest.fixture(scope="module")
def prepared(sources, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "new"
    for name in ("dapo", "aime", "math500", "gsm8k", "amc", "minerva", "olympiad"):
        done(name, "--out", out, "--source", sources / name)
    done("kk", "--out", out, "--puzzles", 60, "--seed", 3)
    return out


def test_duplicate_problems_are_removed(prepared):
    rows = rows_of(prepared / "dapo-math-17k.parquet")
    assert [row["prompt"][0]["content"] for row in rows] == [
        DAPO_PROMPT.format(f"What is {i} + {i}?") for i in range(20)
    ]
    assert [row["reward_model"]["ground_truth"] for row in rows] == [str(2 * i) for i in range(20)]
    assert rows[3]["extra_info"] == {"split": "train", "index": 3, "id": "uuid-3", "level": 0}
    aime = rows_of(prepared / "aime-2024.parquet")
    assert len(aime) == 30
    assert {row["data_source"] for row in rows + aime} == {"math_dapo"}
    assert aime[7]["extra_info"] == {"split": "test", "index": 7, "id": "7", "level": 0}


def test_a_problem_with_two_answers_is_skipped_and_reported(tmp_path):
    rows = [verl_row("a", "1", "u"), verl_row("b", "2", "v"), verl_row("a", "3", "w"), verl_row("b", "2", "v")]
    said = done("dapo", "--out", tmp_path, "--source", put(tmp_path / "raw.parquet", rows))
    assert "4 rows, 2 problems, 1 skipped with several answers" in said
    (row,) = rows_of(tmp_path / "dapo-math-17k.parquet")
    assert row["reward_model"]["ground_truth"] == "2"


def test_math500_and_gsm8k(prepared):
    rows = rows_of(prepared / "math-500.parquet")
    assert len(rows) == 15
    assert rows[3]["prompt"][0]["content"].startswith("What is 3/2? ")
    assert rows[3]["reward_model"] == {"style": "rule", "ground_truth": r"\frac{3}{2}"}
    assert rows[3]["extra_info"] == {"split": "test", "index": 3, "id": "test/algebra/3.json", "level": 4}
    train, test = rows_of(prepared / "gsm8k-train.parquet"), rows_of(prepared / "gsm8k-test.parquet")
    assert (len(train), len(test)) == (12, 6)  # nothing of the socratic config
    assert train[5]["reward_model"]["ground_truth"] == "1005"
    assert not {row["prompt"][0]["content"] for row in train} & {row["prompt"][0]["content"] for row in test}


def test_evaluation_sets_are_graded_by_the_reward(prepared):
    """Ground truths are strings, numbers and lists; the reward accepts right answers in another form."""
    amc, minerva, olympiad = (
        rows_of(prepared / f"{name}.parquet") for name in ("amc-2023", "minerva", "olympiad-bench")
    )
    assert (len(amc), len(minerva), len(olympiad)) == (4, 5, 6)  # nothing of physics
    assert olympiad[1]["extra_info"] == {"split": "test", "index": 1, "id": "1602", "level": 0}
    said = [(amc[3], "3", "4"), (minerva[2], "19.62", "19.6"), (olympiad[0], "-1, 1", "1"), (olympiad[1], "-2, 2", "2")]
    for row, right, wrong in said:
        truth = row["reward_model"]["ground_truth"]
        assert row["prompt"][0]["content"].endswith("\\boxed{}.")
        for answer, acc in ((right, 1), (wrong, 0)):
            scored = math_reward.compute_score(row["data_source"], f"So \\boxed{{{answer}}}.", truth)
            assert scored["acc"] == acc, (truth, answer)


def test_the_evaluation_sets_have_the_samples_per_problem(prepared, tmp_path, monkeypatch):
    out = tmp_path / "data"
    out.mkdir()
    for name in prepare.EVALUATION:
        (out / f"{name}.parquet").symlink_to(prepared / f"{name}.parquet")
    done("eval", "--out", out)
    for name, (_, few) in prepare.EVALUATION.items():
        table = pq.read_table(out / "eval" / f"{name}.parquet")
        assert set(table[prepare.SAMPLES].to_pylist()) == {32 if few else 1}
        assert table.drop_columns(prepare.SAMPLES).to_pylist() == rows_of(prepared / f"{name}.parquet")
    done("eval", "--out", out, "--samples", 2)
    assert pq.read_table(out / "eval" / "aime-2024.parquet")[prepare.SAMPLES].to_pylist() == [2] * 30

    def no_hub(*_):
        raise prepare.DataError("no network")

    monkeypatch.setattr(prepare, "_read_hub", no_hub)
    (out / "minerva.parquet").unlink()
    said = failed("eval", "--out", out)
    assert f"minerva.parquet is missing: python -m examples.data.prepare minerva --out {out} --source PATH" in said
    (out / "minerva.parquet").write_text("torn")
    assert "minerva.parquet cannot be read" in failed("eval", "--out", out)


def test_dapos_rows_are_scored_as_verl_does_and_others_with_minus_one_for_wrong():
    score = math_reward.compute_dapo_score
    assert score("math_dapo", "Answer: 42", "42") == {"score": 1.0, "acc": True, "pred": "42"}
    assert score("math_dapo", "Answer: 0.5", "\\frac{1}{2}")["score"] == -1.0  # verl compares text
    assert score("math-ai/amc23", "Answer: 0.5", "\\frac{1}{2}")["score"] == 1.0
    assert score("math-ai/amc23", "\\boxed{41}", "42")["score"] == -1.0


def test_puzzles_are_held_out_and_follow_the_seed(prepared, tmp_path):
    splits = {split: rows_of(prepared / f"kk-{split}.parquet") for split in ("train", "test")}
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 54, "test": 6}
    done("kk", "--out", tmp_path, "--puzzles", 400, "--seed", 4)
    assert rows_of(tmp_path / "kk-train.parquet")[:54] != splits["train"]
    ids = {split: {row["extra_info"]["id"] for row in rows} for split, rows in splits.items()}
    for split in ids:
        ids[split] |= {row["extra_info"]["id"] for row in rows_of(tmp_path / f"kk-{split}.parquet")}
    assert not ids["train"] & ids["test"]  # with any seed
    done("kk", "--out", tmp_path, "--puzzles", 60, "--seed", 3)
    assert rows_of(tmp_path / "kk-train.parquet") == splits["train"]
    assert {row["extra_info"]["level"] for row in splits["train"]} == {3, 4, 5, 6, 7}


@pytest.mark.parametrize(
    ("operator", "said"),
    [
        (None, "Ann is a knight."),
        ("or", "Ann is a knight or Ben is not a knave."),
        ("if", "If Ann is a knight, then Ben is not a knave."),
        ("iff", "Ann is a knight if and only if Ben is not a knave."),
    ],
)
def test_statements_are_worded_as_in_logic_rl(operator, said):
    claims = (puzzles.Claim(0, True), puzzles.Claim(1, False, negated=True))
    statement = puzzles.Statement(claims if operator else claims[:1], operator)
    assert prepare._sentence(statement, ("Ann", "Ben")) == said


@pytest.fixture(scope="module")
def tok():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(Path(tokenizer.__file__).parent / "models" / "qwen2")


def test_verl_reads_all_files_together(prepared, tok, tmp_path):
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset

    limits = {"max_prompt_length": 2048, "filter_overlong_prompts": True, "filter_overlong_prompts_workers": None}
    config = OmegaConf.create({**limits, "cache_dir": str(tmp_path)})
    dataset = RLHFDataset([str(path) for path in sorted(prepared.glob("*.parquet"))], tok, config)
    assert len(dataset) == 20 + 30 + 15 + 18 + 60 + 4 + 5 + 6
    for item in dataset:
        assert item["raw_prompt"][0]["role"] == "user"
        assert item["reward_model"]["ground_truth"]
        assert item["index"] == item["extra_info"]["index"]
        assert item["extra_info"].keys() == KEYS


THINK = ["+reward.custom_reward_function.reward_kwargs.think_in_prompt=true"]


@pytest.mark.parametrize(
    ("module", "response", "truth", "overrides", "score", "extra"),
    [
        (math_reward, "Answer: 1/3.", "0.5", [], 0, {"score": 0, "acc": 0, "pred": "1/3"}),
        (
            logic_reward,
            "so </think> <answer> Ann knight, Ben knave </answer>",
            "Ann knight, Ben knave",
            THINK,
            3,
            {"score": 3, "acc": 1, "format": 1, "pred": "ann knight, ben knave"},
        ),
    ],
)
def test_verl_loads_and_calls_the_rewards(module, response, truth, overrides, score, extra):
    """By path, with the override keys that recipes use, in the reward loop's own threads."""
    import numpy as np
    import torch
    from hydra import compose, initialize_config_module
    from tensordict import TensorDict
    from verl import DataProto
    from verl.experimental.reward_loop import migrate_legacy_reward_impl
    from verl.trainer.ppo.reward import load_reward_manager

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", [f"reward.custom_reward_function.path={module.__file__}", *overrides])
    config = migrate_legacy_reward_impl(config)

    class Characters:
        def decode(self, ids, **_):
            return "".join(map(chr, ids.tolist()))

    ids = torch.tensor([[ord(character) for character in response]])
    batch = TensorDict({"responses": ids, "attention_mask": torch.ones_like(ids)}, batch_size=1)
    others = {"data_source": "math_dapo", "reward_model": {"ground_truth": truth}, "extra_info": {}}
    data = DataProto(batch=batch, non_tensor_batch={k: np.array([v], dtype=object) for k, v in others.items()})

    async def run_single():
        return await load_reward_manager(config, Characters()).run_single(data)

    assert asyncio.run(run_single()) == {"reward_score": score, "reward_extra_info": extra}


def test_errors_name_problem_place_and_remedy(tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert "nowhere does not exist" in failed("dapo", "--out", out, "--source", tmp_path / "nowhere")
    (tmp_path / "bare").mkdir()
    assert "no .parquet, .jsonl or .json" in failed("dapo", "--out", out, "--source", tmp_path / "bare")
    other = put(tmp_path / "other.parquet", [{"prompt": "a"}])
    assert "no column extra_info, reward_model; it has prompt" in failed("dapo", "--out", out, "--source", other)
    flat = put(tmp_path / "flat.parquet", [{"prompt": "a", "reward_model": {"ground_truth": "1"}, "extra_info": None}])
    assert "flat.parquet, row 0: not verl's schema" in failed("dapo", "--out", out, "--source", flat)
    empty = tmp_path / "empty.parquet"
    pq.write_table(pa.Table.from_pylist([verl_row("a", "1", "u")]).slice(0, 0), empty)
    assert "the source is empty" in failed("aime", "--out", out, "--source", empty)
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 torn")
    assert "torn.parquet cannot be read" in failed("aime", "--out", out, "--source", tmp_path / "torn.parquet")
    torn = tmp_path / "torn.jsonl"
    torn.write_text(json.dumps(math500_row(1)) + '\n{"problem": ', encoding="utf-8")
    assert "torn.jsonl cannot be read" in failed("math500", "--out", out, "--source", torn)
    whole = put(tmp_path / "whole.jsonl", [gsm8k_row(1)])  # both splits must not have the same rows
    assert "no file of the train split" in failed("gsm8k", "--out", out, "--source", whole)
    put(tmp_path / "bad" / "train.jsonl", [gsm8k_row(1), {"question": "?", "answer": "42"}])
    assert "bad, row 1: 'answer' does not end in" in failed("gsm8k", "--out", out, "--source", tmp_path / "bad")
    assert "allow more people" in failed("kk", "--out", out, "--puzzles", 1000, "--people", 2)
    assert not list(out.glob("*")) if out.exists() else True

    import datasets

    def no_network(*args, **kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", no_network)
    said = failed("math500", "--out", out)
    assert "HuggingFaceH4/MATH-500 cannot be downloaded" in said
    assert "no route" in said
    assert "--source FOLDER" in said


def test_the_right_split_is_requested_from_the_hub(tmp_path, monkeypatch):
    import datasets

    asked = []

    def hub(name, config=None, split=None):
        asked.append((name, config, split))
        return datasets.Dataset.from_list([gsm8k_row(i) for i in range(3)])

    monkeypatch.setattr(datasets, "load_dataset", hub)
    done("gsm8k", "--out", tmp_path)
    assert asked == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]
    assert len(rows_of(tmp_path / "gsm8k-test.parquet")) == 3


def test_a_file_is_replaced_atomically(tmp_path, monkeypatch):
    rows = [prepare.kk_row(puzzle, "train", 0) for puzzle in [next(puzzles.generate(0, "train"))]]
    path = tmp_path / "kk.parquet"
    prepare.write(path, rows)
    before = path.read_bytes()

    def full(table, where):
        Path(where).write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(prepare.DataError, match="no space left"):
        prepare.write(path, rows)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
