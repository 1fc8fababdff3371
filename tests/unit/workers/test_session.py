"""A sample over interruptions, with the clients as they are and an engine that stops where it is told to."""

import asyncio
import random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from verl_rhyme.workers import session as sessions
from verl_rhyme.workers.client import _Attempts, _PromptKeys, _Sessions
from verl_rhyme.workers.request import FIELD, RequestMeta
from verl_rhyme.workers.session import Interrupted, Session, Turn

PROMPT, BUDGET = [1, 2, 3], 20


class Engine(LLMServerClient):
    """Says ``text`` after the prompt, a number a token, and is stopped after each of ``stops`` tokens."""

    def __init__(self, stops=(), version=0, length=None):
        rollout = SimpleNamespace(response_length=BUDGET, prompt_length=8)
        super().__init__(SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout)))
        self.stops, self.version, self.length, self.requests = list(stops), version, length, []

    async def generate(self, request_id, *, prompt_ids, sampling_params, **kwargs):
        meta = RequestMeta.of(sampling_params)
        self.requests.append((list(prompt_ids), sampling_params["max_tokens"], meta, kwargs))
        said = len(prompt_ids) - len(PROMPT)
        left = min(sampling_params["max_tokens"], (self.length or 10**6) - said)
        made = min(self.stops.pop(0), left) if self.stops else left
        tokens = [100 + said + i for i in range(made)]
        record = {"response_tokens": made, "policy_version_end": self.version, "attempt": meta.attempt,
                  "drafted_tokens": 0, "accepted_tokens": 0, "verify_steps": 0}  # fmt: skip
        return TokenOutput(
            token_ids=tokens,
            log_probs=[-0.01 * (self.version + 1)] * made,
            stop_reason="completed" if made == left else "aborted",
            extra_fields={"global_steps": self.version, FIELD: [record]},
        )


class Client(_PromptKeys, _Sessions, _Attempts, Engine):
    pass


def attempt(client, session, prompt=PROMPT, params=None):
    """One turn; ``None`` where it was interrupted."""

    async def run():
        sessions.enter(session)
        try:
            return await client.generate("r", prompt_ids=prompt, sampling_params=params or {})
        except Interrupted:
            return None

    client.__dict__.pop("_rhyme_conversations", None)  # an agent loop names its request anew each time
    return asyncio.run(run())


def again(session, partial):
    """The next attempt, from what the last one left; a round through what is stored."""
    kept = [Turn(**turn.to_dict()) for turn in session.left]
    return Session(partial, kept=kept, records=session.records if partial else [])


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(0, BUDGET), max_size=6), st.integers(1, 2 * BUDGET))
def test_a_resumed_response_keeps_its_budget_and_its_log_probs(stops, length):
    session, output, client = Session(partial=True), None, Client(stops, length=length)
    made = []  # (version, tokens) of each attempt
    for version in range(len(stops) + 1):
        client.version = version
        before = session.tokens + sum(len(turn.tokens) for turn in session.kept)
        output = attempt(client, session)
        made.append((version, session.tokens - before))
        if output is not None:
            break
        session = again(session, partial=True)
    assert output.token_ids == [100 + i for i in range(min(BUDGET, length))]
    expected = [-0.01 * (version + 1) for version, tokens in made for _ in range(tokens)]
    assert output.log_probs == pytest.approx(expected)
    assert output.extra_fields["min_global_steps"] == next(version for version, tokens in made if tokens)
    assert output.extra_fields["max_global_steps"] == next(v for v, tokens in reversed(made) if tokens)
    for prompt, budget, _, _ in client.requests:
        assert len(prompt) - len(PROMPT) + budget == BUDGET
    assert sum(record["response_tokens"] for record in output.extra_fields[FIELD]) == len(output.token_ids)


def test_on_policy_an_interrupted_response_begins_anew_and_drafts_from_what_was_said():
    client, session = Client([7]), Session(partial=False)
    assert attempt(client, session) is None
    client.version, client.stops = 1, [3]
    session = again(session, partial=False)
    assert attempt(client, session) is None
    # The second attempt said 3 tokens; from there on what the first said is the best guess there is.
    client.version = 2
    session = again(session, partial=False)
    output = attempt(client, session)
    assert [meta.previous for _, _, meta, _ in client.requests] == [[], [*range(100, 107)], [*range(100, 107)]]
    assert all(prompt == PROMPT and budget == BUDGET for prompt, budget, _, _ in client.requests)
    assert len(output.token_ids) == BUDGET
    assert output.extra_fields["min_global_steps"] == output.extra_fields["max_global_steps"] == 2
    assert len(output.extra_fields[FIELD]) == 1  # the discarded attempts are no part of it


