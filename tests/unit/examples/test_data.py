"""Data sets: small files with the hub's columns become files that verl reads; splits have no common problem."""

import itertools
import json
import random
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from examples.data import prepare
from examples.tiny_world import puzzles, reward, traces


def verl_row(problem, truth, index=0):
    prompt = [{"content": problem, "role": "user"}]
    return {"prompt": prompt, "reward_model": {"ground_truth": truth}, "extra_info": {"index": index}}


#: Rows of each source, with the columns of the hub; (file below the source, rows).
SOURCES = {
    "dapo": ("data/dapo.parquet", [verl_row(f"{i} + {i}?", str(2 * i), f"id-{i}") for i in range(20)] * 3),
    "aime": ("data/aime.parquet", [verl_row("a", "1"), verl_row("b", "2"), verl_row("b", "3")]),
    "math500": ("test.jsonl", [{"problem": "1/2?", "answer": "\\frac{1}{2}", "level": 4, "unique_id": "x/1"}]),
    "amc": ("test.parquet", [{"question": "4?", "answer": "4.0"}]),
    "minerva": ("test.jsonl", [{"question": "9?", "answer": "9.81"}]),
    "olympiad": ("OE_TO_maths_en_COMP/train.parquet", [{"id": 1, "question": "x?", "final_answer": ["$1$", "$-1$"]}]),
    "gsm8k": ("main/train.parquet", [{"question": "How many?", "answer": "<<1+1000>>\n#### 1,001"}]),
}


#: Card of a data set with a config, as the hub has it.
CARD = """---
configs:
- config_name: {0}
  data_files: [{{split: train, path: {0}/train*}}, {{split: test, path: {0}/test*}}]
---
"""


def put(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(*args):
    result = CliRunner().invoke(prepare.app, [str(arg) for arg in args])
    assert result.exit_code == 0, result.output


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
        for name, (file, rows) in SOURCES.items():
            source = folder / "sources" / name
            put(source / file, rows)
            if file.startswith(("main", "OE")):
                put(source / Path(file).with_name("test.parquet"), [{**rows[0], "question": "And now?"}])
                (source / "README.md").write_text(CARD.format(Path(file).parent))
            run(name, "--out", folder, "--source", source / file if name == "math500" else source)
    run("kk", "--out", folder, "--puzzles", 60, "--seed", 3)
    run("eval", "--out", folder, "--samples", 4)
    return folder


def test_all_sets_have_verls_schema_and_answers(prepared):
    tables = {path.stem: pq.read_table(path) for path in prepared.glob("*.parquet")}
    assert all(table.schema.equals(prepare.SCHEMA) for table in tables.values())
    truths = {
        name: [row["ground_truth"] for row in table["reward_model"].to_pylist()] for name, table in tables.items()
    }
    assert truths["dapo-math-17k"] == [str(2 * i) for i in range(20)], "each problem once"
    assert truths["aime-2024"] == ["1"], "a problem with two answers is skipped"
    assert [truths[name] for name in ("olympiad-bench", "gsm8k-train")] == [["$1$, $-1$"], ["1001"]]
    assert (len(truths["kk-train"]), len(truths["kk-test"])) == (54, 6)
    assert tables["math-500"]["extra_info"].to_pylist() == [{"split": "test", "index": 0, "id": "x/1", "level": 4}]
    for name, (_, few) in prepare.EVALUATION.items():
        assert set(pq.read_table(prepared / "eval" / f"{name}.parquet")[prepare.SAMPLES].to_pylist()) == {
            4 if few else 1
        }


# ---- generated tasks ----


@pytest.fixture(scope="module")
def some():
    return list(itertools.islice(puzzles.generate(5, "train"), 100))


def says(statement, knight):
    """Return a statement's truth, independent of the package; ``knight`` maps person to bool."""
    truth = [knight[c.person] == (c.knight ^ c.negated) for c in statement.claims]
    last = truth[-1]
    return {None: last, "and": all(truth), "or": any(truth), "if": not truth[0] or last, "iff": truth[0] == last}[
        statement.operator
    ]


def test_every_puzzle_has_one_solution_and_a_flawless_trace_finds_it(some):
    rng = random.Random(1)
    assert {puzzle.people for puzzle in some} == set(range(2, 8))
    for puzzle in some:
        ways = itertools.product((False, True), repeat=puzzle.people)
        right = [way for way in ways if all(says(s, way) == way[i] for i, s in enumerate(puzzle.statements))]
        assert puzzles.solutions(puzzle) == [sum(1 << i for i, knight in enumerate(way) if knight) for way in right]
        assert len(right) == 1
        truth = puzzles.describe(puzzles.solutions(puzzle)[0], puzzle.names)
        assert reward.compute_score(None, traces.trace(puzzle, rng), truth)["score"] == pytest.approx(1)


def test_splits_are_disjoint_and_follow_the_seed():
    marks = {}
    for split, seed in itertools.product(("train", "test"), (0, 1)):
        made = [*itertools.islice(puzzles.generate(seed, split, set(), people=(2, 3, 4)), 80)]
        assert made == [*itertools.islice(puzzles.generate(seed, split, set(), people=(2, 3, 4)), 80)]
        marks.setdefault(split, set()).update(map(puzzles.fingerprint, made))
    assert not marks["train"] & marks["test"]
