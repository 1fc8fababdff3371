"""Questions whose answers take several searches, and written agents that answer them.

    who is the boss of the friend of Ann?
    <think> first, friend of Ann. </think>
    <tool_call> <function=search> <parameter=query> friend of Ann </parameter> </function> </tool_call>
        <tool_response> the friend of Ann is Ben. </tool_response>
    <think> so now the boss of Ben. </think>
    <tool_call> <function=search> <parameter=query> boss of Ben </parameter> </function> </tool_call>
        <tool_response> the boss of Ben is Cal. </tool_response>
    <think> that is all. </think> <answer> Cal </answer>

Each search needs the result of the one before. A written agent asks other facts than ``facts.txt``, so a model of these
texts knows none of the tool's. Wording and flaws are random.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: Object by relation and person.
FACTS = {
    (relation, person): other
    for relation, person, other in re.findall(
        r"the (\w+) of (\w+) is (\w+)\.", Path(__file__).with_name("facts.txt").read_text()
    )
}
RELATIONS = sorted({relation for relation, _ in FACTS})
NAMES = sorted({person for _, person in FACTS})
FEWEST, MOST = 2, 4  # searches of a question
FIRST = ("first", "i begin with", "i look for", "let me see:", "i need to know:")
THEN = ("so now", "next", "then", "good, now", "let me see:", "so i look for")
AGAIN = ("wait, again:", "let me check:")
DONE = ("that is all.", "this is the end.", "so i know it.", "good.")
GUESS = ("i guess.", "i know it.", "it must be this.")
UNKNOWN = "nothing is known of this."
#: Flaws of written agents, with their probabilities: what RL can remove.
FLAWS = {"guess": 0.2, "early": 0.15, "order": 0.25, "broken": 0.1}
#: Probability that an agent searches twice for the same.
REPEATED = 0.1


@dataclass(frozen=True)
class Question:
    """Question about ``relations[-1]`` of ... of ``relations[0]`` of ``person``."""

    person: str
    relations: tuple[str, ...]

    def text(self) -> str:
        return f"who is {''.join(f'the {relation} of ' for relation in reversed(self.relations))}{self.person}?"

    def answer(self, facts: dict[tuple[str, str], str] = FACTS) -> str:
        person = self.person
        for relation in self.relations:
            person = facts[relation, person]
        return person

    @property
    def split(self) -> str:
        return "test" if zlib.crc32(self.text().encode()) % 5 == 0 else "train"


def draw(rng: random.Random) -> Question:
    return Question(rng.choice(NAMES), tuple(rng.choices(RELATIONS, k=rng.randint(FEWEST, MOST))))


def questions(seed: int, split: str) -> Iterator[Question]:
    """Yield different questions of a split, ``"train"`` or ``"test"``; a question's text determines its split."""
    rng = random.Random(f"{seed} {split}")
    seen = set[Question]()
    while True:
        question = draw(rng)
        if question.split == split and question not in seen:
            seen.add(question)
            yield question


def call(query: str) -> str:
    """Return a call of the tool in the form of verl's ``qwen3_coder`` parser."""
    return f"<tool_call> <function=search> <parameter=query> {query} </parameter> </function> </tool_call>"


def conversation(question: Question, rng: random.Random, flawed: bool = True) -> list[dict[str, str]]:
    """Return the messages of a written agent, with flaws as in :data:`FLAWS`, over random facts."""
    facts = {fact: rng.choice(NAMES) for fact in FACTS}
    flaw = rng.choices([None, *FLAWS], [1 - sum(FLAWS.values()), *FLAWS.values()])[0] if flawed else None
    messages = [{"role": "user", "content": question.text()}]

    def say(content: str) -> None:
        messages.append({"role": "assistant", "content": content})

    if flaw == "guess":
        say(f"<think> {rng.choice(GUESS)} </think> <answer> {rng.choice(NAMES)} </answer>")
        return messages
    relations = question.relations[::-1] if flaw == "order" else question.relations
    if flaw == "early":
        relations = relations[: rng.randrange(1, len(relations))]
    person = question.person
    broken = rng.randrange(len(relations)) if flaw == "broken" else None
    for i, relation in enumerate(relations):
        query = f"{relation} of {person}"
        think = f"<think> {rng.choice(THEN if i else FIRST)} the {query}. </think>"
        if i == broken:
            say(f"{think} <function=search> <parameter=query> {query} </parameter> </function>")
            return messages
        person = facts[relation, person]
        fact = {"role": "tool", "content": f"the {query} is {person}."}
        say(f"{think} {call(query)}")
        messages.append(fact)
        if rng.random() < REPEATED:
            say(f"<think> {rng.choice(AGAIN)} the {query}. </think> {call(query)}")
            messages.append(fact)
    say(f"<think> {rng.choice(DONE)} </think> <answer> {person} </answer>")
    return messages
