"""Samples over policy versions, with the real clients and an engine that stops on command."""

import asyncio
import contextlib
import itertools
from array import array
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transfer_queue.utils import serial_utils

from tests.unit.agent_loop.engines import BUDGET, PROMPT, Client, Engine, again, sample
from verl_rhyme.agent_loop import client as clients
from verl_rhyme.agent_loop import session as sessions
from verl_rhyme.agent_loop.session import Interrupted, Session, Turn
from verl_rhyme.history.keys import prompt_key
from verl_rhyme.placement.assignment import Assignment
from verl_rhyme.processes.deadline import Deadline
from verl_rhyme.processes.request import DIED, FIELD


def drafts(client):
    """Return the text that each request drafts from."""
    return [np.frombuffer(meta.earlier_text, "<i4").tolist() for _, _, meta, _ in client.requests]


def versions_of_experts(output):
    """Return the versions that computed each token but the last."""
    places, versions = output.routed_experts[:, 0].T.tolist()
    assert places == [*range(len(places))]
    return versions


def turn(client, session, prompt=PROMPT, params=None, **media):
    """Return the output of one turn."""

    async def run():
        if session is not None:
            sessions.set_current(session)
        return await client.generate("r", prompt_ids=prompt, sampling_params=params or {}, **media)

    return asyncio.run(run())


def attempt(*args, **kwargs):
    """Return the output of one turn; ``None`` if it was interrupted or failed."""
    with contextlib.suppress(Interrupted, ValueError):
        return turn(*args, **kwargs)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(clients, "_REFUSED_S", 0.0)


@settings(max_examples=150)
@given(st.lists(st.integers(-1, BUDGET), max_size=8), st.integers(1, 2 * BUDGET))
def test_response_over_versions_keeps_its_budget_and_log_probs(stops, length):
    """It continues in place. Another attempt follows a failure, or a stop before the first token, from stored turns."""
    session, client = sample(partial=True), Client(stops, length=length, replays=True)
    client.publishes = True
    while (output := attempt(client, session)) is None:
        stop = stops[len(client.requests) - 1]
        assert stop == -1 or session.tokens == stop == 0
        session = again(session, partial=True)
    said, version, expected = 0, 0, []
    for (prompt, budget, meta, _), stop in itertools.zip_longest(client.requests, stops[: len(client.requests)]):
        assert meta.resumed_tokens == len(prompt) - len(PROMPT) == said == BUDGET - budget
        left = min(BUDGET, length) - said
        made = left if stop is None else max(0, min(stop, left))
        said, expected = said + made, expected + [version] * made
        version += stop != -1
    assert output.token_ids == [100 + i for i in range(min(BUDGET, length))]
    assert [round(-100 * p) - 1 for p in output.log_probs] == expected
    assert versions_of_experts(output) == [expected[0]] * (len(PROMPT) - 1) + expected
    assert output.extra_fields["min_global_steps"] == session.first_version == expected[0]
    assert output.extra_fields["max_global_steps"] == session.version == expected[-1]
    assert output.stop_reason in ("completed", "length")
    assert sum(record["response_tokens"] for record in output.extra_fields[FIELD]) == len(output.token_ids)


TOOL = [7, 7]
PENALTY = {"presence_penalty": 0.5}


@settings(max_examples=150)
@given(st.lists(st.integers(-1, 9), max_size=12))
def test_replayed_experts_are_those_of_the_weights_that_sampled_each_token(stops):
    """Over turns and attempts that begin with stored ones. Tools' answers are computed by the turn that follows."""

    async def loop():
        sessions.set_current(session)
        prompt = PROMPT
        for request_id in ("r", "r", "another"):
            output = await client.generate(request_id, prompt_ids=prompt, sampling_params={"max_tokens": 5})
            prompt = [*prompt, *output.token_ids, *TOOL]
        return output

    session, client = sample(partial=True), Client(stops, replays=True)
    client.publishes, output = True, None
    while output is None:
        try:
            output = asyncio.run(loop())
        except (Interrupted, ValueError):
            session = again(session, partial=True)
    expected = []
    for turn in session.turns:
        versions = [round(-100 * p) - 1 for p in turn.log_probs]
        expected += [versions[0]] * (len(TOOL) if expected else len(PROMPT) - 1) + versions
    assert versions_of_experts(output) == expected
    assert sum(len(turn.routes) for turn in session.turns) == len(expected), "no row is stored twice"
    assert len(session.routes) == 1, "one text, of the three turns"


