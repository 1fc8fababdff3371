"""The LLM client: names the prompt on each request and keeps what the server reports about each.

verl's own client gives each request a fresh id, each step a fresh uid and, when it resumes an aborted request, drops
what the server said of it before.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from array import array
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import uuid4

from ray.exceptions import ActorUnavailableError
from verl.utils import normalize_token_ids
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from verl_rhyme.agent_loop.session import Conversation, Interrupted, Session, Turn, current
from verl_rhyme.history.keys import prompt_key
from verl_rhyme.observability.errors import first_line
from verl_rhyme.placement.assignment import ANYWHERE
from verl_rhyme.processes.deaths import is_death
from verl_rhyme.processes.request import DIED, FIELD, RequestMeta
from verl_rhyme.sampling.continuation import starting_over

logger = logging.getLogger(__name__)

_TOKEN_BYTES = 4
#: Conversations remembered of agent loop workers that do not say what they work on.
_MAX_STRANGERS = 4096


#: As verl's router says it.
_NO_SERVERS = "No available servers in load balancer"
#: Seconds between two questions for a server where there is none.
_SERVER_WAIT_S = 1.0
#: Seconds before an aborted request is sent again, as verl's client waits.
_RESUME_S = 1.0


class _Call:
    """Where this task's request to a server is: below verl's ``generate``, which tells it to nobody."""

    server: str | None = None
    handle: Any = None
    request: str | None = None  # its name there

    def end(self) -> bool:
        """Abort it there; false when it is nowhere yet. Does not wait."""
        if self.request is None:
            return False
        self.handle.abort_request.remote(self.request, reset_prefix_cache=False)
        return True


_CALL: ContextVar[_Call] = ContextVar("verl_rhyme_call")


class _Requests(LLMServerClient):
    """What stands below verl's resume loop; a class of its own, as the loop calls ``super().generate``."""

    def __init__(self, config: Any, load_balancer_handle: Any = None, **kwargs: Any) -> None:
        super().__init__(config, load_balancer_handle, **kwargs)
        self._strangers: dict[str, Session] = {}
        self._patient = False

    async def generate(self, request_id: str, *, prompt_ids: Any, **kwargs: Any) -> TokenOutput:
        """One request to one server."""
        session, conversation = self._known(request_id, prompt_ids)
        said = len(prompt_ids) - conversation.began  # of the turn, before this request
        assignment = session.assignment
        before = said + sum(len(turn.tokens) for turn in session.turns[:-1])
        meta = RequestMeta(
            key=conversation.key,
            sample=session.sample,
            attempt=len(conversation.records),
            before=before,
            assignment=assignment,
            name=session.name,
            queued_at=time.time(),
            noise=session.noise,
            previous=conversation.previous[_TOKEN_BYTES * said :] if conversation.previous else b"",
            made=said,
        )
        session.moving = False
        told = {**kwargs, FIELD: meta.to_dict()}
        output = await self._somewhere(session, request_id, said, prompt_ids=prompt_ids, **told)
        for record in output.extra_fields.pop(FIELD, []):
            record["reason"] = assignment.reason if session.call.server == assignment.replica else ""
            conversation.records.append(record)
            session.records.append(record)
        if output.extra_fields.pop(DIED, False):
            session.moving = True
            await self._part_with(session, request_id, said + len(output.token_ids), 0.0, "its engine")
        return output

    async def _part_with(self, session: Session, request_id: str, kept: int, lost_s: float, why: str) -> None:
        """The replica of the session's request died: nobody is sent there any more."""
        logger.warning(
            "a replica died: %s goes on at another with %d tokens of its turn, without those of %.1f s (%s)",
            *(session.name or request_id, kept, lost_s, why),
        )
        await self._load_balancer.remove_servers.remote([session.call.server])

    async def _somewhere(self, session: Session, request_id: str, said: int, **kwargs: Any) -> TokenOutput:
        """On another replica, if one dies; what it had made is lost with it, but for what was ``said`` before."""
        while True:
            began = time.monotonic()
            call = session.call = _Call()
            _CALL.set(call)
            try:
                return await super().generate(request_id, **kwargs)
            except asyncio.CancelledError:
                call.end()  # or it keeps its slot, for nobody
                raise
            except ActorUnavailableError:  # of its node, or the network between: it may come back
                await asyncio.sleep(_SERVER_WAIT_S)
            except Exception as error:
                if call.server is None or not is_death(error):  # without one it is the router that died
                    raise
                await self._part_with(session, request_id, said, time.monotonic() - began, first_line(error))

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        extra[FIELD] = {"assignment": (extra.get(FIELD) or {}).get("assignment", ANYWHERE)}
        while True:
            acquiring = asyncio.ensure_future(super()._acquire_server(request_id, **extra))
            try:
                acquired = await asyncio.shield(acquiring)
            except asyncio.CancelledError:  # the router has counted it, or will
                acquiring.add_done_callback(partial(self._give_back, request_id))
                raise
            except RuntimeError as error:
                # All have died; the trainer starts others, or ends.
                if not self._patient or _NO_SERVERS not in str(error):
                    raise
                await asyncio.sleep(_SERVER_WAIT_S)
            else:
                call = _CALL.get()
                call.server, call.handle = acquired
                return acquired

    def _give_back(self, request_id: str, acquiring: asyncio.Future[tuple[str, Any]]) -> None:
        if not acquiring.cancelled() and acquiring.exception() is None:
            self._release_server(acquiring.result()[0], request_id=request_id)

    def _vllm_request_id(self, request_id: str) -> str:
        call = _CALL.get()
        call.request = uuid4().hex  # verl's is the same for all where it is fully deterministic
        return call.request

    def _known(self, request_id: str, prompt_ids: Any) -> tuple[Session, Conversation]:
        """What the task works on, and the one of its conversations that the request is of."""
        session = current()
        if session is None:
            session = self._strangers.pop(request_id, None) or Session()
            self._strangers[request_id] = session
            if len(self._strangers) > _MAX_STRANGERS:
                del self._strangers[next(iter(self._strangers))]
        return session, session.conversation(request_id, prompt_ids)


