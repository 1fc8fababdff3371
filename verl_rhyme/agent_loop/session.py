"""The session of a task: one attempt at a sample, the turns it inherits, and the turns it leaves.

The agent loop worker sets it in a context variable of the task; the client reads it and keeps its state there, that of
parallel calls in a :class:`Call` each. In preset ``histospec`` it has only the sample's number and request records.
Where tokens may be of several policy versions, an attempt goes on at a new one: its aborted requests are sent again,
and its tools run on. Where they may not, the abort ends the attempt, wherever the agent loop is, and the coordinator
decides when the next one starts. After a failure or a resume of the run a partial attempt replays the complete turns
and the answers of their tools, and continues the last turn, each found by what it answers. Any other attempt starts
over, and drafts from the turns of the attempt before. What a turn answers also makes its noise, so a regenerated turn
draws with its noise again in whatever order the calls come. Of parallel calls that answer the same, the order decides.
"""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from verl_rhyme.history.keys import prompt_key
from verl_rhyme.placement.assignment import ANYWHERE, Assignment
from verl_rhyme.processes.deadline import Deadline
from verl_rhyme.sampling.noise import key_of
from verl_rhyme.scheduling.attempts import ABORTED, Attempt, AttemptReport

#: TransferQueue partition with the reports and turns of attempts that were interrupted at a checkpoint.
SESSIONS = "rhyme_sessions"
#: TransferQueue partition with the data of each loaded prompt, until all its samples are trained.
PROMPTS = "rhyme_prompts"
#: Column of a dispatched batch: the starts of each prompt's samples.
STARTS = "__rhyme_starts__"
#: Seconds that an interrupted attempt waits for its other requests, and between two looks.
_SETTLE_S, _POLL_S = 2.0, 0.01


class Interrupted(BaseException):
    """A weight update interrupted the attempt. Not an ``Exception``: an agent loop must not handle it as an error."""


@dataclass
class Turn:
    """Tokens that the model generates in one call of an agent loop."""

    prompt: str  # key of what it answers (history.keys.turn_key); empty where unknown
    tokens: array[int] = field(default_factory=lambda: array("i"))  # int32
    log_probs: array[float] | None = None  # float32, per token, by the policy that generated it; None: not requested
    first_version: int | None = None  # oldest policy version of its tokens; None without tokens
    version: int | None = None  # newest
    complete: bool = False  # it has ended
    stop_reason: str | None = None  # of the engine
    number: int = 0  # of turns with the same prompt that began before it in the attempt
    # int32, text of earlier attempts or requests in the turn, to draft from; never changed in place
    draft: array[int] = field(default_factory=lambda: array("i"))
    answers: list[list[str]] = field(default_factory=list)  # tool calls and their answers in JSON; "": ask again
    # routing replay: experts of its tokens but the last, and of prompt tokens that no earlier turn computed, uint8 or
    # uint16[tokens, layers, experts of a token]; None: not requested; never changed in place
    routes: np.ndarray | None = field(default=None, compare=False)

    def drop(self) -> None:
        """Begin the turn again: its tokens become the draft, with the rest of a longer one."""
        self.draft = self.tokens + self.draft[len(self.tokens) :]
        self.tokens, self.log_probs, self.first_version, self.version = array("i"), None, None, None
        self.complete, self.stop_reason, self.answers, self.routes = False, None, [], None

    def copy(self) -> Turn:
        log_probs = None if self.log_probs is None else self.log_probs[:]
        return replace(self, tokens=self.tokens[:], log_probs=log_probs, answers=[each[:] for each in self.answers])

    def to_dict(self) -> dict[str, Any]:
        """Return the stored form, with bytes in place of arrays, because thousands of attempts end at once."""
        log_probs = None if self.log_probs is None else self.log_probs.tobytes()
        arrays = {"tokens": self.tokens.tobytes(), "log_probs": log_probs, "draft": self.draft.tobytes()}
        routes = self.routes
        stored = None if routes is None else [routes.tobytes(), routes.dtype.str, list(routes.shape)]
        answers = [each[:] for each in self.answers]  # it may run on
        return {**vars(self), **arrays, "routes": stored, "answers": answers}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Turn:
        log_probs, routes = stored["log_probs"], stored.get("routes")
        return cls(
            **{
                **stored,
                "tokens": array("i", stored["tokens"]),
                "log_probs": None if log_probs is None else array("f", log_probs),
                "draft": array("i", stored.get("draft", b"")),
                "routes": None if routes is None else np.frombuffer(routes[0], routes[1]).reshape(routes[2]),
            }
        )


