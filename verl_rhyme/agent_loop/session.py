"""What a task works on: one attempt at a sample; what earlier ones left to it, and what it leaves to the next.

The agent loop worker says it, in a variable of the task's context; the client reads it and keeps there what it learns,
so that all of it ends with the task. In verl's own modes that is the sample's number and the records of its requests.
An attempt that the coordinator started has a name as well, and its turns are kept:

An interruption ends an attempt, whatever the agent loop was about; its turns are reported, and the coordinator decides
when the next one starts. A partial one replays the turns that were complete and continues the last where it was cut;
else it begins anew, and the turns of the attempt before are what its drafts are made from.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from verl_rhyme.history.keys import prompt_key
from verl_rhyme.placement.assignment import ANYWHERE, Assignment
from verl_rhyme.processes.deadline import Deadline

#: TransferQueue partition with an entry for each attempt that reported its end: how it ended, and its turns.
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
        tokens: int32, what it said.
        log_probs: float32, of each token, by the policy that made it; ``None`` where none were asked for.
        first_version, version: Oldest and newest policy version of its tokens; ``None`` without any.
        complete: It came to its end.
        stop_reason: The engine's.
    """

    prompt: str
    tokens: array[int] = field(default_factory=lambda: array("i"))
    log_probs: array[float] | None = None
    first_version: int | None = None
    version: int | None = None
    complete: bool = False
    stop_reason: str | None = None

    def drop(self) -> bytes:
        """It begins again. Returns what it has said: int32 bytes."""
        said = self.tokens.tobytes()
        self.tokens, self.log_probs, self.first_version, self.version = array("i"), None, None, None
        return said

    def to_dict(self) -> dict[str, Any]:
        """As it is stored, tokens and log-probs as bytes: thousands of attempts are reported at once."""
        log_probs = None if self.log_probs is None else self.log_probs.tobytes()
        return {**vars(self), "tokens": self.tokens.tobytes(), "log_probs": log_probs}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Turn:
        """What :meth:`to_dict` gave."""
        log_probs = stored["log_probs"]
        return cls(
            **{
                **stored,
                "tokens": array("i", stored["tokens"]),
                "log_probs": None if log_probs is None else array("f", log_probs),
            }
        )


@dataclass
class Conversation:
    """The requests of one id: an agent loop may hold several conversations.

    Attributes:
        key: Prompt key in hex: the session's, or that of its first turn.
        records: Of its requests.
        began: Tokens before its latest turn.
        previous: int32 bytes, what an earlier attempt said in that turn.
    """

    key: str
    records: list[dict[str, Any]] = field(default_factory=list)
    began: int = 0
    previous: bytes = b""


