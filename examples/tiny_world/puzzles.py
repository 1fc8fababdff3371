"""Knights and Knaves, as in Logic-RL (https://arxiv.org/abs/2502.14768): knights tell the truth, knaves lie.

Each of 2 to 7 people makes one statement; exactly one assignment of knights and knaves fits them all.
An assignment of n people is an integer of n bits (bit i set: person i is a knight), and a set of assignments an
integer of 2**n bits, so that logic on whole sets is Python's ``& | ^ ~``.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

NAMES = ("Ann", "Ben", "Cal", "Dot", "Eve", "Fay", "Gus", "Hal", "Ivy", "Jim", "Kay", "Leo")
MIN_PEOPLE, MAX_PEOPLE = 2, 7
PEOPLE_WEIGHTS = {2: 0.12, 3: 0.43, 4: 0.24, 5: 0.11, 6: 0.06, 7: 0.04}
TEST_SHARE = 5  # one puzzle in so many is a test puzzle
OPERATORS = ("and", "or", "if", "iff")

KIND = {True: "knight", False: "knave"}


@dataclass(frozen=True)
class Claim:
    """``person`` is a knight, or (``knight`` false) a knave; ``negated`` words it as "is not a ..."."""

    person: int
    knight: bool
    negated: bool = False

    def holds(self, assignment: int) -> bool:
        return bool(assignment >> self.person & 1) == (self.knight != self.negated)

    def text(self, names: tuple[str, ...]) -> str:
        return f"{names[self.person]} is {'not ' if self.negated else ''}a {KIND[self.knight]}"


@dataclass(frozen=True)
class Statement:
    """One claim (``operator`` is ``None``), or two joined by one of :data:`OPERATORS`."""

    claims: tuple[Claim, ...]
    operator: str | None = None

    def value(self, *truth: bool) -> bool:
        """Truth of the statement from the truth of its claims."""
        if self.operator is None:
            return truth[0]
        left, right = truth
        match self.operator:
            case "and":
                return left and right
            case "or":
                return left or right
            case "if":
                return not left or right
            case _:
                return left == right

    def holds(self, assignment: int) -> bool:
        return self.value(*(claim.holds(assignment) for claim in self.claims))

    def text(self, names: tuple[str, ...]) -> str:
        parts = [claim.text(names) for claim in self.claims]
        if self.operator is None:
            return parts[0]
        if self.operator == "if":
            return f"if {parts[0]} then {parts[1]}"
        return f" {self.operator} ".join(parts)


@dataclass(frozen=True)
class Puzzle:
    """``statements[i]`` is what person i (called ``names[i]``) says."""

    names: tuple[str, ...]
    statements: tuple[Statement, ...]

    @property
    def people(self) -> int:
        return len(self.names)

    def text(self) -> str:
        """The prompt: one sentence per person, then the question."""
        said = [f"{name} says: {s.text(self.names)}." for name, s in zip(self.names, self.statements, strict=True)]
        return " ".join([*said, "who is who?"])


def solutions(puzzle: Puzzle) -> list[int]:
    """Every assignment in which knights' statements are true and knaves' false; exact, in ascending order."""
    knight, everything = _knight_sets(puzzle.people)
    fit = everything
    for person, statement in enumerate(puzzle.statements):
        fit &= ~(knight[person] ^ _truth_set(statement, knight, everything))
    return [assignment for assignment in range(1 << puzzle.people) if fit >> assignment & 1]


def describe(assignment: int, names: tuple[str, ...]) -> str:
    """The answer's wording, in the order in which the prompt names the people."""
    return ", ".join(f"{name} {KIND[bool(assignment >> i & 1)]}" for i, name in enumerate(names))


def fingerprint(puzzle: Puzzle) -> bytes:
    """16 bytes, equal for puzzles that differ only in names, order of people, or a statement's wording.

    Colour refinement (Weisfeiler-Leman) over who speaks of whom, with truth tables for labels. Two puzzles that
    differ otherwise rarely share a fingerprint; where they do it costs one puzzle, never a leak.
    """
    # Each view is how a person sees a statement that concerns them: roles, truth table, the others' colours.
    views: list[list[list[tuple[bytes, tuple[int, ...]]]]] = [[] for _ in range(puzzle.people)]
    for speaker, statement in enumerate(puzzle.statements):
        concerned = {speaker, *(claim.person for claim in statement.claims)}
        for viewer in concerned:
            orders = [(viewer, *rest) for rest in itertools.permutations(concerned - {viewer})]
            views[viewer].append([(_role(statement, speaker, order), order) for order in orders])
    colours = [b""] * puzzle.people
    for _ in range(3):
        colours = [
            _digest(
                sorted(min(role + b"".join(colours[p] for p in order) for role, order in orders) for orders in view)
            )
            for view in views
        ]
    return _digest(sorted(colours))