class RhymeLLMServerClient(FullyAsyncLLMServerClient, _Requests):
    """verl's client, of either class. A call passes, in this order:

    1. the prompt: its key is the session's; the records of all its requests go back with
       the output;
    2. the turn, where samples are interrupted: it may have begun before an interruption, and one ends the attempt;
    3. verl's resume loop, where the client resumes aborted requests itself;
    4. the request, to one server: what it is goes along, the server's record of it is kept.

    State is the task's (:mod:`verl_rhyme.agent_loop.session`) and ends with it.

    Args:
        config: verl's, whole.
        load_balancer_handle: verl's.
        resumes: As verl's ``FullyAsyncLLMServerClient``.
        interruptible: A coordinator starts the samples, and weight updates interrupt them.
        patient: For a trainer that, where no replica is left, starts others or ends: requests wait for it. Where a
            trainer interrupts, they do so anyway.
        kwargs: verl's.
    """

    def __init__(
        self,
        config: Any,
        load_balancer_handle: Any = None,
        *,
        resumes: bool = False,
        interruptible: bool = False,
        patient: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, load_balancer_handle, **kwargs)
        self._resumes, self._interruptible = resumes, interruptible
        self._patient = patient or interruptible

    async def generate(self, request_id: str, *, prompt_ids: Any, **kwargs: Any) -> TokenOutput:
        """As verl's.

        Raises:
            Interrupted: The sample's attempt ended here.
        """
        prompt_ids = normalize_token_ids(prompt_ids)
        session, conversation = self._known(request_id, prompt_ids)
        conversation.began, conversation.previous = len(prompt_ids), b""
        request = super().generate if self._resumes else partial(_Requests.generate, self)
        if self._resumes and starting_over(kwargs["sampling_params"]):
            request = self._from_its_start
        with session.generation():
            if self._interruptible and session.dispatched:
                output = await self._turn(session, conversation, partial(request, request_id), prompt_ids, **kwargs)
            else:
                output = await request(request_id, prompt_ids=prompt_ids, **kwargs)
        # Those of all turns: an agent loop keeps the extra fields of its last one.
        output.extra_fields[FIELD] = list(conversation.records)
        return output

    async def _turn(
        self,
        session: Session,
        conversation: Conversation,
        request: Any,
        prompt_ids: list[int],
        *,
        sampling_params: dict[str, Any],
        **kwargs: Any,
    ) -> TokenOutput:
        turn, conversation.previous = session.begin(prompt_key(prompt_ids).hex())
        budget, options = self._budget(prompt_ids, sampling_params), starting_over(sampling_params)
        if options and not turn.complete and 0 < len(turn.tokens) < budget:
            conversation.previous = _dropped(turn, options)
        left = budget - len(turn.tokens)
        if left <= 0:
            turn.complete, turn.stop_reason = True, "length"
        output = TokenOutput(token_ids=[], stop_reason=turn.stop_reason)
        params = {name: value for name, value in sampling_params.items() if name != "max_new_tokens"}
        while not turn.complete:
            output = await request(
                prompt_ids=[*prompt_ids, *turn.tokens],
                sampling_params={**params, "max_tokens": left},
                **{**kwargs, "priority": session.assignment.priority},
            )
            version = output.extra_fields.get("global_steps")
            first = output.extra_fields.get("min_global_steps", version)
            try:
                session.extend(turn, output.token_ids, output.log_probs, version, output.stop_reason, first)
            except Interrupted:
                if turn.complete or not session.moving or len(turn.tokens) >= budget:
                    raise  # else it was ended to go on elsewhere
                if options and turn.tokens:
                    conversation.previous = _dropped(turn, options, conversation.previous)
                left = budget - len(turn.tokens)
        if len(turn.tokens) > len(output.token_ids):  # some of them are from before
            output.token_ids = turn.tokens.tolist()
            output.log_probs = None if turn.log_probs is None else turn.log_probs.tolist()
        output.extra_fields |= {
            "global_steps": turn.version,
            "min_global_steps": turn.first_version,
            "max_global_steps": turn.version,
        }
        return output

    async def _from_its_start(self, request_id: str, *, prompt_ids: list[int], **kwargs: Any) -> TokenOutput:
        """In the place of verl's resume loop, for a response that cannot be continued: an aborted request is sent
        again as it was, with what it said as the draft."""
        _, conversation = self._known(request_id, prompt_ids)
        while True:
            output = await _Requests.generate(self, request_id, prompt_ids=prompt_ids, **kwargs)
            version = output.extra_fields.get("global_steps")
            output.extra_fields |= {"min_global_steps": version, "max_global_steps": version}
            if output.stop_reason not in ("aborted", "abort"):
                return output
            turn = Turn("", array("i", output.token_ids))
            conversation.previous = _dropped(turn, starting_over(kwargs["sampling_params"]), conversation.previous)
            await asyncio.sleep(_RESUME_S)

    def _budget(self, prompt_ids: list[int], sampling_params: dict[str, Any]) -> int:
        """Tokens of the whole turn, by the same rule as verl's server (``vLLMHttpServer.generate``)."""
        given = sampling_params.get("max_tokens", sampling_params.get("max_new_tokens"))
        if given is not None:
            return given
        rollout = self.config.actor_rollout_ref.rollout
        allowed = min(rollout.response_length, rollout.prompt_length + rollout.response_length - len(prompt_ids))
        return max(1, allowed)