@dataclass
class Session:
    """One attempt at a sample, as the agent loop's task carries it.

    Attributes:
        partial: Continue what is kept, rather than draft from it.
        assignment: Where and how its requests are to run.
        name: ``Attempt.name``; empty for one that no coordinator started.
        kept: Turns of the attempt before.
        records: Request records of earlier attempts whose tokens are continued; at the end, of this one as well.
        turns: Turns so far, of one that was dispatched.
        sample: Its number in the group, -1 when unknown.
        noise: Key in hex of the noise its tokens are drawn with; empty for noise of each request's own.
        moving: Its running request was ended so that it goes on elsewhere.
        call: Where its latest request is; the client's.
        conversations: By request id.
        scores: At the end, for each trajectory what groups are filtered by; empty where none are.
        key: Of its prompt, by the prompt's data (:func:`~verl_rhyme.history.keys.data_key`); empty where these are not
            known: each conversation then has the key of its first turn's token ids.
        empty: At the end, the agent loop gave no trajectory.
        interrupted: Its attempt has ended, whatever the agent loop makes of that.
        deadline: Of its tools and its reward.
    """

    partial: bool = False
    assignment: Assignment = ANYWHERE
    name: str = ""
    kept: list[Turn] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    sample: int = -1
    noise: str = ""
    moving: bool = False
    call: Any = None
    conversations: dict[str, Conversation] = field(default_factory=dict)
    scores: list[float] = field(default_factory=list)
    key: str = ""
    empty: bool = False
    interrupted: bool = False
    deadline: Deadline = field(default_factory=Deadline)

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Around each call of the agent loop for tokens.

        Raises:
            Interrupted: The attempt has ended before. ``asyncio.gather(..., return_exceptions=True)`` hands an agent
                loop the interruption of one call as a value, with which it may go on.
        """
        if self.interrupted:
            raise Interrupted
        with self.deadline.paused():
            try:
                yield
            except Interrupted:
                self.interrupted = True
                raise

    @property
    def dispatched(self) -> bool:
        """By a coordinator, which is to hear how it ends."""
        return bool(self.name)

    def conversation(self, request_id: str, prompt_ids: Sequence[int]) -> Conversation:
        """The one of a request.

        Args:
            request_id: Its conversation's, as agent loops give it.
            prompt_ids: All tokens before it: of the conversation, where it begins here.
        """
        if request_id not in self.conversations:
            key = self.key or prompt_key(prompt_ids).hex()
            met = any(other.key == key for other in self.conversations.values())
            earlier = [] if met else [record for record in self.records if record["prompt_key"] == key]
            self.conversations[request_id] = Conversation(key, earlier)
        return self.conversations[request_id]

    def begin(self, prompt: str) -> tuple[Turn, bytes]:
        """A turn begins.

        Args:
            prompt: Key in hex of all tokens before it.

        Returns:
            The turn, with the tokens it has already (complete when there is nothing to generate), and int32 bytes: the
            tokens of an earlier attempt to draft from.
        """
        number = len(self.turns)
        before = self.kept[number] if number < len(self.kept) else None
        turn, previous = Turn(prompt), b""
        if before is not None and self.partial:
            if before.prompt == prompt:
                turn = before
            else:  # a tool gave another answer than the first time: what followed does not fit any more
                del self.kept[number:]
        elif before is not None:
            previous = before.tokens.tobytes()
        self.turns.append(turn)
        return turn, previous

    def extend(
        self,
        turn: Turn,
        tokens: list[int],
        log_probs: list[float] | None,
        version: int | None,
        stop_reason: str | None,
        first_version: int | None = None,
    ) -> None:
        """More tokens of a turn.

        Args:
            turn: This one.
            tokens: What was said.
            log_probs: Of each token, by the policy that made it; ``None`` where none were asked for.
            version: Policy version of the last of them.
            stop_reason: The engine's.
            first_version: Policy version of the first of them; ``None``: the same.

        Raises:
            Interrupted: The engine was stopped before the turn ended; or, unless it is partial, an earlier turn is
                another policy's.
        """
        if tokens:
            first = version if first_version is None else first_version
            # Not in the order of the tokens: a replica that one is moved to may be behind.
            turn.first_version = min((v for v in (turn.first_version, first) if v is not None), default=None)
            turn.version = max((v for v in (turn.version, version) if v is not None), default=None)
            if not turn.tokens:
                turn.log_probs = None if log_probs is None else array("f")
            if log_probs is None or turn.log_probs is None:
                turn.log_probs = None
            else:
                turn.log_probs.extend(log_probs)
            turn.tokens.extend(tokens)
        turn.stop_reason = stop_reason
        turn.complete = stop_reason not in ("abort", "aborted")
        if not turn.complete:
            raise Interrupted
        said = [turn for turn in self.turns if turn.tokens]
        if not self.partial and len({version for turn in said for version in (turn.first_version, turn.version)}) > 1:
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
            tokens = turn.tokens if turn else array("i")
            rest = before.tokens[len(tokens) :] if before else array("i")
            left.append(Turn((turn or before).prompt, tokens + rest))  # type: ignore[union-attr]
        return left


_CURRENT: ContextVar[Session | None] = ContextVar("verl_rhyme_session", default=None)


def enter(session: Session) -> None:
    """From here on this task, and what it starts, works on ``session``."""
    _CURRENT.set(session)


def current() -> Session | None:
    """The session this task works on; ``None`` where its agent loop worker is none of ours."""
    return _CURRENT.get()
