"""One sample being generated, over interruptions: what is kept of it, and what its next attempt begins with.

An interruption ends an attempt, whatever the agent loop was about; its turns are reported, and the trainer decides when
the next one starts. A partial one replays the turns that were complete and continues the last where it was cut; else it
begins anew, and the turns of the attempt before are what its drafts are made from.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from verl_rhyme.history.keys import prompt_key

#: TransferQueue partition with an entry for each sample that was started: how its latest attempt ended, and its turns.
SESSIONS = "rhyme_sessions"
#: The partition with the data of each loaded prompt, until all its samples are trained.
PROMPTS = "rhyme_prompts"
#: Column of a dispatched batch: the samples of the prompt to start.
STARTS = "__rhyme_starts__"


class Interrupted(BaseException):
    """The attempt was cut short by a weight update. No ``Exception``: an agent loop must not take it for an error."""


@dataclass
class Turn:
    """What the model said at one go.

    Attributes:
        prompt: Key of all the tokens before it.
        tokens: What it said.
        log_probs: Of each token, by the policy that made it; ``None`` where none were asked for.
        first_version, version: Policy versions of its first and of its last token; ``None`` without any.
        complete: It came to its end.
        stop_reason: The engine's.
    """

    prompt: str
    tokens: list[int]
    log_probs: list[float] | None = None
    first_version: int | None = None
    version: int | None = None
    complete: bool = False
    stop_reason: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Shares its lists: thousands of attempts are reported at once, and ``asdict`` copies token by token."""
        return dict(vars(self))


@dataclass
class Session:
    """An attempt at a sample.

    Attributes:
        partial: Continue what is kept, rather than draft from it.
        priority: Of its requests, lowest first.
        name: See :func:`session_key`.
        kept: Turns of the attempt before.
        records: Request records of earlier attempts whose tokens are continued; at the end, of this one as well.
        turns: Turns so far.
        scores: At the end, for each trajectory what groups are filtered by; empty where none are.
    """

    partial: bool
    priority: int = 0
    name: str = ""
    kept: list[Turn] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)

    def begin(self, prompt_ids: list[int]) -> tuple[Turn, list[int]]:
        """A turn begins.

        Args:
            prompt_ids: All tokens before it.

        Returns:
            The turn, with the tokens it has already (complete when there is nothing to generate), and the tokens of
            an earlier attempt to draft from.
        """
        prompt = prompt_key(prompt_ids).hex()
        number = len(self.turns)
        before = self.kept[number] if number < len(self.kept) else None
        turn, previous = Turn(prompt, []), []
        if before is not None and self.partial:
            if before.prompt == prompt:
                turn = before
            else:  # a tool gave another answer than the first time: what followed does not fit any more
                del self.kept[number:]
        elif before is not None:
            previous = before.tokens
        self.turns.append(turn)
        return turn, previous

    def extend(
        self,
        turn: Turn,
        tokens: list[int],
        log_probs: list[float] | None,
        version: int | None,
        stop_reason: str | None,
    ) -> None:
        """More tokens of a turn.

        Raises:
            Interrupted: The engine was stopped before the turn ended; or, unless it is partial, an earlier turn is
                another policy's.
        """
        if tokens:
            if log_probs is not None and (turn.tokens == [] or turn.log_probs is not None):
                turn.log_probs = [*(turn.log_probs or []), *log_probs]
            if not turn.tokens:
                turn.first_version = version
            turn.version = version
            turn.tokens = [*turn.tokens, *tokens]
        turn.stop_reason = stop_reason
        turn.complete = stop_reason not in ("abort", "aborted")
        if not turn.complete:
            raise Interrupted
        if not self.partial and len({turn.version for turn in self.turns if turn.tokens}) > 1:
            raise Interrupted

    @property
    def tokens(self) -> int:
        """Response tokens so far."""
        return sum(len(turn.tokens) for turn in self.turns)

    @property
    def first_version(self) -> int | None:
        """Of its oldest token; ``None`` without any."""
        return min((turn.first_version for turn in self.turns if turn.first_version is not None), default=None)

    @property
    def left(self) -> list[Turn]:
        """What the next attempt begins with, when this one was cut short.

        Unless it is partial that is the latest text and, where that is shorter, what an earlier attempt said from there
        on.
        """
        if self.partial:
            return [*self.turns, *self.kept[len(self.turns) :]]
        longest = max(len(self.turns), len(self.kept))
        left = []
        for number in range(longest):
            turn, before = (turns[number] if number < len(turns) else None for turns in (self.turns, self.kept))
            tokens = turn.tokens if turn else []
            left.append(Turn((turn or before).prompt, tokens + (before.tokens[len(tokens) :] if before else [])))  # type: ignore[union-attr]
        return left


_CURRENT: ContextVar[Session | None] = ContextVar("verl_rhyme_session", default=None)


def enter(session: Session) -> None:
    """From here on this task, and what it starts, works on ``session``."""
    _CURRENT.set(session)


def current() -> Session | None:
    """The session this task works on; ``None`` in validation."""
    return _CURRENT.get()