def _dropped(turn: Turn, options: list[str], previous: bytes = b"") -> bytes:
    """What a turn has said is no part of it any more: with these sampling options it cannot go on.

    Args:
        turn: It begins again.
        options: Names, for the log.
        previous: int32 bytes, what it was drafted from.

    Returns:
        int32 bytes, what it is to be drafted from.
    """
    _tell_once(tuple(options))
    said = turn.drop()
    return said + previous[len(said) :]


@functools.cache
def _tell_once(options: tuple[str, ...]) -> None:
    logger.warning(
        "responses that are interrupted, or move to another replica, are generated anew, with their text as the draft: "
        "no later request can take up %s in the middle of a response",
        " and ".join(options),
    )


def move(session: Session, replica: str, reason: str = "") -> bool:
    """Let what a session generates go on at another replica, with the tokens that it has; its tokens keep their
    versions and log-probs. Does not wait.

    Args:
        session: Of an attempt that runs in this process.
        replica: Address.
        reason: Why it is to go on there, in a few words.

    Returns:
        Whether a request of it is under way; if not, its next one goes there.
    """
    session.assignment = replace(session.assignment, replica=replica, reason=reason)
    if session.call is None or session.call.server == replica or not session.call.end():
        return False
    session.moving = True
    return True


def where(session: Session) -> str:
    """Address of the replica where its latest request is, or its first one is wanted; empty where nobody knows."""
    return (session.call.server if session.call is not None else None) or session.assignment.replica


def rhymed(client: LLMServerClient, interruptible: bool = False, patient: bool = False) -> LLMServerClient:
    """The same client with prompt keys and records.

    Args:
        client: verl's; one of its ``FullyAsyncLLMServerClient`` resumes aborted requests as before, also within a turn
            of an interruptible one.
        interruptible: A coordinator starts the samples, and weight updates interrupt them.
        patient: For a trainer that, where no replica is left, starts others or ends: requests wait for it. Where a
            trainer interrupts, they do so anyway.

    Raises:
        TypeError: A client class of neither verl nor this package.
    """
    if isinstance(client, RhymeLLMServerClient):
        client._interruptible |= interruptible
        client._patient |= patient or interruptible
        return client
    if type(client) not in (LLMServerClient, FullyAsyncLLMServerClient):
        raise TypeError(
            f"no rhyme client for {type(client).__name__}; derive yours from "
            "verl_rhyme.agent_loop.client.RhymeLLMServerClient"
        )
    resumes = isinstance(client, FullyAsyncLLMServerClient)
    ours = RhymeLLMServerClient(client.config, resumes=resumes, interruptible=interruptible, patient=patient)
    ours.__dict__.update(vars(client))
    return ours