def test_regenerated_turn_has_experts_of_its_own_weights():
    """Those of the turn before, which is no part of it, and not those of the tokens that are sampled again."""
    client, session = Client([3, 2, 2], replays=True), sample(partial=True)
    client.publishes = True
    first = attempt(client, session, params={"max_tokens": 3})
    text = [*PROMPT, *first.token_ids]
    output = attempt(client, session, prompt=[*text, *TOOL], params={**PENALTY, "max_tokens": 4})
    assert first.extra_fields["max_global_steps"] == 0
    assert versions_of_experts(output) == [0] * (len(text) - 1) + [2] * (len(TOOL) + 4)


def test_the_last_prompt_token_has_experts_of_its_answers_weights():
    client, session = Client(replays=True), sample(partial=True)
    for version in range(2):
        client.version = version
        output = attempt(client, session, params={"max_tokens": 3})
    assert versions_of_experts(output) == [0, 0, 1, 1, 1]


@pytest.mark.parametrize("missing", ["experts", "prompt"])
def test_stored_turn_whose_experts_are_unknown_is_regenerated(missing):
    client, session = Client(replays=missing == "prompt"), sample(partial=True)
    attempt(client, session, params={"max_tokens": 4})
    attempt(client, session, prompt=[*PROMPT, *range(100, 104)], params={"max_tokens": 4})
    after = again(session, partial=True)
    client = Client(version=1, replays=True)
    output = attempt(client, after, prompt=[*PROMPT, *range(100, 104)], params={"max_tokens": 4})
    assert drafts(client) == [[*range(104, 108)]]
    assert versions_of_experts(output) == [1] * 10


def test_experts_that_the_kernels_do_not_report_are_refused(monkeypatch):
    """vLLM's buffer then has zeros, and training would route all tokens to the first expert."""
    generate = Engine.generate

    async def unseen(*args, **kwargs):
        output = await generate(*args, **kwargs)
        output.routed_experts = np.zeros_like(output.routed_experts)
        return output

    monkeypatch.setattr(Engine, "generate", unseen)
    with pytest.raises(ValueError, match=r"reports no experts.*moe_backend=triton"):
        turn(Client(replays=True), sample(partial=True), params={"max_tokens": 4})


def test_stored_turn_keeps_the_experts_that_it_has():
    """Its prompt was none of an earlier turn's text then; now it is, of another policy's."""
    client, session = Client(replays=True), sample(partial=True)
    longer = [*PROMPT, *range(100, 104)]
    attempt(client, session, prompt=longer, params={"max_tokens": 4})
    after = again(session, partial=True)
    client.version = 1
    assert versions_of_experts(attempt(client, after, params={"max_tokens": 4})) == [1] * 6
    assert versions_of_experts(attempt(client, after, prompt=longer, params={"max_tokens": 4})) == [0] * 10
    assert len(client.requests) == 2


def test_tokens_without_experts_fail_the_attempt():
    client = Client(replays=True)
    client.routed = False
    with pytest.raises(ValueError, match=r"experts of 0 tokens instead of 22.*enable_rollout_routing_replay=false"):
        turn(client, sample(partial=True))


def test_interrupted_on_policy_response_starts_over_and_drafts_its_text():
    client, session = Client([7]), sample(partial=False)
    assert attempt(client, session) is None
    client.version, client.stops = 1, [3]
    session = again(session, partial=False)
    assert attempt(client, session) is None
    # The second attempt generated 3 tokens; after them the first attempt's text is the best draft.
    client.version = 2
    session = again(session, partial=False)
    output = attempt(client, session)
    assert drafts(client) == [[], [*range(100, 107)], [*range(100, 107)]]
    assert all(prompt == PROMPT and budget == BUDGET for prompt, budget, _, _ in client.requests)
    assert len(output.token_ids) == BUDGET
    assert output.extra_fields["min_global_steps"] == output.extra_fields["max_global_steps"] == 2
    assert len(output.extra_fields[FIELD]) == 1  # without the discarded attempts


