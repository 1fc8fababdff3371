"""Coupled sampling over the calls of a sample: calls draw independently, a regenerated call draws its noise again.

The client, the session and the draws are the real ones; the model is a table of logits.
"""

import asyncio
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from verl_rhyme.agent_loop import session as sessions
from verl_rhyme.agent_loop.client import RhymeLLMServerClient
from verl_rhyme.agent_loop.session import Interrupted, Session, Turn
from verl_rhyme.processes.request import FIELD, RequestMeta
from verl_rhyme.sampling.noise import draw, key_of
from verl_rhyme.scheduling.attempts import Attempt

PROMPT, VOCABULARY, LENGTH, SAMPLES = [2, 0, 1], 3, 2, 1500
LOGITS = np.log(np.array([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6], [0.35, 0.4, 0.25]], dtype=np.float32))


class Engine(LLMServerClient):
    """Draws each token by the request's noise and the token's position, as the sampler does."""

    requests = drawn = 0

    async def generate(self, request_id, *, prompt_ids, sampling_params, rhyme, **kwargs):
        meta, tokens = RequestMeta(**rhyme), list(prompt_ids)
        self.requests += 1
        key = int(meta.noise, 16) if meta.noise else key_of("request", self.requests)
        for _ in range(sampling_params["max_tokens"]):
            await asyncio.sleep(0)  # other calls run meanwhile
            if self.drawn == self.stops:
                break
            self.drawn += 1
            row = LOGITS[tokens[-1]][None]
            tokens.append(int(draw(row, np.array([key], np.uint64), np.array([len(tokens)]))[0]))
        made = tokens[len(prompt_ids) :]
        stopped = len(made) < sampling_params["max_tokens"]
        return TokenOutput(
            token_ids=made,
            log_probs=[-1.0] * len(made),
            stop_reason="aborted" if stopped else "completed",
            extra_fields={"global_steps": 0, FIELD: []},
        )


class Client(RhymeLLMServerClient, Engine):
    def __init__(self, stops=None):
        rollout = SimpleNamespace(response_length=8, prompt_length=8)
        super().__init__(SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout)), interruptible=True)
        self.stops, self.pauses = stops, itertools.count()

    async def ask(self, prompt, name="r", **params):
        output = await self.generate(name, prompt_ids=prompt, sampling_params={"max_tokens": LENGTH, **params})
        return output.token_ids


# ---- agent loops; each returns the texts of its calls ----


async def retry_until_parsed(client):
    texts = []
    while not texts or (texts[-1][-1] != 1 and len(texts) < 4):
        texts.append(await client.ask(PROMPT))
    return texts


async def parallel_in_one_conversation(client):
    return await asyncio.gather(*(client.ask(PROMPT[: 1 + i % 2]) for i in range(4)))


async def context_reset(client):
    first = await client.ask(PROMPT)
    second = await client.ask([*PROMPT, *first, 0])
    return [first, second, await client.ask(PROMPT, "reset"), await client.ask([*PROMPT, *second, 0], "reset")]


async def branches(client):
    """The second calls come in another order in each attempt."""

    async def branch(number):
        first = await client.ask([*PROMPT, number], f"r{number}")
        for _ in range(next(client.pauses) % 7):
            await asyncio.sleep(0)
        return [first, await client.ask([*PROMPT, number, *first, 0], f"r{number}")]

    return [text for texts in await asyncio.gather(*map(branch, range(3))) for text in texts]


LOOPS = [retry_until_parsed, parallel_in_one_conversation, context_reset, branches]


def run(loop, noises, client=None, left=()):
    """Return the texts of one attempt for each noise, and the sessions."""

    async def one(session):
        sessions.set_current(session)
        try:
            return await loop(client)
        except Interrupted:
            return None

    async def every():
        return await asyncio.gather(*(asyncio.create_task(one(session)) for session in all_of))

    client = client or Client()
    all_of = [Session(attempt=Attempt("uid", i), noise=noise) for i, noise in enumerate(noises)]
    for session in all_of:
        session.inherit(list(left), [], partial=False)
    return asyncio.run(every()), all_of


def noises(name):
    return [f"{key_of(name, i):016x}" for i in range(SAMPLES)]


def outcomes(texts):
    """Return a number for the first tokens of all calls, and one for the last tokens; int [2, samples]."""
    return np.array(
        [[sum((1 + text[at]) * 4**i for i, text in enumerate(of)) for of in texts] for at in (0, LENGTH - 1)]
    )


@pytest.mark.parametrize("loop", LOOPS)
def test_calls_of_a_sample_draw_as_without_coupling(loop):
    coupled, _ = run(loop, noises(loop.__name__))
    free, _ = run(loop, [""] * SAMPLES)
    for ours, expected in zip(outcomes(coupled), outcomes(free), strict=True):
        size = max(ours.max(), expected.max()) + 1
        table = np.array([np.bincount(ours, minlength=size), np.bincount(expected, minlength=size)])
        often = table.sum(0) >= 20
        table = np.column_stack([table[:, often], table[:, ~often].sum(1)])
        assert stats.chi2_contingency(table[:, table.sum(0) > 0]).pvalue > 1e-4


@pytest.mark.parametrize("loop", LOOPS)
def test_regenerated_calls_draw_the_same_tokens(loop):
    given = noises("again")[:50]
    texts, before = run(loop, given)
    assert run(loop, given)[0] == texts
    client = Client(stops=150)  # in the middle of some attempts
    _, stopped = run(loop, given, client)
    for left in (before, stopped):
        kept = [[Turn.from_dict(turn.to_dict()) for turn in session.carried_over] for session in left]
        client = Client()
        after = []
        for i, noise in enumerate(given):
            after += run(loop, [noise], client, kept[i])[0]
        assert after == texts
