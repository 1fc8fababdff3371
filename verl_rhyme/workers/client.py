"""LLM clients that name the prompt on each request and keep what the server reports about every attempt.

verl's own client gives each request a fresh id, each step a fresh uid and, when it resumes an aborted request, drops
what the server said of the earlier attempts.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from verl.utils import normalize_token_ids
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from verl_rhyme.history.keys import prompt_key
from verl_rhyme.workers import session as sessions
from verl_rhyme.workers.request import FIELD, RequestMeta

#: Conversations whose first-turn key is remembered for their later turns.
_MAX_CONVERSATIONS = 65536


@dataclass
class _Conversation:
    key: str
    records: list[dict[str, Any]] = field(default_factory=list)


class _Conversations(LLMServerClient):
    """What is remembered of each conversation; a client is pickled before it has any."""

    def _conversation(self, request_id: str, prompt_ids: Any) -> _Conversation:
        known: OrderedDict[str, _Conversation] = self.__dict__.setdefault("_rhyme_conversations", OrderedDict())
        if request_id not in known:
            known[request_id] = _Conversation(prompt_key(prompt_ids).hex())
            if len(known) > _MAX_CONVERSATIONS:
                known.popitem(last=False)
        known.move_to_end(request_id)
        return known[request_id]


class _Attempts(_Conversations):
    """Below verl's resume loop: one call is one attempt on one server."""

    async def generate(
        self, request_id: str, *, prompt_ids: Any, sampling_params: dict[str, Any], **kwargs: Any
    ) -> TokenOutput:
        conversation = self._conversation(request_id, prompt_ids)
        meta = RequestMeta.of(sampling_params)
        meta.key, meta.attempt, meta.queued_at = conversation.key, len(conversation.records), time.time()
        output = await super().generate(
            request_id, prompt_ids=prompt_ids, sampling_params=meta.put(sampling_params), **kwargs
        )
        conversation.records.extend(output.extra_fields.pop(FIELD, []))
        return output


class _PromptKeys(_Conversations):
    """Above verl's resume loop: one call is one turn of a conversation."""

    async def generate(self, request_id: str, *, prompt_ids: Any, **kwargs: Any) -> TokenOutput:
        conversation = self._conversation(request_id, prompt_ids)
        output = await super().generate(request_id, prompt_ids=prompt_ids, **kwargs)
        # Those of all turns: an agent loop keeps the extra fields of its last one.
        output.extra_fields[FIELD] = list(conversation.records)
        return output


class _Sessions(_Conversations):
    """Between the two: one call is a turn of a session, which may have begun before an interruption."""

    async def generate(
        self, request_id: str, *, prompt_ids: Any, sampling_params: dict[str, Any], **kwargs: Any
    ) -> TokenOutput:
        session = sessions.current()
        if session is None:
            return await super().generate(request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **kwargs)
        prompt_ids = normalize_token_ids(prompt_ids)
        conversation = self._conversation(request_id, prompt_ids)
        if not session.turns:
            conversation.records.extend(session.records)
        turn, previous = session.begin(prompt_ids)
        left = self._budget(prompt_ids, sampling_params) - len(turn.tokens)
        if left <= 0:
            turn.complete, turn.stop_reason = True, "length"
        output = TokenOutput(token_ids=[], stop_reason=turn.stop_reason)
        if not turn.complete:
            meta = RequestMeta.of(sampling_params)
            meta.previous = previous
            params = {name: value for name, value in sampling_params.items() if name != "max_new_tokens"}
            params["max_tokens"] = left
            output = await super().generate(
                request_id,
                prompt_ids=[*prompt_ids, *turn.tokens],
                sampling_params=meta.put(params),
                **{**kwargs, "priority": session.priority},
            )
            session.records = list(conversation.records)
            version = output.extra_fields.get("global_steps")
            session.extend(turn, output.token_ids, output.log_probs, version, output.stop_reason)
        output.token_ids, output.log_probs = list(turn.tokens), turn.log_probs
        output.extra_fields |= {
            "global_steps": turn.version,
            "min_global_steps": turn.first_version,
            "max_global_steps": turn.version,
        }
        return output

    def _budget(self, prompt_ids: list[int], sampling_params: dict[str, Any]) -> int:
        """Tokens of the whole turn, by the same rule as verl's server (``vLLMHttpServer.generate``)."""
        given = sampling_params.get("max_tokens", sampling_params.get("max_new_tokens"))
        if given is not None:
            return given
        rollout = self.config.actor_rollout_ref.rollout
        allowed = min(rollout.response_length, rollout.prompt_length + rollout.response_length - len(prompt_ids))
        return max(1, allowed)


class RhymeLLMServerClient(_PromptKeys, _Attempts):
    """For verl's ``sync`` mode."""


class RhymeFullyAsyncLLMServerClient(_PromptKeys, FullyAsyncLLMServerClient, _Attempts):
    """For ``colocate_async`` and ``separate_async``: verl's resume loop runs between the two halves."""


class SessionLLMServerClient(_PromptKeys, _Sessions, _Attempts):
    """For ``rhyme_sorted``: samples that an interruption ends and that start again where they are dispatched."""


_RHYMED: dict[type, type] = {
    LLMServerClient: RhymeLLMServerClient,
    FullyAsyncLLMServerClient: RhymeFullyAsyncLLMServerClient,
}


def rhymed(client: LLMServerClient, interruptible: bool = False) -> LLMServerClient:
    """The same client with prompt keys and records.

    Args:
        client: verl's.
        interruptible: For a trainer that interrupts and starts samples itself.

    Raises:
        TypeError: A client class this package has no subclass for.
    """
    if isinstance(client, _PromptKeys):
        return client
    try:
        client.__class__ = SessionLLMServerClient if interruptible else _RHYMED[type(client)]
    except KeyError:
        raise TypeError(
            f"no rhyme client for {type(client).__name__}; derive yours from "
            "verl_rhyme.workers.client.RhymeLLMServerClient or RhymeFullyAsyncLLMServerClient"
        ) from None
    return client