def test_budget_follows_the_server_or_the_caller():
    client = Client()
    attempt(client, sample(partial=True), prompt=list(range(15)))
    attempt(client, sample(partial=True), params={"max_tokens": 5})
    attempt(client, sample(partial=True), params={"max_new_tokens": 6})
    assert [budget for _, budget, _, _ in client.requests] == [8 + BUDGET - 15, 5, 6]


def test_requests_have_a_priority_and_validation_is_not_interrupted():
    client = Client()
    attempt(client, sample(partial=False, assignment=Assignment(priority=7)))
    client.stops = [2]
    assert attempt(client, Session(sample=3), params={"max_tokens": 4}).stop_reason == "aborted"
    assert [kwargs for *_, kwargs in client.requests] == [{"priority": 7}, {}]
    assert [meta.sample for _, _, meta, _ in client.requests] == [-1, 3]


def test_conversations_of_a_sample_have_separate_keys_and_records():
    async def run(session, *conversations):
        sessions.set_current(session)
        for request_id, prompt in conversations:
            output = await client.generate(request_id, prompt_ids=prompt, sampling_params={"max_tokens": 2})
        return output

    client, other = Client(interruptible=False), [7, 8, 9]
    session = Session()
    said = asyncio.run(run(session, ("a", PROMPT), ("b", other), ("a", [*PROMPT, 5]), ("c", PROMPT)))
    keys = [prompt_key(prompt).hex() for prompt in (PROMPT, other, PROMPT, PROMPT)]
    assert [meta.key for _, _, meta, _ in client.requests] == keys
    assert [meta.request for _, _, meta, _ in client.requests] == [0, 0, 1, 0]
    assert len(said.extra_fields[FIELD]) == 1
    assert len(session.records) == 4

    key = "ab" * 16
    session = Session(records=[{**record, "prompt_key": key} for record in session.records[:2]], key=key)
    asyncio.run(run(session, ("a", PROMPT), ("b", other)))
    assert {meta.key for _, _, meta, _ in client.requests[4:]} == {key}, "of one row of the data"
    assert [meta.request for _, _, meta, _ in client.requests[4:]] == [2, 0], "earlier records stay with the first"


def turns(client, session, answers):
    """A conversation of two turns; ``answers`` are the tool's tokens between them."""

    async def run():
        sessions.set_current(session)
        try:
            first = await client.generate("r", prompt_ids=PROMPT, sampling_params={"max_tokens": 4})
            rest = [*PROMPT, *first.token_ids, answers]
            return first, await client.generate("r", prompt_ids=rest, sampling_params={"max_tokens": 4})
        except (Interrupted, ValueError):
            return None

    return asyncio.run(run())


def test_changed_tool_answer_discards_later_turns():
    client, session = Client([99, 2, -1]), sample(partial=True)
    assert turns(client, session, 50) is None
    session = again(session, partial=True)
    _, second = turns(client, session, 51)
    assert client.requests[-1][0][-1] == 51
    assert len(second.token_ids) == 4
    assert [turn.number for turn in session.turns] == [0, 0]
    assert session.tokens == 8, "an interruption would not leave the discarded turn to the next attempt"
    assert [turn.prompt for turn in session.carried_over] == [turn.prompt for turn in session.turns]


IMAGE = np.zeros((2, 2, 3), np.uint8)


