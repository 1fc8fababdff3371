"""Language tasks that a small pretrained model solves sometimes, in verl's parquet format.

    python -m examples.smollm2.data --out DIR --train 64 --test 64 --seed 1

A prompt shows few-shot examples of its kind as earlier turns of the chat (``--shots``). Without them this model rarely
gives a readable answer. A task's text determines its split, so no task is in both.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Farid", "Grace", "Hugo", "Ines", "Jonas")
THINGS = ("apples", "books", "coins", "marbles", "stamps", "shells", "cards", "pencils")
# fmt: off
WORDS = (
    "anchor", "apple", "basket", "bridge", "candle", "castle", "dancer", "desert", "eagle", "engine", "forest",
    "flower", "garden", "guitar", "hammer", "harbor", "island", "jacket", "jungle", "kettle", "kitchen", "ladder",
    "lemon", "market", "mirror", "needle", "number", "orange", "oyster", "palace", "pencil", "quarry", "rabbit",
    "river", "saddle", "silver", "tunnel", "turtle", "umbrella", "valley", "violin", "walnut", "window", "yellow",
    "zebra",
)
# fmt: on
INSTRUCTION = "Explain your steps briefly, then give the answer."
#: Words before the answer; reward.py looks for them.
ANSWER = "The answer is"
#: Number of duplicates in a row after which all tasks count as generated.
_MISSES = 10_000


@dataclass(frozen=True)
class Task:
    """Question, its solution steps, and the answer."""

    question: str
    steps: str
    answer: str

    @property
    def solution(self) -> str:
        return f"{self.steps} {ANSWER} {self.answer}."


def story(rng: random.Random) -> Task:
    """Return a task about a person who gets and gives away things."""
    who, what = rng.choice(NAMES), rng.choice(THINGS)
    has, more = rng.randint(3, 20), rng.randint(2, 10)
    less = rng.randint(1, has - 1)
    sum_ = has + more
    return Task(
        f"{who} has {has} {what}, buys {more} more and gives {less} away. How many {what} does {who} have now?",
        f"{who} starts with {has} {what}. Buying {more} more makes {has} + {more} = {sum_}. Giving {less} away leaves "
        f"{sum_} - {less} = {sum_ - less}.",
        str(sum_ - less),
    )


def equation(rng: random.Random) -> Task:
    """Return a task with a linear equation."""
    root, factor, plus = rng.randint(2, 9), rng.randint(2, 5), rng.randint(1, 9)
    product = root * factor
    return Task(
        f"Solve for x: {factor}x + {plus} = {product + plus}.",
        f"Subtract {plus} from both sides: {factor}x = {product + plus} - {plus} = {product}. Divide both sides by "
        f"{factor}: x = {product} / {factor} = {root}.",
        str(root),
    )


def sorting(rng: random.Random) -> Task:
    """Return a task to sort words alphabetically."""
    given = rng.sample(WORDS, 3)
    ordered = sorted(given)
    letters = ", ".join(f"{word} begins with {word[0]}" for word in given)
    return Task(
        f"Sort these words alphabetically: {', '.join(given)}.",
        f"Look at the first letters: {letters}. In order these are {', '.join(word[0] for word in ordered)}.",
        ", ".join(ordered),
    )


KINDS: dict[str, Callable[[random.Random], Task]] = {"stories": story, "equations": equation, "sorting": sorting}


def tasks(seed: int, split: str) -> Iterator[tuple[str, Task]]:
    """Yield different tasks of a split with their kinds, without the few-shot examples.

    Raises:
        ValueError: All tasks of the split were generated.
    """
    rng, missed = random.Random(f"{seed} {split}"), 0
    seen = {task.question for kind in KINDS for task in examples(kind, 2)}
    while True:
        kind = rng.choice(tuple(KINDS))
        task = KINDS[kind](rng)
        own = random.Random(task.question).random() < 0.5  # decides the split, independent of the seed
        if task.question not in seen and own == (split == "train"):
            seen.add(task.question)
            missed = 0
            yield kind, task
        elif (missed := missed + 1) == _MISSES:
            raise ValueError(f"there are no more than {len(seen)} tasks for {split}")


def examples(kind: str, shots: int) -> list[Task]:
    """Return the few-shot examples, the same for all tasks of a kind."""
    rng = random.Random(kind)
    return [KINDS[kind](rng) for _ in range(shots)]


def chat(kind: str, task: Task, shots: int) -> list[dict[str, str]]:
    """Return the prompt: few-shot examples and the task."""
    turns = list[dict[str, str]]()
    for shown in [*examples(kind, shots), task]:
        turns.append({"role": "user", "content": f"{shown.question} {INSTRUCTION}"})
        turns.append({"role": "assistant", "content": shown.solution})
    return turns[:-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--train", type=int, default=64, help="tasks in train.parquet")
    parser.add_argument("--test", type=int, default=64, help="tasks in test.parquet")
    parser.add_argument("--shots", type=int, default=2, choices=(0, 1, 2), help="few-shot examples per prompt")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if min(args.train, args.test) < 1:
        parser.error("--train and --test must be at least 1")
    args.out.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", args.train), ("test", args.test)):
        made = tasks(args.seed, split)
        rows = [
            {
                "data_source": f"rhyme/{kind}",
                "prompt": chat(kind, task, args.shots),
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": task.answer},
                "extra_info": {"split": split, "index": index},
            }
            for index, (kind, task) in zip(range(count), made, strict=False)
        ]
        pq.write_table(pa.Table.from_pylist(rows), args.out / f"{split}.parquet")
        print(f"{args.out / split}.parquet: {count} tasks")


if __name__ == "__main__":
    main()
