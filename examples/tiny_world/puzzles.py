"""Knights and Knaves, as in Logic-RL (https://arxiv.org/abs/2502.14768): knights tell the truth, knaves lie.

Each of 2 to 7 people makes one statement; exactly one assignment of knights and knaves satisfies all. An assignment of
n people is an integer of n bits (bit i set: person i is a knight). A set of assignments is an integer of 2**n bits, so
that logic on sets is Python's ``& | ^ ~``.
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
TEST_SHARE = 5  # one puzzle in five is a test puzzle
OPERATORS = ("and", "or", "if", "iff")

KIND = {True: "knight", False: "knave"}


@dataclass(frozen=True)
class Claim:
    """Claim that ``person`` is a knight, or (``knight`` false) a knave; ``negated`` words it as "is not a ..."."""

    person: int
    knight: bool
    negated: bool = False

    def holds(self, assignment: int) -> bool:
        return bool(assignment >> self.person & 1) == (self.knight != self.negated)

    def text(self, names: tuple[str, ...]) -> str:
        return f"{names[self.person]} is {'not ' if self.negated else ''}a {KIND[self.knight]}"


@dataclass(frozen=True)
class Statement:
    """Statement of one claim (``operator`` is ``None``), or of two claims with one of :data:`OPERATORS`."""

    claims: tuple[Claim, ...]
    operator: str | None = None

    def value(self, *truth: bool) -> bool:
        """Return the truth of the statement from the truth of its claims."""
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
    """Puzzle; person i, called ``names[i]``, makes ``statements[i]``."""

    names: tuple[str, ...]
    statements: tuple[Statement, ...]

    @property
    def people(self) -> int:
        return len(self.names)

    def text(self) -> str:
        """Return the prompt: one sentence per person, then the question."""
        said = [f"{name} says: {s.text(self.names)}." for name, s in zip(self.names, self.statements, strict=True)]
        return " ".join([*said, "who is who?"])


def solutions(puzzle: Puzzle) -> list[int]:
    """Return every assignment with true statements of knights and false ones of knaves, in ascending order."""
    knight, everything = _knight_sets(puzzle.people)
    fit = everything
    for person, statement in enumerate(puzzle.statements):
        fit &= ~(knight[person] ^ _truth_set(statement, knight, everything))
    return [assignment for assignment in range(1 << puzzle.people) if fit >> assignment & 1]


def describe(assignment: int, names: tuple[str, ...]) -> str:
    """Return the text of the answer, in the prompt's order of people."""
    return ", ".join(f"{name} {KIND[bool(assignment >> i & 1)]}" for i, name in enumerate(names))


def fingerprint(puzzle: Puzzle) -> bytes:
    """Return 16 bytes, equal for puzzles that differ only in names, order of people, or wording.

    Colour refinement (Weisfeiler-Leman) over the people in each statement, with truth tables as labels. Other puzzles
    rarely share a fingerprint; a collision costs one puzzle and never mixes the splits.
    """
    # A view is a person's perspective on a statement about them: roles, truth table, colours of the others.
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
    """Return ``"train"`` or ``"test"``, a property of the puzzle, so that no seed or size mixes the splits."""
    return "test" if int.from_bytes(fingerprint_[:4], "little") % TEST_SHARE == 0 else "train"


def generate(seed: int, split: str, seen: set[bytes] | None = None, people: Iterable[int] = ()) -> Iterator[Puzzle]:
    """Yield puzzles of one split, each with exactly one solution, until no more are found.

    Args:
        seed: The same seed gives the same puzzles.
        split: ``"train"`` or ``"test"``.
        seen: Fingerprints to exclude; those of the yielded puzzles are added. ``None`` allows repeated puzzles with
            other names.
        people: Numbers of people, drawn uniformly; if empty, drawn by :data:`PEOPLE_WEIGHTS`.
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
            del weights[size]  # only about 40 puzzles of two people exist
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
    # A statement is mostly about others; with two people one must be about the speaker.
    pool = others if len(others) > 1 and rng.random() < 0.85 else [speaker, rng.choice(others)]
    left, right = rng.sample(pool, 2)
    return Statement((_claim(rng, left), _claim(rng, right)), rng.choice(OPERATORS))


def _claim(rng: random.Random, person: int) -> Claim:
    return Claim(person, rng.random() < 0.5, rng.random() < 0.15)


@functools.cache
def _knight_sets(people: int) -> tuple[list[int], int]:
    """Return each person's set of assignments in which the person is a knight, and the set of all assignments."""
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
    """Encode a statement from the view of the people in ``order``, independent of names and wording."""
    claims = tuple((order.index(claim.person), claim.knight != claim.negated) for claim in statement.claims)
    return _table(statement.operator, claims, order.index(speaker), len(order))


@functools.cache
def _table(operator: str | None, claims: tuple[tuple[int, bool], ...], speaker: int, people: int) -> bytes:
    """Encode speaker, number of people, and the bit set of assignments (at most 2**3) that fit the statement."""
    statement = Statement(tuple(Claim(person, knight) for person, knight in claims), operator)
    fits = sum(1 << a for a in range(1 << people) if statement.holds(a) == bool(a >> speaker & 1))
    return bytes((speaker, people, fits))


def _digest(parts: list[bytes]) -> bytes:
    return hashlib.blake2b(b"".join(len(part).to_bytes(2, "little") + part for part in parts), digest_size=16).digest()
