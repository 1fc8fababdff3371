"""The LLM client, which adds the prompt key to each request and keeps the server's record of it.

verl's client gives each request a fresh id and each step a fresh uid, and drops the record of an aborted part.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from contextvars import ContextVar
from functools import partial
from typing import Any
from uuid import uuid4

from ray.exceptions import ActorUnavailableError
from verl.utils import normalize_token_ids
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from verl_rhyme.agent_loop.routes import TurnRoutes
from verl_rhyme.agent_loop.session import Call, Interrupted, Session, Turn, current, set_current
from verl_rhyme.history.keys import turn_key
from verl_rhyme.observability.errors import first_line
from verl_rhyme.once import warn_once
from verl_rhyme.placement.assignment import ANYWHERE
from verl_rhyme.processes.deaths import is_death
from verl_rhyme.processes.request import DIED, FIELD, RequestMeta
from verl_rhyme.sampling.continuation import restart_options
from verl_rhyme.scheduling.attempts import ABORTED

logger = logging.getLogger(__name__)

_TOKEN_BYTES = 4
#: Error text of verl's router.
_NO_SERVERS = "No available servers in load balancer"
#: Seconds before a request is sent again that was aborted, as in verl's client, or that found no server.
_AGAIN_S = 1.0
#: Seconds before a request is sent again that a server refused, or aborted before it had a token.
_REFUSED_S = 0.1
MOVED = "a replica died: %s continues on another with %d tokens of its turn; the work of %.1f s is lost (%s)"
#: Error of a request that belongs to no sample.
_NO_SESSION = (
    "an agent loop called generate() where its sample's session is unknown: in a thread or task that does not inherit "
    "the context of AgentLoopBase.run(). Its tokens cannot be attributed to a sample or a policy version. Use "
    "asyncio.to_thread(f) in place of run_in_executor(None, f), pass contextvars.copy_context().run and f to an own "
    "executor or thread, and create tasks that serve one sample in its run()"
)

#: Current call of a task; a session may have several tasks.
_CALL: ContextVar[Call] = ContextVar("verl_rhyme_call")


def current_call() -> Call | None:
    """Return this task's latest call, which may have ended."""
    return _CALL.get(None)


class _Requests(LLMServerClient):
    """The layer below verl's resume loop; a separate class, because the loop calls ``super().generate``."""

    _patient = False

    async def generate(self, request_id: str, *, prompt_ids: Any, **kwargs: Any) -> TokenOutput:
        session, call = current(), _CALL.get()
        assert session is not None  # set by RhymeLLMServerClient.generate
        conversation = call.conversation
        generated = len(prompt_ids) - call.prompt_tokens  # tokens of the turn before this request
        assignment = session.assignment
        call.queued_at = call.queued_at or time.time()
        meta = RequestMeta(
            key=conversation.key,
            sample=session.sample,
            request=conversation.requests,
            earlier_tokens=generated + sum(len(turn.tokens) for turn in session.turns if turn is not call.turn),
            assignment=assignment,
            name=session.name,
            queued_at=call.queued_at,
            noise=call.noise,
            earlier_text=call.earlier_text[_TOKEN_BYTES * generated :],
            resumed_tokens=generated,
        )
        call.moving = False
        conversation.requests += 1
        extra = {**kwargs, FIELD: meta.to_dict()}
        output = await self._somewhere(session, request_id, generated, prompt_ids=prompt_ids, **extra)
        if output.token_ids:
            call.queued_at = 0.0
        for record in output.extra_fields.pop(FIELD, []):
            record["reason"] = assignment.reason if call.server == assignment.replica else ""
            conversation.records.append(record)
            session.records.append(record)
        if output.extra_fields.pop(DIED, False):
            call.moving = True
            await self._part_with(session, request_id, generated + len(output.token_ids), 0.0, "its engine")
        return output

    async def _part_with(self, session: Session, request_id: str, kept: int, lost_s: float, why: str) -> None:
        logger.warning(MOVED, session.name or request_id, kept, lost_s, why)
        await self._load_balancer.remove_servers.remote([_CALL.get().server])

    async def _somewhere(self, session: Session, request_id: str, generated: int, **kwargs: Any) -> TokenOutput:
        """Generate; if the replica dies, again on another. Only the ``generated`` tokens from before are kept then."""
        call = _CALL.get()
        while True:
            began = time.monotonic()
            call.server = call.handle = call.request = None
            try:
                return await super().generate(request_id, **kwargs)
            except asyncio.CancelledError:
                call.abort()  # else it keeps a slot of the engine
                raise
            except ActorUnavailableError:  # the node or network is unreachable, perhaps for a while
                call.abort()  # it may still run there
                await asyncio.sleep(_AGAIN_S)
            except Exception as error:
                if call.server is None or not is_death(error):  # without a server, the router died
                    raise
                await self._part_with(session, request_id, generated, time.monotonic() - began, first_line(error))

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        extra[FIELD] = {"assignment": (extra.get(FIELD) or {}).get("assignment", ANYWHERE)}
        while True:
            acquiring = asyncio.ensure_future(super()._acquire_server(request_id, **extra))
            try:
                acquired = await asyncio.shield(acquiring)
            except asyncio.CancelledError:  # the router counts the request, now or soon
                acquiring.add_done_callback(partial(self._give_back, request_id))
                raise
            except RuntimeError as error:
                # All replicas died; the trainer starts others or ends.
                if not self._patient or _NO_SERVERS not in str(error):
                    raise
                await asyncio.sleep(_AGAIN_S)
            else:
                session, call = current(), _CALL.get()
                assert session is not None
                session.server, call.handle = acquired
                call.server = session.server
                return acquired

    def _give_back(self, request_id: str, acquiring: asyncio.Future[tuple[str, Any]]) -> None:
        if not acquiring.cancelled() and acquiring.exception() is None:
            self._release_server(acquiring.result()[0], request_id=request_id)

    def _vllm_request_id(self, request_id: str) -> str:
        call = _CALL.get()
        call.request = uuid4().hex  # verl's id is the same for all requests in fully deterministic mode
        return call.request