@pytest.mark.parametrize(
    ("inputs", "same"),
    [
        ({"image_data": [IMAGE + 0], "priority": 3}, True),
        ({"image_data": [IMAGE + 1]}, False),
        ({"video_data": [IMAGE]}, False),
        ({"params": {"max_tokens": 12}}, False),
    ],
)
@pytest.mark.parametrize("complete", [True, False])
def test_turn_is_continued_for_equal_inputs_only(inputs, same, complete):
    """Two images have the same placeholder tokens; other options draw from another distribution."""

    async def loop(params=None, **more):
        sessions.set_current(session)
        more = {"image_data": [IMAGE], **more}
        try:
            output = await client.generate(
                "r", prompt_ids=PROMPT, sampling_params={"max_tokens": 9, **(params or {})}, **more
            )
            await client.generate("r", prompt_ids=[9], sampling_params={}, **more)
        except ValueError:
            return None
        return output

    client, session = Client([9, -1] if complete else [5, -1]), sample(partial=True)
    assert asyncio.run(loop()) is None
    requests, session = len(client.requests), again(session, partial=True)
    client.stops, client.version = [99, 99], 1
    output = asyncio.run(loop(**inputs))
    versions = [round(-100 * p) - 1 for p in output.log_probs]
    budget = (inputs.get("params") or {}).get("max_tokens", 9)
    continued = [0] * 9 if complete else [0] * 5 + [1] * 4
    assert versions == (continued if same else [1] * budget)
    assert len(client.requests) - requests == 1 + (not same or not complete)


def moving(session):
    """Take the aborts of the session's requests for moves to another replica."""
    extend = session.extend

    def moved(*args):
        for call in session.calls:
            call.moving = True
        extend(*args)

    session.extend = moved


def parallel(client, session, order, one_conversation=False):
    """Calls with prompts of different lengths, begun in this order; return their tokens by length."""

    async def run():
        sessions.set_current(session)
        client.answers_later = True
        name = "r" if one_conversation else "r{}"
        calls = [
            client.generate(name.format(n), prompt_ids=[*PROMPT, *range(n)], sampling_params={"max_tokens": 6})
            for n in order
        ]
        outputs = await asyncio.gather(*calls, return_exceptions=True)
        return {n: getattr(out, "token_ids", out) for n, out in zip(order, outputs, strict=True)}

    return asyncio.run(run())


def test_parallel_turns_continue_in_any_order():
    client, session = Client([2, 3, 4, -1, -1, -1]), sample(partial=True)
    assert set(map(type, parallel(client, session, [0, 1, 2]).values())) == {ValueError}
    session = again(session, partial=True)
    texts = parallel(client, session, [2, 0, 1])
    assert texts == {n: [*range(100 + n, 106 + n)] for n in range(3)}
    assert [len(prompt) for prompt, *_ in client.requests[6:]] == [5 + 4, 3 + 2, 4 + 3], "each its own tokens"


def many_calls(client, session, order):
    """Tries that answer the same, in parallel conversations of two turns, then again after a reset of the context.
    Return each request's prompt and noise."""

    async def ask(name, prompt):
        return await client.generate(name, prompt_ids=prompt, sampling_params={"max_tokens": 2})

    async def branch(number):
        await ask("r", PROMPT)
        said = await ask(f"r{number}", [*PROMPT, number])
        await ask(f"r{number}", [*PROMPT, number, *said.token_ids, 0])

    async def run():
        sessions.set_current(session)
        client.answers_later = True
        await asyncio.gather(*map(branch, order), return_exceptions=True)
        for name in ("r", "reset"):
            await ask(name, PROMPT)

    with contextlib.suppress(Interrupted):
        asyncio.run(run())
    return [(tuple(prompt), meta.noise) for prompt, _, meta, _ in client.requests]


@pytest.mark.parametrize("stopped", range(11))
def test_each_call_has_a_noise_of_its_own_that_its_regeneration_draws_again(stopped):
    """In any order of the calls, wherever the attempt was interrupted."""
    calls = many_calls(Client(), sample(partial=False, noise="1f"), [0, 1, 2])
    assert len({noise for _, noise in calls}) == len(calls) == 11
    session = sample(partial=False, noise="1f")
    before = many_calls(Client([99] * stopped + [1]), session, [0, 1, 2])
    session = again(session, partial=False)
    session.noise = "1f"
    assert set(many_calls(Client(), session, [2, 0, 1])) == set(calls) >= set(before)


