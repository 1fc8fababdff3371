"""Supervised targets: a reasoning that assumes, follows the statements, and backtracks.

    <think> suppose Ann is a knight. Ann says: Ben is a knave maybe and Cal is a knave no. Ann knight, so Ben knave.
    ... impossible. back: Ann knave, Ben open. ... </think> <answer> Ann knave, Ben knight </answer>

Each fact is "name kind", and a person's latest fact is valid. A statement is repeated with a mark after each claim
(``yes``, ``no``, or ``maybe`` if unknown) and then judged. Order of hypotheses, order of work and wording are random,
so a model of these traces has real sampling variety. Harder puzzles backtrack more and have longer traces.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from .puzzles import KIND, Puzzle, Statement, describe, solutions

MARK = {True: "yes", False: "no", None: "maybe"}
VOID = "open"  # replaces a kind whose hypothesis was dropped
CONTRADICTION = ("impossible", "contradiction", "that cannot be")
SO = ("so", "then", "hence", "thus")
FITS = ("fits", "fine", "this holds")
OPEN = ("unclear", "no news", "too early")
SUPPOSE = (
    "suppose {} is a {}.",
    "assume {} is a {}.",
    "what if {} is a {}?",
    "let us say {} is a {}.",
    "try {} as a {}.",
)
MUSING = ("hmm.", "wait.", "let me check.", "now look at this.")
GUESS = ("this is long, i guess.", "i am tired, i guess.", "it must be this.")
DONE = ("all is fine.", "so we are done.", "this is the answer.", "")
# Words that decide the answer; training weights their tokens more.
DECISIVE = frozenset(
    {
        *KIND.values(),
        *MARK.values(),
        "back",
        VOID,
        *(verdict.split()[0] for verdict in (*CONTRADICTION, *SO, *FITS, *OPEN)),
    }
)
# Flaws of responses with their probabilities (see README): the errors that RL can remove.
FLAWS = {"guess": 0.12, "slip": 0.08, "untagged": 0.25}


@dataclass
class _Search:
    puzzle: Puzzle
    rng: random.Random
    facts: dict[int, bool] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    # One entry per open hypothesis: its person, its value, and the earlier facts.
    open: list[tuple[int, bool, dict[int, bool]]] = field(default_factory=list)
    todo: list[int] = field(default_factory=list)

    def say(self, *options: str) -> None:
        self.words.append(self.rng.choice(options))

    def fact(self, person: int) -> str:
        return f"{self.puzzle.names[person]} {KIND[self.facts[person]]}"

    def learn(self, person: int, knight: bool) -> None:
        """Add a fact; queue the person's statement and all statements about the person."""
        self.facts[person] = knight
        for speaker in self.facts:
            mentioned = {claim.person for claim in self.puzzle.statements[speaker].claims}
            if (speaker == person or person in mentioned) and speaker not in self.todo:
                self.todo.append(speaker)

    def run(self, stop: Callable[[], bool]) -> None:
        while not stop():
            if self.todo:
                self.look(self.todo.pop(self.rng.randrange(len(self.todo))))
            elif len(self.facts) < self.puzzle.people:
                self.suppose()
            else:
                return

    def suppose(self) -> None:
        person = self.rng.choice([p for p in range(self.puzzle.people) if p not in self.facts])
        knight = self.rng.random() < 0.6
        self.say(*(form.format(self.puzzle.names[person], KIND[knight]) for form in SUPPOSE))
        self.open.append((person, knight, dict(self.facts)))
        self.learn(person, knight)

    def look(self, speaker: int) -> None:
        """Repeat a known person's statement, mark its claims, and derive facts."""
        if self.rng.random() < 0.06:
            self.say(*MUSING)
        statement = self.puzzle.statements[speaker]
        recalled = f"{self.puzzle.names[speaker]} says: {self.marked(statement)}. {self.fact(speaker)},"
        imaginable = self.worlds(statement)
        possible = [world for world, truth in imaginable if truth == self.facts[speaker]]
        self.words.append(recalled)
        if not possible:
            self.say(*(word + "." for word in CONTRADICTION))
            self.backtrack()
            return
        forced = [p for p in possible[0] if p not in self.facts and len({world[p] for world in possible}) == 1]
        self.rng.shuffle(forced)
        for person in forced:
            self.learn(person, possible[0][person])
        if forced:
            self.todo = [p for p in self.todo if p != speaker]
            self.say(*(f"{so} {', '.join(map(self.fact, forced))}." for so in SO))
        else:
            self.say(*(word + "." for word in (FITS if len(possible) == len(imaginable) else OPEN)))

    def marked(self, statement: Statement) -> str:
        claims = []
        for claim in statement.claims:
            known = self.facts.get(claim.person)
            holds = None if known is None else known == (claim.knight != claim.negated)
            claims.append(f"{claim.text(self.puzzle.names)} {MARK[holds]}")
        if statement.operator == "if":
            return f"if {claims[0]} then {claims[1]}"
        return f" {statement.operator} ".join(claims)

    def worlds(self, statement: Statement) -> list[tuple[dict[int, bool], bool]]:
        """Return the kinds of the mentioned people that agree with the facts, each with the statement's truth."""
        mentioned = [claim.person for claim in statement.claims]
        worlds = []
        for kinds in itertools.product((False, True), repeat=len(mentioned)):
            world = dict(zip(mentioned, kinds, strict=True))
            if all(self.facts.get(person, knight) == knight for person, knight in world.items()):
                truth = statement.value(*(world[c.person] == (c.knight != c.negated) for c in statement.claims))
                worlds.append((world, truth))
        return worlds

    def backtrack(self) -> None:
        """Drop the latest hypothesis; its opposite joins the facts before it."""
        person, knight, before = self.open.pop()
        kept = list(before)
        self.rng.shuffle(kept)
        dropped = [f"{self.puzzle.names[p]} {VOID}" for p in self.facts if p not in before and p != person]
        self.facts, self.todo = {known: before[known] for known in kept}, []
        self.learn(person, not knight)
        self.words.append(f"back: {', '.join([*dropped, *map(self.fact, [*kept, person])])}.")


def trace(puzzle: Puzzle, rng: random.Random, flaws: dict[str, float] | None = None) -> str:
    """Return one response to a puzzle.

    Args:
        puzzle: Puzzle with exactly one solution.
        rng: Generator of the order of work and the wording.
        flaws: Probability of each flaw (keys of :data:`FLAWS`); ``None``: no flaws, so the answer is always right.
    """
    flaws = flaws or {}
    flaw = rng.choices([None, *flaws], [1 - sum(flaws.values()), *flaws.values()])[0]
    search = _Search(puzzle, rng)
    steps = rng.randint(1, 2 * puzzle.people) if flaw == "guess" else 10**6
    countdown = iter(range(steps, -1, -1))
    search.run(stop=lambda: next(countdown) == 0)
    answer = sum(1 << person for person, knight in search.facts.items() if knight)
    if flaw == "guess":
        search.say(*GUESS)
        answer |= sum(rng.getrandbits(1) << p for p in range(puzzle.people) if p not in search.facts)
    else:
        search.say(*DONE)
        assert answer == solutions(puzzle)[0]
    if flaw == "slip":
        answer ^= 1 << rng.randrange(puzzle.people)
    reasoning, verdict = " ".join(filter(None, search.words)), describe(answer, puzzle.names)
    if flaw == "untagged":
        return f"<think> {reasoning} {verdict}" if rng.random() < 0.5 else f"<think> {reasoning} </think> {verdict}"
    return f"<think> {reasoning} </think> <answer> {verdict} </answer>"