@dataclass
class Conversation:
    """The requests of one id; an agent loop may hold several conversations."""

    key: str  # prompt key in hex: the session's, or that of the first turn
    records: list[dict[str, Any]] = field(default_factory=list)
    requests: int = 0  # those under way included


@dataclass(eq=False)
class Call:
    """A call of an agent loop for one turn, and its latest request, of which verl's ``generate`` returns little."""

    conversation: Conversation
    prompt_tokens: int = 0  # number of tokens before its turn
    turn: Turn | None = None  # of a dispatched attempt
    noise: str = ""  # key in hex of the noise that draws its tokens; empty for separate noise per request
    earlier_text: bytes = b""  # int32, what an earlier attempt or request generated in the turn, to draft from
    moving: bool = False  # its request was aborted to continue on another replica
    queued_at: float = 0.0  # seconds since the epoch, of the first of its latest requests without a token; 0 without
    answered: list[list[str]] = field(default_factory=list)  # of its turn's answers, those that its agent loop has got
    server: str | None = None  # address; None before the router chose one
    handle: Any = None  # of the server
    request: str | None = None  # id on the server; None before it is sent

    def abort(self) -> bool:
        """Abort the request, without waiting. Return false if it was not sent yet."""
        if self.request is None:
            return False
        self.handle.abort_request.remote(self.request, reset_prefix_cache=False)
        return True