def test_the_budget_is_the_servers_rule_or_the_callers():
    client = Client()
    attempt(client, Session(partial=True), prompt=list(range(15)))
    attempt(client, Session(partial=True), params={"max_tokens": 5})
    attempt(client, Session(partial=True), params={"max_new_tokens": 6})
    assert [budget for _, budget, _, _ in client.requests] == [8 + BUDGET - 15, 5, 6]


def test_priority_goes_with_each_request_and_validation_is_left_alone():
    client = Client()
    attempt(client, Session(partial=False, priority=7))
    attempt(client, None, params={"max_tokens": 4})
    assert [kwargs for *_, kwargs in client.requests] == [{"priority": 7}, {}]


def turns(client, session, answers):
    """A conversation of two turns; ``answers`` is the tool's word between them."""

    async def run():
        sessions.enter(session)
        try:
            first = await client.generate("r", prompt_ids=PROMPT, sampling_params={"max_tokens": 4})
            rest = [*PROMPT, *first.token_ids, answers]
            return first, await client.generate("r", prompt_ids=rest, sampling_params={"max_tokens": 4})
        except Interrupted:
            return None

    client.__dict__.pop("_rhyme_conversations", None)
    return asyncio.run(run())


def test_partial_mode_replays_the_turns_that_were_complete():
    client, session = Client([99, 2]), Session(partial=True)
    assert turns(client, session, 50) is None
    client.version = 1
    _, second = turns(client, again(session, partial=True), 50)
    assert len(client.requests) == 3, "the first turn was asked for once"
    assert client.requests[-1][0] == [*PROMPT, 100, 101, 102, 103, 50, 105, 106]
    assert second.token_ids == [105, 106, 107, 108]
    assert [round(-100 * p) for p in second.log_probs] == [1, 1, 2, 2]


def test_a_tool_that_answers_otherwise_makes_what_followed_void():
    client, session = Client([99, 2]), Session(partial=True)
    assert turns(client, session, 50) is None
    _, second = turns(client, again(session, partial=True), 51)
    assert client.requests[-1][0][-1] == 51
    assert len(second.token_ids) == 4


def test_on_policy_turns_of_two_policies_make_no_sample():
    client, session = Client(), Session(partial=False)

    class Moving(Client):
        async def generate(self, *args, **kwargs):
            output = await super().generate(*args, **kwargs)
            self.version += 1
            return output

    client = Moving()
    assert turns(client, session, 50) is None
    assert [len(turn.tokens) for turn in session.left] == [4, 4]


def test_an_agent_loop_that_catches_everything_does_not_catch_an_interruption():
    async def loop():
        sessions.enter(Session(partial=False))
        try:
            await Client([2]).generate("r", prompt_ids=PROMPT, sampling_params={})
        except Exception:
            return "swallowed"

    with pytest.raises(Interrupted):
        asyncio.run(loop())


def test_sessions_of_concurrent_tasks_are_their_own():
    async def one(number):
        sessions.enter(Session(partial=False, priority=number))
        await asyncio.sleep(random.random() / 100)
        return sessions.current().priority

    async def run():
        return await asyncio.gather(*(one(number) for number in range(20)))

    assert asyncio.run(run()) == list(range(20))
    assert sessions.current() is None


class Tokens(list):
    """A text that notices when it is looked through."""

    read = False

    def __iter__(self):
        self.read = True
        return super().__iter__()


def test_what_travels_is_not_copied_token_by_token():
    """A thousand attempts of a worker end together, 8000 tokens each: copies would hold its event loop for 10 s."""
    tokens, log_probs = Tokens([5, 6]), Tokens([-0.1, -0.2])
    turn = Turn("key", tokens, log_probs, 3, 3, False, "aborted")
    assert Turn(**turn.to_dict()) == turn
    meta = RequestMeta(key="key", sample=2, previous=tokens)
    for _ in range(3):  # agent loop, session, attempt
        meta = RequestMeta.of(meta.put({"temperature": 1.0}))
    assert meta == RequestMeta(key="key", sample=2, previous=tokens)
    assert not tokens.read
    assert not log_probs.read