@pytest.mark.parametrize("one_conversation", [True, False])
def test_parallel_calls_do_not_share_what_belongs_to_a_request(one_conversation):
    """The calls are moved, so that each sends a second request."""
    client, session = Client([2, 3]), sample(partial=True)
    moving(session)
    texts = parallel(client, session, [0, 4], one_conversation)
    assert texts == {0: [*range(100, 106)], 4: [*range(104, 110)]}
    metas = [meta for _, _, meta, _ in client.requests]
    lengths = [len(prompt) for prompt, *_ in client.requests]
    assert sorted(zip(lengths, (meta.resumed_tokens for meta in metas), strict=True)) == [
        (3, 0),
        (5, 2),
        (7, 0),
        (10, 3),
    ]
    assert sorted(meta.request for meta in metas) == ([0, 1, 2, 3] if one_conversation else [0, 0, 1, 1])
    earlier = {len(prompt): meta.earlier_tokens for prompt, _, meta, _ in client.requests}
    assert earlier == {3: 0, 7: 0, 5: 2, 10: 2 + 3}, "of all turns of the sample"


def test_on_policy_turns_of_two_versions_are_an_interruption():
    class Moving(Client):
        async def generate(self, *args, **kwargs):
            output = await super().generate(*args, **kwargs)
            self.version += 1
            return output

    session = sample(partial=False)
    assert turns(Moving(), session, 50) is None
    assert [len(turn.tokens) for turn in session.carried_over] == [4, 4]


def test_on_policy_attempt_continues_and_never_mixes_versions():
    """The draft of an earlier version stays, and the engines may get new weights before the next request."""
    for version in (1, 2):
        session = sample(partial=False)
        session.inherit([Turn("", array("i", range(100, 109)), first_version=0, version=0)], [], partial=False)
        client = Client([3, 20], version=1)
        assert attempt(client, session) is None
        client.version, after = version, sample(partial=False)
        after.inherit([turn.copy() for turn in session.carried_over], session.records, partial=True)
        output = attempt(client, after)
        assert [prompt for prompt, *_ in client.requests] == [PROMPT, [*PROMPT, 100, 101, 102]]
        assert drafts(client) == [[*range(100, 109)], [*range(103, 109)]]
        if version == 1:
            assert output.token_ids == [*range(100, 120)]
        else:
            assert (output, after.first_version) == (None, 1)


def test_media_are_hashed_once_for_all_turns_of_an_attempt():
    picture, session = IMAGE.copy(), sample(partial=True)
    for pixels in (0, 1):
        picture[:] = pixels  # a second hash would differ
        attempt(Client(), session, image_data=[picture])
    assert len({turn.prompt for turn in session.turns}) == 1


def test_agent_loops_do_not_handle_an_interruption_as_an_error():
    assert not issubclass(Interrupted, Exception)


@given(st.lists(st.integers(0, 2**31 - 1)), st.booleans())
def test_turn_is_stored_as_bytes(tokens, asked):
    log_probs = array("f", [-token / 7 for token in tokens]) if asked else None
    turn = Turn("key", array("i", tokens), log_probs, 3, 3, False, "aborted", 1, array("i", tokens[1:]))
    turn.answers = [["call", "answer"], ["another", ""]] if asked else []
    turn.routes = np.arange(len(tokens) * 6, dtype="u2").reshape(-1, 3, 2) if asked else None
    made, before = turn.to_dict(), turn.copy()
    for place in turn.answers:  # an answer that comes before the queue has the turn
        place[1] = "late"
    turn = before
    stored = serial_utils.decode(serial_utils.encode(made))  # TransferQueue's encoding
    assert stored["tokens"] == np.array(tokens, "<i4").tobytes()
    assert stored["log_probs"] == (np.array(log_probs, "<f4").tobytes() if asked else None)
    restored = Turn.from_dict(stored)
    assert restored == turn
    if asked:
        assert restored.routes.dtype == np.uint16
        np.testing.assert_array_equal(restored.routes, turn.routes)
    else:
        assert restored.routes is None


