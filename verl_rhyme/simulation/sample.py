"""A sample in flight in a simulation: its turns, its context, and the records of its requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from verl_rhyme.planning.workload import Prompt, Turn
from verl_rhyme.scheduling.attempts import Attempt, Record
from verl_rhyme.simulation.engine import Request


@dataclass(slots=True, eq=False)
class Sample:
    """An attempt at a sample; a single turn is one of a sequence of length 1."""

    attempt: Attempt
    prompt: Prompt
    turns: Sequence[Turn]
    pace: float
    drafts: float
    priority: int
    needs: int = 0  # minimum policy version
    replica: str = ""
    first: int | None = None  # version of its oldest token
    turn: int = 0
    emitted: float = 0.0  # tokens of the turn, in earlier requests
    done: int = 0  # tokens of the policy in earlier turns
    context: int = 0  # tokens of earlier turns, tool answers included
    queued_at: float = 0.0
    records: list[Record] = field(default_factory=list)

    @property
    def made(self) -> float:
        """Tokens of the policy in earlier requests."""
        return self.done + self.emitted

    @property
    def ended(self) -> bool:
        return self.turn == len(self.turns)

    def request(self, now: float) -> Request:
        """Return the request that its turn sends now."""
        self.queued_at = now
        prompt, tokens = self.prompt, self.turns[self.turn].tokens
        priority = 0 if self.turn else self.priority  # as agent_loop.client
        name = self.attempt, prompt.key, prompt.tokens
        return Request(*name, tokens, self.emitted, priority, self.pace, self.drafts, self.context)

    def aborted(self, emitted: float, cached: float, now: float, version: int) -> None:
        """Its request ended before its turn, on a replica of this version."""
        self._record(emitted, cached, now, version)
        self.emitted = emitted

    def turn_ended(self, request: Request, now: float, version: int) -> float | None:
        """Its request finished; return the seconds until the next turn, ``None`` after the last."""
        turn = self.turns[self.turn]
        self._record(turn.tokens, request.cached, now, version)
        self.done, self.emitted = self.done + turn.tokens, 0.0
        self.turn += 1
        self.context += turn.tokens + turn.tool_tokens
        return None if self.ended else turn.tool_s

    def _record(self, emitted: float, cached: float, now: float, version: int) -> None:
        response, prompt = int(emitted) - int(self.emitted), self.prompt.tokens + self.context + int(self.emitted)
        if response:
            self.first = version if self.first is None else min(self.first, version)
        self.records.append(
            {
                "prompt_tokens": prompt,
                "response_tokens": response,
                "accepted_tokens": round(response * (1 - 1 / self.pace)),
                "cached_tokens": prompt if cached < 0 else int(cached),
                "queued_at": self.queued_at,
                "finished_at": now,
                "policy_version_start": version,
                "policy_version_end": version,
            }
        )
