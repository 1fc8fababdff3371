"""Number game, and written searches for its sums with their failed attempts.

    make 19 from 10, 16, 7
    <think> now 7 + 16 = 23. we have 23, 10 for 19. 23 - 10 = 13, no. back. try 16 - 7 = 9. with 9, 10 for 19.
    9 + 10 = 19. found it. </think> <answer> 16 - 7 = 9, 9 + 10 = 19 </answer>

Each number may be used at most once. The search takes pairs and signs in random order, skips some, and draws its
wording at random, so a model of these texts has real sampling variety. Goals that few sums reach give long searches.
"""

from __future__ import annotations

import itertools
import operator
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

#: Largest number in a search, and largest given number.
LIMIT, GREATEST = 60, 20
SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}
TRY = ("try", "take", "say", "now", "what of", "next")
LEFT = ("left", "that leaves", "with", "we have")
SMALL = ("too small", "less", "not enough", "no")
BIG = ("too big", "more", "beyond it", "no")
BACK = ("drop it.", "back.", "nothing there.", "")
MUSING = ("hmm.", "let us see.", "wait.")
DONE = ("there.", "this is it.", "found it.", "that hits.")
#: Probability that the search skips a second step.
PASSED_OVER = 0.25
#: Probability of an answer without its first step, and of one without tags: flaws for RL to correct.
FLAWS = {"slip": 0.1, "untagged": 0.2}


@dataclass(frozen=True)
class Step:
    """Step that replaces ``a`` and ``b`` by ``result``."""

    a: int
    sign: str
    b: int

    @property
    def result(self) -> int:
        return SIGNS[self.sign](self.a, self.b)

    def text(self) -> str:
        return f"{self.a} {self.sign} {self.b} = {self.result}"


@dataclass(frozen=True)
class Task:
    """Three numbers that make ``goal`` in one or two steps."""

    numbers: tuple[int, ...]
    goal: int

    def text(self) -> str:
        return f"make {self.goal} from {listed(self.numbers)}"

    def supervised(self) -> bool:
        """Return whether training may use the task; else it is a prompt. Ignores the order of the numbers."""
        return zlib.crc32(str((sorted(self.numbers), self.goal)).encode()) % 4 > 0


def listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))


def steps(numbers: tuple[int, ...], rng: random.Random) -> list[tuple[Step, tuple[int, ...]]]:
    """Return all steps with the numbers after each, in random order; results are from 1 to :data:`LIMIT`."""
    found = []
    for i, j in itertools.permutations(range(len(numbers)), 2):
        a, b = numbers[i], numbers[j]
        for sign in SIGNS:
            if (sign in "+*" and i > j) or (sign == "/" and (a % b or b == 1)):
                continue
            step = Step(*((b, sign, a) if sign in "+*" and rng.random() < 0.5 else (a, sign, b)))
            if 1 <= step.result <= LIMIT:
                rest = [step.result, *(n for k, n in enumerate(numbers) if k not in (i, j))]
                found.append((step, tuple(rng.sample(rest, len(rest)))))
    rng.shuffle(found)
    return found


def draw(rng: random.Random, supervised: bool) -> Task:
    """Return a task with a solution in two steps, for training or not."""
    while True:
        numbers = tuple(rng.sample(range(2, GREATEST + 1), 3))
        _, rest = steps(numbers, rng)[0]
        if second := steps(rest, rng):
            task = Task(numbers, second[0][0].result)
            if task.goal not in (*numbers, *rest) and task.goal >= 10 and task.supervised() == supervised:
                return task


def search(task: Task, rng: random.Random, flawed: bool = True) -> str:
    """Return the text of a search with each tried step and the answer, with flaws as in :data:`FLAWS`."""
    words: list[str] = []
    answer = [step.text() for step in _look(task, rng, words)]
    words.append(rng.choice(DONE))
    flaw = rng.choices([None, *FLAWS], [1 - sum(FLAWS.values()), *FLAWS.values()])[0] if flawed else None
    if flaw == "slip" and len(answer) > 1:
        answer.pop(0)
    thought, verdict = " ".join(filter(None, words)), ", ".join(answer)
    if flaw == "untagged":
        return f"<think> {thought} {verdict}"
    return f"<think> {thought} </think> <answer> {verdict} </answer>"


def _look(task: Task, rng: random.Random, words: list[str]) -> list[Step]:
    """Return the steps that make the goal; append the tried steps to ``words``."""
    for first, rest in _repeat(task, rng):
        words.append(f"{rng.choice(TRY)} {first.text()}.")
        if first.result == task.goal:
            return [first]
        words.append(f"{rng.choice(LEFT)} {listed(rest)} for {task.goal}.")
        if rng.random() < 0.08:
            words.append(rng.choice(MUSING))
        for second, _ in steps(rest, rng):
            if rng.random() < PASSED_OVER:
                continue
            if second.result == task.goal:
                words.append(f"{second.text()}.")
                return [first, second]
            words.append(f"{second.text()}, {rng.choice(SMALL if second.result < task.goal else BIG)}.")
        words.append(rng.choice(BACK))
    raise AssertionError("the first steps never end")


def _repeat(task: Task, rng: random.Random) -> Iterator[tuple[Step, tuple[int, ...]]]:
    while True:
        yield from steps(task.numbers, rng)
