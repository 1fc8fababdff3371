"""Random road maps, and written searches with their wrong turns.

    roads: hull: york ely. york: bath hull. ... from hull to bath
    <think> at hull: york, ely. try ely. at ely: hull. dead end, back to hull. go york. ... there. </think>
    <answer> hull york bath </answer>

The search takes the roads of each town in random order and draws its wording at random, so a model of these texts has
real sampling variety. Large maps give long searches.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

# fmt: off
TOWNS = (
    "bath", "bury", "cork", "deal", "derby", "dover", "ely", "epsom", "exeter", "fowey", "hove", "hull", "ilkley",
    "ipswich", "kendal", "leeds", "lewes", "london", "luton", "oban", "oxford", "perth", "poole", "ripon", "rugby",
    "rye", "truro", "wells", "wigan", "york",
)
# fmt: on
GO = ("try", "go", "now", "take", "next")
LOOK = ("at", "from", "here is", "roads of")
DEAD = ("dead end", "nothing new", "no way on", "stuck")
BACK = ("back to", "return to", "again at")
DONE = ("there.", "we are there.", "found it.", "this is the goal.")
MUSING = ("hmm.", "let us see.", "not here.")
#: Probability of an answer without a town, and of one without tags: flaws for RL to correct.
FLAWS = {"slip": 0.12, "untagged": 0.2}


@dataclass(frozen=True)
class Map:
    """Map whose roads are pairs of towns in both directions; ``goal`` can be reached from ``start``."""

    roads: tuple[tuple[str, str], ...]
    start: str
    goal: str

    def text(self) -> str:
        towns = dict.fromkeys(town for road in self.roads for town in road)
        listed = " ".join(f"{town}: {' '.join(self.neighbours(town))}." for town in towns)
        return f"roads: {listed} from {self.start} to {self.goal}"

    def neighbours(self, town: str) -> list[str]:
        return [b if a == town else a for a, b in self.roads if town in (a, b)]


def draw(rng: random.Random, towns: tuple[int, int] = (8, 16)) -> Map:
    """A connected map: a tree and a few roads more."""
    names = rng.sample(TOWNS, rng.randint(*towns))
    roads = {(names[rng.randrange(max(0, i - 4), i)], names[i]) for i in range(1, len(names))}
    for _ in range(rng.randint(1, 3)):
        a, b = rng.sample(names, 2)
        if (b, a) not in roads:
            roads.add((a, b))
    shuffled = [road if rng.random() < 0.5 else road[::-1] for road in sorted(roads)]
    rng.shuffle(shuffled)
    start, goal = rng.sample(names, 2)
    return Map(tuple(shuffled), start, goal)


def search(task: Map, rng: random.Random, flawed: bool = True) -> str:
    """Return the text of a depth-first search with each tried road, with flaws as in :data:`FLAWS`."""
    words: list[str] = []
    way, seen = [task.start], {task.start}
    while way[-1] != task.goal:
        town = way[-1]
        around = task.neighbours(town)
        rng.shuffle(around)
        words.append(f"{rng.choice(LOOK)} {town}: {', '.join(around)}.")
        new = [other for other in around if other not in seen]
        if task.goal in new:
            new = [task.goal]
        if rng.random() < 0.08:
            words.append(rng.choice(MUSING))
        if new:
            seen.add(new[0])
            way.append(new[0])
            words.append(f"{rng.choice(GO)} {new[0]}.")
        else:
            way.pop()
            words.append(f"{rng.choice(DEAD)}, {rng.choice(BACK)} {way[-1]}.")
    words.append(rng.choice(DONE))
    answer = way[:]
    flaw = rng.choices([None, *FLAWS], [1 - sum(FLAWS.values()), *FLAWS.values()])[0] if flawed else None
    if flaw == "slip" and len(answer) > 2:
        answer.pop(rng.randrange(1, len(answer) - 1))
    thought, verdict = " ".join(words), " ".join(answer)
    if flaw == "untagged":
        return f"<think> {thought} {verdict}"
    return f"<think> {thought} </think> <answer> {verdict} </answer>"