def test_response_with_unresumable_options_starts_over_and_drafts_its_text():
    """In place, and in the next attempt; no token of the first policy is in the response."""
    client, session = Client([7, -1]), sample(partial=True)
    assert attempt(client, session, params=PENALTY) is None
    client.version, client.stops, session = 1, [3], again(session, partial=True)
    output = attempt(client, session, params=PENALTY)
    assert [(prompt, budget) for prompt, budget, *_ in client.requests] == [(PROMPT, BUDGET)] * 4
    assert drafts(client) == [[], *[[*range(100, 107)]] * 3], "the longer text is the better draft"
    assert output.token_ids == [*range(100, 120)]
    assert output.extra_fields["min_global_steps"] == 1
    assert len(output.log_probs) == 20


def test_resuming_client_starts_over_with_unresumable_options(monkeypatch):
    async def no_wait(_):
        client.version += 1

    monkeypatch.setattr("verl_rhyme.agent_loop.client.asyncio.sleep", no_wait)
    client = Client([5, 3], resumes=True, interruptible=False)
    output = attempt(client, Session(), params={**PENALTY, "max_tokens": 10})
    assert [(prompt, budget) for prompt, budget, *_ in client.requests] == [(PROMPT, 10)] * 3
    assert drafts(client) == [[], [*range(100, 105)], [*range(100, 105)]]
    (noise,) = {meta.noise for _, _, meta, _ in client.requests}
    assert noise, "else each regeneration would favour a shorter text"
    assert output.token_ids == [*range(100, 110)]
    assert output.log_probs == pytest.approx([-0.03] * 10), "all by the policy that ended it"
    assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (2, 2)


def test_interruption_returned_as_a_value_ends_the_attempt():
    async def loop():
        sessions.set_current(session)
        calls = [client.generate(f"r{i}", prompt_ids=PROMPT, sampling_params={}) for i in range(2)]
        values = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(value) for value in values] == [Interrupted, Interrupted]
        await client.generate("r2", prompt_ids=PROMPT, sampling_params={})

    client, session = Client([2, 2]), sample(partial=False)
    with pytest.raises(Interrupted):
        asyncio.run(loop())
    assert len(client.requests) == 1, "none of an attempt that has ended"


@pytest.mark.parametrize("loop_of_its_own", [True, False])
@pytest.mark.parametrize("known", [True, False])
def test_call_from_a_thread_without_its_session_is_refused(known, loop_of_its_own):
    """A weight update's abort would be taken for the end of a response whose version nobody knows."""
    client, session = Client(), sample(partial=True)

    def call(loop):
        request = client.generate("r", prompt_ids=PROMPT, sampling_params={})
        return asyncio.run(request) if loop_of_its_own else asyncio.run_coroutine_threadsafe(request, loop).result()

    async def run():
        sessions.set_current(session)
        loop = asyncio.get_running_loop()
        with session.deadline:
            if known:
                output = await asyncio.to_thread(call, loop)
                assert session.turns[0].tokens.tolist() == output.token_ids == [*range(100, 120)]
            else:
                with pytest.raises(RuntimeError, match=r"asyncio\.to_thread.*copy_context\(\)\.run"):
                    await loop.run_in_executor(None, call, loop)
                assert client.requests == []
            assert session.deadline._pauses == 0
            assert session.deadline._timer._loop is loop

    session.deadline = Deadline(60.0)
    asyncio.run(run())


def test_response_continues_with_its_tokens_when_its_engine_dies():
    """The server still answers. The attempt stays the same, because the policy is the same."""
    client, removed = Client([5, 0, 3], dies=True), []

    async def remove(servers):
        removed.append(servers)

    client._load_balancer = SimpleNamespace(remove_servers=SimpleNamespace(remote=remove))
    output = attempt(client, sample(partial=False))
    assert (output.token_ids, len(output.log_probs), output.stop_reason) == ([*range(100, 120)], 20, "completed")
    assert DIED not in output.extra_fields
    assert [len(prompt) - len(PROMPT) for prompt, *_ in client.requests] == [0, 5, 5, 8]
    assert [record["response_tokens"] for record in output.extra_fields[FIELD]] == [5, 0, 3, 12]
    assert len(removed) == 3