class RhymeLLMServerClient(FullyAsyncLLMServerClient, _Requests):
    """A subclass of either of verl's clients. A call passes these layers:

    1. the prompt, whose key is the session's; the output gets the records of all its requests;
    2. the turn of a sample that a coordinator started: an aborted request continues in place, if its tokens may be of
       several policy versions, else the abort ends the attempt; or verl's resume loop, if the client resumes aborted
       requests;
    3. the request to one server, with its metadata; the server's record is kept.

    The state belongs to the task (:mod:`verl_rhyme.agent_loop.session`) and ends with it.
    """

    def __init__(
        self,
        config: Any,
        load_balancer_handle: Any = None,
        *,
        resumes: bool = False,  # resume aborted requests, as verl's FullyAsyncLLMServerClient does, of other samples
        interruptible: bool = False,  # a coordinator starts the samples, and weight updates interrupt them
        patient: bool = False,  # wait while no replica serves, for a trainer that starts others or ends
        **kwargs: Any,
    ) -> None:
        super().__init__(config, load_balancer_handle, **kwargs)
        self._resumes, self._interruptible = resumes, interruptible
        self._patient = patient or interruptible

    async def generate(self, request_id: str, *, prompt_ids: Any, **kwargs: Any) -> TokenOutput:
        session = current()
        if session is None:  # the task is none of this package's workers
            if self._interruptible:
                raise RuntimeError(_NO_SESSION)
            session = Session()
            set_current(session)
        prompt_ids = normalize_token_ids(prompt_ids)
        conversation = session.conversation(request_id, prompt_ids)
        call = Call(conversation, len(prompt_ids))
        _CALL.set(call)
        generate: Any = partial(_Requests.generate, self)
        if self._interruptible and session.dispatched:
            generate = partial(self._turn, session, call)
        elif self._resumes:
            generate = self._from_its_start if restart_options(kwargs["sampling_params"]) else super().generate
        with session.generation(call):
            output = await generate(request_id, prompt_ids=prompt_ids, **kwargs)
        output.extra_fields[FIELD] = list(conversation.records)
        return output

    async def _turn(
        self,
        session: Session,
        call: Call,
        request_id: str,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        priority: int = 0,
        **media: Any,
    ) -> TokenOutput:
        key = turn_key(prompt_ids, {"options": sampling_params, **media}, session.media)
        call.turn = turn = session.begin_turn(key)
        call.noise = session.noise_of(turn)
        budget, options = self._budget(prompt_ids, sampling_params), restart_options(sampling_params)
        output = TokenOutput(token_ids=[])
        params = {name: value for name, value in sampling_params.items() if name != "max_new_tokens"}
        replays = self.config.actor_rollout_ref.rollout.enable_rollout_routing_replay
        routes = TurnRoutes(session, turn, prompt_ids) if replays else None
        while not turn.complete:
            if session.interrupted:  # in a parallel call
                raise Interrupted
            if len(turn.tokens) >= budget:
                turn.complete, turn.stop_reason = True, "length"
                break
            if options and turn.tokens:
                _drop(turn, options)
            call.earlier_text = turn.draft.tobytes()
            if routes is not None:
                params["routed_experts_prompt_start"] = routes.begin
            output = await _Requests.generate(
                self,
                request_id,
                prompt_ids=[*prompt_ids, *turn.tokens],
                sampling_params={**params, "max_tokens": budget - len(turn.tokens)},
                priority=session.assignment.priority if len(session.turns) == 1 else 0,  # its KV is in the cache
                **media,
            )
            version = output.extra_fields.get("global_steps")
            experts = routes.of(output) if routes is not None else None
            try:
                session.extend(turn, output.token_ids, output.log_probs, version, output.stop_reason, experts)
            except Interrupted:
                # An attempt without a token returns to the coordinator, and is none of the old policy.
                if turn.complete or not (call.moving or (session.spans and session.tokens)):
                    raise
                if not output.token_ids:
                    await asyncio.sleep(_REFUSED_S)
        output.stop_reason = turn.stop_reason
        if len(turn.tokens) > len(output.token_ids):  # earlier requests generated some of them
            output.token_ids = turn.tokens.tolist()
            output.log_probs = None if turn.log_probs is None else turn.log_probs.tolist()
        if routes is not None:
            output.routed_experts = routes.whole()
        output.extra_fields |= {
            "global_steps": turn.version,
            "min_global_steps": turn.first_version,
            "max_global_steps": turn.version,
        }
        return output

    async def _from_its_start(self, request_id: str, *, prompt_ids: list[int], **kwargs: Any) -> TokenOutput:
        """Resume a response that cannot be continued: an aborted request is sent again, its text as the draft."""
        call = _CALL.get()
        call.noise = uuid4().hex[:16]  # else each regeneration would favour a shorter text
        while True:
            output = await _Requests.generate(self, request_id, prompt_ids=prompt_ids, **kwargs)
            version = output.extra_fields.get("global_steps")
            output.extra_fields |= {"min_global_steps": version, "max_global_steps": version}
            if output.stop_reason not in ABORTED:
                return output
            turn = Turn("", array("i", output.token_ids), draft=array("i", call.earlier_text))
            _drop(turn, restart_options(kwargs["sampling_params"]))
            call.earlier_text = turn.draft.tobytes()
            await asyncio.sleep(_AGAIN_S)

    def _budget(self, prompt_ids: list[int], sampling_params: dict[str, Any]) -> int:
        """Return the token limit of the turn, by the rule of ``vLLMHttpServer.generate``."""
        given = sampling_params.get("max_tokens", sampling_params.get("max_new_tokens"))
        if given is not None:
            return given
        rollout = self.config.actor_rollout_ref.rollout
        allowed = min(rollout.response_length, rollout.prompt_length + rollout.response_length - len(prompt_ids))
        return max(1, allowed)


def _drop(turn: Turn, options: list[str]) -> None:
    warn_once(
        logger,
        "interrupted or moved responses are regenerated from the first token, with their text as the draft: no request "
        "can resume %s in the middle of a response",
        " and ".join(options),
    )
    turn.drop()


def rhymed(client: LLMServerClient, interruptible: bool = False, patient: bool = False) -> LLMServerClient:
    """Return verl's client as a :class:`RhymeLLMServerClient`. A ``FullyAsyncLLMServerClient`` still resumes aborted
    requests, except those of interruptible samples."""
    if isinstance(client, RhymeLLMServerClient):
        client._interruptible |= interruptible
        client._patient |= patient or interruptible
        return client
    if type(client) not in (LLMServerClient, FullyAsyncLLMServerClient):
        raise TypeError(
            f"client class {type(client).__name__} is not supported; derive it from "
            "verl_rhyme.agent_loop.client.RhymeLLMServerClient"
        )
    resumes = isinstance(client, FullyAsyncLLMServerClient)
    ours = RhymeLLMServerClient(client.config, resumes=resumes, interruptible=interruptible, patient=patient)
    ours.__dict__.update(vars(client))
    return ours
