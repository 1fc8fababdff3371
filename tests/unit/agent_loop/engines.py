"""verl's and our client around an engine that stops on command, and attempts at a sample."""

import asyncio
from types import SimpleNamespace

import numpy as np
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from verl_rhyme.agent_loop.client import RhymeLLMServerClient
from verl_rhyme.agent_loop.session import Session, Turn
from verl_rhyme.processes.request import DIED, FIELD, RequestMeta
from verl_rhyme.scheduling.attempts import Attempt

PROMPT, BUDGET = [1, 2, 3], 20


class Engine(LLMServerClient):
    """Generates one number per token after the prompt, and is stopped after each of ``stops`` tokens: by a new policy,
    if it ``publishes``. A stop of -1 is an error. The experts of a token are its place and the version."""

    stops, version, length, requests, answers_later, dies, publishes, routed = (
        (),
        0,
        None,
        (),
        False,
        False,
        False,
        True,
    )

    async def generate(self, request_id, *, prompt_ids, sampling_params, rhyme, **kwargs):
        meta = RequestMeta(**rhyme)
        assert "extra_args" not in sampling_params
        self.requests.append((list(prompt_ids), sampling_params["max_tokens"], meta, kwargs))
        if self.answers_later:
            await asyncio.sleep(0)
        said = len(prompt_ids) - len(PROMPT)
        left = min(sampling_params["max_tokens"], (self.length or 10**6) - said)
        made = min(self.stops.pop(0), left) if self.stops else left
        if made < 0:
            raise ValueError("no such option")
        tokens = [100 + said + i for i in range(made)]
        record = {
            "id": len(self.requests),
            "sample": meta.sample,
            "request": meta.request,
            "prompt_key": meta.key,
            "response_tokens": made,
        }
        died = {DIED: True} if self.dies and made < left else {}
        version, begin = self.version, sampling_params.get("routed_experts_prompt_start")
        places = np.arange(begin or 0, len(prompt_ids) + made - 1, dtype=np.uint8)
        experts = np.stack([places, np.full_like(places, version)], -1)[:, None]
        self.version += self.publishes and made < left
        return TokenOutput(
            token_ids=tokens,
            log_probs=[-0.01 * (version + 1)] * made,
            routed_experts=None if begin is None or not self.routed else experts,
            stop_reason="completed" if made == left else "aborted",
            extra_fields={"global_steps": version, FIELD: [record], **died},
        )


class Client(RhymeLLMServerClient, Engine):
    def __init__(self, stops=(), version=0, length=None, dies=False, replays=False, **kwargs):
        rollout = SimpleNamespace(response_length=BUDGET, prompt_length=8, enable_rollout_routing_replay=replays)
        config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
        super().__init__(config, **{"interruptible": True, **kwargs})
        self.stops, self.version, self.length, self.dies, self.requests = list(stops), version, length, dies, []


def sample(partial, **more):
    """Return an attempt that a coordinator started."""
    return Session(partial, attempt=Attempt("uid", 0), **more)


def again(session, partial):
    """Return the next attempt, from the stored turns of the last one."""
    after = sample(partial)
    after.inherit([Turn.from_dict(turn.to_dict()) for turn in session.carried_over], session.records, partial)
    return after