def split_of(fingerprint_: bytes) -> str:
    """``"train"`` or ``"test"``: a property of the puzzle itself, so no two seeds or sizes can ever mix them."""
    return "test" if int.from_bytes(fingerprint_[:4], "little") % TEST_SHARE == 0 else "train"


def generate(seed: int, split: str, seen: set[bytes] | None = None, people: Iterable[int] = ()) -> Iterator[Puzzle]:
    """Puzzles of one split, each with exactly one solution; ends only when it finds no more.

    Args:
        seed: Same seed, same puzzles.
        split: ``"train"`` or ``"test"``.
        seen: Fingerprints not to be used; those of the puzzles yielded are added. ``None`` lets puzzles return
            under other names.
        people: Numbers of people to draw from, uniformly; empty draws them by :data:`PEOPLE_WEIGHTS`.
    """
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', not {split!r}")
    weights = dict.fromkeys(people, 1.0) or dict(PEOPLE_WEIGHTS)
    if not all(MIN_PEOPLE <= size <= MAX_PEOPLE for size in weights):
        raise ValueError(f"people must be from {MIN_PEOPLE} to {MAX_PEOPLE}, not {sorted(weights)}")
    rng = random.Random(f"{split} {seed}")
    while weights:
        size = rng.choices(list(weights), list(weights.values()))[0]
        puzzle = next((p for p in _candidates(rng, size) if _admit(p, split, seen)), None)
        if puzzle is None:
            del weights[size]  # there are only some 40 puzzles of two people
        else:
            yield puzzle


def _candidates(rng: random.Random, people: int, tries: int = 1000) -> Iterator[Puzzle]:
    for _ in range(tries):
        statements = tuple(_statement(rng, person, people) for person in range(people))
        yield Puzzle(tuple(rng.sample(NAMES, people)), statements)


def _admit(puzzle: Puzzle, split: str, seen: set[bytes] | None) -> bool:
    if len(solutions(puzzle)) != 1:
        return False
    mark = fingerprint(puzzle)
    if split_of(mark) != split or (seen is not None and mark in seen):
        return False
    if seen is not None:
        seen.add(mark)
    return True


def _statement(rng: random.Random, speaker: int, people: int) -> Statement:
    others = [person for person in range(people) if person != speaker]
    if rng.random() < 0.35:
        return Statement((_claim(rng, rng.choice(others)),))
    # Others speak of others, mostly; of two people one must speak of oneself.
    pool = others if len(others) > 1 and rng.random() < 0.85 else [speaker, rng.choice(others)]
    left, right = rng.sample(pool, 2)
    return Statement((_claim(rng, left), _claim(rng, right)), rng.choice(OPERATORS))


def _claim(rng: random.Random, person: int) -> Claim:
    return Claim(person, rng.random() < 0.5, rng.random() < 0.15)


@functools.cache
def _knight_sets(people: int) -> tuple[list[int], int]:
    """For each person the set of assignments in which that person is a knight; and the set of all."""
    count = 1 << people
    knights = [sum(1 << a for a in range(count) if a >> person & 1) for person in range(people)]
    return knights, (1 << count) - 1


def _truth_set(statement: Statement, knight: list[int], everything: int) -> int:
    sides = [knight[c.person] if c.knight != c.negated else everything ^ knight[c.person] for c in statement.claims]
    match statement.operator:
        case None:
            return sides[0]
        case "and":
            return sides[0] & sides[1]
        case "or":
            return sides[0] | sides[1]
        case "if":
            return (everything ^ sides[0]) | sides[1]
        case _:
            return everything ^ sides[0] ^ sides[1]


def _role(statement: Statement, speaker: int, order: tuple[int, ...]) -> bytes:
    """A statement as the people in ``order`` see it, whoever they are and however it is worded."""
    claims = tuple((order.index(claim.person), claim.knight != claim.negated) for claim in statement.claims)
    return _table(statement.operator, claims, order.index(speaker), len(order))


@functools.cache
def _table(operator: str | None, claims: tuple[tuple[int, bool], ...], speaker: int, people: int) -> bytes:
    """Speaker, number of people, and the bit set of assignments (at most 2**3) that fit the statement."""
    statement = Statement(tuple(Claim(person, knight) for person, knight in claims), operator)
    fits = sum(1 << a for a in range(1 << people) if statement.holds(a) == bool(a >> speaker & 1))
    return bytes((speaker, people, fits))


def _digest(parts: list[bytes]) -> bytes:
    return hashlib.blake2b(b"".join(len(part).to_bytes(2, "little") + part for part in parts), digest_size=16).digest()