@dataclass
class Session:
    """One attempt at a sample, kept by the agent loop's task."""

    spans: bool = False  # its tokens may be of several policy versions
    assignment: Assignment = ANYWHERE
    attempt: Attempt | None = None  # None without a coordinator
    earlier_turns: list[Turn] = field(default_factory=list)  # of the attempt before, not begun again in this one
    # of earlier attempts' requests whose tokens are continued; at the end, of this one's as well
    records: list[dict[str, Any]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)  # so far, of a dispatched attempt
    sample: int = -1  # number in the group; -1 when unknown
    noise: str = ""  # key in hex from which each turn's noise is made; empty for separate noise per request
    calls: list[Call] = field(default_factory=list)  # running
    server: str = ""  # address of the latest one; empty before the first request
    conversations: dict[str, Conversation] = field(default_factory=dict)  # by request id
    scores: list[float] = field(default_factory=list)  # at the end, filter_groups.metric of each trajectory
    key: str = ""  # history.keys.data_key; if empty, each conversation has the key of its first turn's token ids
    no_trajectory: bool = False  # at the end, whether the agent loop returned none
    interrupted: bool = False  # even if the agent loop continues
    abandoned: bool = False  # the coordinator does not wait for it
    generated: AttemptReport | None = None  # report of its complete response
    deadline: Deadline = field(default_factory=Deadline)  # of its tools and its reward
    diverged: bool = False  # a call answered something that no earlier turn answered
    media: dict[int, tuple[Any, Any]] = field(default_factory=dict)  # hashes by identity (history.keys.turn_key)
    # texts, int32[tokens], and experts of their tokens but the last (agent_loop.routes); none is another's beginning
    routes: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    # Of tools, by name and id, until their release: the answer to their only call; None after others (.tools).
    tool_instances: dict[tuple[str, str], Any] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def inherit(self, turns: list[Turn], records: list[dict[str, Any]], partial: bool) -> None:
        """Begin with what the attempt before left: continue its turns (``partial``), or only draft from them."""
        self.earlier_turns = turns
        if partial:
            self.records = records
        else:
            for turn in turns:
                turn.drop()

    @contextmanager
    def generation(self, call: Call) -> Iterator[None]:
        """Wrap each call of the agent loop for tokens. Raise :class:`Interrupted` again after an interruption, which
        ``asyncio.gather(..., return_exceptions=True)`` may have returned to the agent loop as a value."""
        if self.interrupted:
            raise Interrupted
        self.calls.append(call)
        with self.deadline.pause():
            try:
                yield
            except Interrupted:
                self.interrupted = True
                raise
            finally:
                self.calls.remove(call)

    async def settle(self) -> None:
        """Abort what an interrupted attempt still generates, and wait (not for long) until its tokens have arrived.

        Of parallel calls the first interrupted one ends the agent loop. Without the tokens of the others the next
        attempt would draw these turns anew, the long ones more often than the short ones.
        """
        for call in list(self.calls):
            call.abort()
        for _ in range(round(_SETTLE_S / _POLL_S)):
            if not self.calls:
                break
            await asyncio.sleep(_POLL_S)

    @property
    def dispatched(self) -> bool:
        """Whether a coordinator started the attempt and awaits a report of its end."""
        return self.attempt is not None

    @property
    def name(self) -> str:
        """``Attempt.name``; empty without a coordinator."""
        return "" if self.attempt is None else self.attempt.name

    def conversation(self, request_id: str, prompt_ids: Sequence[int]) -> Conversation:
        """Return the conversation of this id; all tokens before its first request may key it."""
        if request_id not in self.conversations:
            key = self.key or prompt_key(prompt_ids).hex()
            met = any(other.key == key for other in self.conversations.values())
            earlier = [] if met else [record for record in self.records if record["prompt_key"] == key]
            self.conversations[request_id] = Conversation(key, earlier, len(earlier))
        return self.conversations[request_id]

    def begin_turn(self, prompt: str) -> Turn:
        """Begin a turn that answers ``prompt``, with its earlier tokens and its draft."""
        with self._lock:
            left = self.earlier_turns
            known = next((turn for turn in left if turn.prompt == prompt), None)
            self.diverged |= known is None
            before = known or next((turn for turn in left if not turn.tokens), None)
            turn = known or Turn(prompt, draft=before.draft if before else array("i"))
            turn.number = sum(other.prompt == prompt for other in self.turns)
            self.earlier_turns = [each for each in left if each is not before]
            self.turns.append(turn)
            return turn

    def noise_of(self, turn: Turn) -> str:
        return f"{key_of(self.noise, turn.prompt, turn.number):016x}" if self.noise else ""

    def extend(
        self,
        turn: Turn,
        tokens: list[int],
        log_probs: list[float] | None,
        version: int | None,
        stop_reason: str | None,
        routes: np.ndarray | None = None,
    ) -> None:
        """Add a request's tokens, of one policy version, to a turn. Raise :class:`Interrupted` if the engine stopped
        before the turn ended, or if the turns are of several policy versions and may not be."""
        if tokens:
            if version is None:
                raise ValueError(
                    f"{self.deadline.where}: the rollout server returned tokens without a policy version "
                    "(global_steps): it must get the trainer's weights, and their version, before it generates"
                )
            # min and max: a replica that the request moved to may be versions behind.
            turn.first_version = version if turn.first_version is None else min(turn.first_version, version)
            turn.version = version if turn.version is None else max(turn.version, version)
            if not turn.tokens:
                turn.log_probs = None if log_probs is None else array("f")
            if log_probs is None or turn.log_probs is None:
                turn.log_probs = None
            else:
                turn.log_probs.extend(log_probs)
            if routes is not None:
                turn.routes = routes if turn.routes is None else np.concatenate([turn.routes, routes])
            turn.tokens.extend(tokens)
        turn.stop_reason = stop_reason
        turn.complete = stop_reason not in ABORTED
        if not turn.complete:
            raise Interrupted
        turns = [turn for turn in self.turns if turn.tokens]
        if not self.spans and len({version for turn in turns for version in (turn.first_version, turn.version)}) > 1:
            raise Interrupted

    @property
    def tokens(self) -> int:
        """Response tokens so far, and those of earlier turns from which this or the next attempt may continue."""
        return sum(len(turn.tokens) for turn in self.carried_over)

    @property
    def first_version(self) -> int | None:
        return min((turn.first_version for turn in self.carried_over if turn.first_version is not None), default=None)

    @property
    def version(self) -> int | None:
        return max((turn.version for turn in self.turns if turn.version is not None), default=None)

    @property
    def carried_over(self) -> list[Turn]:
        """Turns that the next attempt begins with, if this one is interrupted. Earlier turns that no call has asked for
        are among them, until the agent loop takes another way."""
        return [*self.turns, *(turn for turn in self.earlier_turns if not (self.diverged and turn.tokens))]

    @property
    def replica(self) -> str:
        return self.server or self.assignment.replica

    def move(self, replica: str, reason: str = "") -> bool:
        """Continue the running requests on another replica, with their tokens, versions and log-probs. Does not wait.
        Return whether a request is under way; if not, the next request goes to the replica."""
        self.assignment = replace(self.assignment, replica=replica, reason=reason)
        moved = [call for call in list(self.calls) if call.server != replica and call.abort()]
        for call in moved:
            call.moving = True
        return bool(moved)


_CURRENT: ContextVar[Session | None] = ContextVar("verl_rhyme_session", default=None)


def set_current(session: Session) -> None:
    """Set the session of this task and of the tasks that it starts."""
    _CURRENT.set(session)


def current() -> Session | None:
    """Return the session of this task; ``None`` outside of this package's agent loop workers."""
    return _CURRENT.get()
