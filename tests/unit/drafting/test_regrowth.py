"""Drafts from an interrupted response: bounds, realignment after edits, learning, and isolation of requests."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.drafting.engine import KEY, Engine, agreement
from verl_rhyme.config import DraftingConfig
from verl_rhyme.drafting import regrowth
from verl_rhyme.drafting.adaptive import AdaptiveDrafter, slot_arrays
from verl_rhyme.drafting.arrays import Batch, Plans
from verl_rhyme.drafting.policy import RequestCounts
from verl_rhyme.drafting.regrowth import BEGAN

pytestmark = pytest.mark.xdist_group("kernels")  # one process compiles them in a fresh checkout

PROMPT = [7, 8, 9]


def made(slots=4, rows=16, **config):
    config = DraftingConfig(**{"weigh_cost": False, "live_tokens": 1 << 10, **config})
    return Engine(AdaptiveDrafter(config, lambda key: None, slots, 1 << 20), rows=rows, width=4096)


def begin(engine, request, previous):
    engine.start(request, PROMPT, KEY, np.asarray(previous, np.int32))


def random_text(rng, n, vocabulary=1000):
    return rng.integers(0, vocabulary, n).tolist()


def edited(rng, text, edits, kinds=("substitute", "insert", "delete"), spacing=60):
    """Return a text with ``edits`` edits, far enough from each other to realign in between."""
    starts = 20 + spacing * rng.permutation((len(text) - 40) // spacing)[:edits]
    out = list(text)
    for at in sorted(starts.tolist(), reverse=True):
        kind, n = rng.choice(kinds), int(rng.integers(1, 12))
        if kind == "substitute":
            out[at] = 100_000 + at
        elif kind == "insert":
            out[at:at] = [100_000 + at + i for i in range(n)]
        else:
            del out[at : at + n]
    return out


@pytest.mark.parametrize("longest", [4, 32, 128])
def test_unchanged_text_is_drafted_in_full_windows(longest):
    rng = np.random.default_rng(0)
    engine = made(max_tokens=longest)
    for i in range(3):  # warm-up, because the prior does not draft 128 tokens
        text = random_text(rng, 1500)
        begin(engine, f"{i}", text)
        engine.follow(f"{i}", text, limit=longest)
        engine.finish(f"{i}")
    text = random_text(rng, 2000)
    begin(engine, "a", text)
    drafted = [drafted for drafted, _ in engine.follow("a", text, limit=longest)]
    counts = engine.finish("a")
    assert len(drafted) <= len(text) / (longest + 1) + 4
    assert counts.drafted_tokens == sum(drafted[:-1])
    assert counts.drafted_tokens - 1 <= counts.accepted_tokens == counts.reverified_tokens, (
        "all but the last draft, which no token follows"
    )


@given(seed=st.integers(0, 10**6), edits=st.integers(0, 15), kind=st.sampled_from(["substitute", "insert", "delete"]))
@settings(max_examples=40, deadline=None)
def test_realigns_after_edits(seed, edits, kind):
    rng = np.random.default_rng(seed)
    text = random_text(rng, 1200)
    previous = edited(rng, text, edits, (kind,))
    engine = made()
    begin(engine, "a", previous)
    steps = len(engine.follow("a", text)) - 1
    # A truncated window, and the tokens until the texts realign: the insertion into the response and four more.
    lost = {"substitute": 2, "insert": 8, "delete": 12 + 8}[kind]
    assert steps <= len(text) / 16 + 8 + lost * edits


def test_expected_acceptance_matches_the_observed_one():
    rng = np.random.default_rng(5)
    engine = made()
    expected = observed = 0.0
    for i in range(60):
        text = np.array(random_text(rng, 400))
        begin(engine, "a", np.where(rng.random(400) < 0.1, 100_000 + np.arange(400), text))
        for drafted, accepted, done in engine.verify("a", text):
            if i >= 10 and done + drafted < len(text):
                expected += engine.drafter.reach[0, : engine.drafter.granted[0]].sum()
                observed += accepted
        engine.finish("a")
    assert observed > 10_000
    assert expected == pytest.approx(observed, rel=0.1)


@given(seed=st.integers(0, 10**6), vocabulary=st.sampled_from([3, 20, 1000]))
@settings(max_examples=40, deadline=None)
def test_state_depends_on_the_texts_only(seed, vocabulary):
    """Texts taken in token by token or at once give the same pointer and table."""
    rng = np.random.default_rng(seed)
    text = random_text(rng, 300, vocabulary)
    previous = np.array(edited(rng, text, 4, spacing=50), np.int32)
    tokens = np.array([[*PROMPT, *text]], np.int32)
    states = []
    for chunk in (1, 7, 300):
        slots, table = slot_arrays(1, 8, 3), regrowth.prior()
        slots.previous[0], slots.previous_size[0] = previous.ctypes.data, len(previous)
        seen = len(PROMPT)
        while seen < tokens.shape[1]:
            now = min(chunk, tokens.shape[1] - seen)
            seen += now
            slot, one = np.zeros(1, np.int32), np.ones(1, np.int64)
            plans = Plans(np.empty((1, 8), np.int32), np.zeros((1, 8)), 0 * one)
            batch = Batch(slot, slot, tokens, seen * one, 8 * one)
            regrowth.plan(slots, table, batch, plans, now * one, 0.05, vocabulary)
        states.append((slots.regrowth[0], table))
        assert slots.regrowth[0, BEGAN] == len(PROMPT)
    for state, table in states[1:]:
        np.testing.assert_array_equal(state, states[0][0])
        np.testing.assert_array_equal(table, states[0][1])


def test_nothing_leaks_between_requests_of_a_slot():
    rng = np.random.default_rng(6)
    engine = made(slots=1)
    old, new = random_text(rng, 300), random_text(rng, 300)
    begin(engine, "old", old)
    engine.step({"old": old[:1]})
    engine.finish("old")
    engine.start("new", PROMPT, b"n" * 16)  # the same path without a previous text
    engine.drafter._live.arrays.head_group[:], engine.drafter._live.arrays.counts[:] = -1, 0
    assert engine.step({"new": old[:1]})["new"] == []
    assert engine.finish("new") == RequestCounts()
    begin(engine, "third", new)
    engine.follow("third", new)
    assert engine.finish("third").reverified_tokens > 280


def test_previous_text_is_drafted_while_other_requests_rest():
    """At a tenth of a step per draft token, guesses among six are unprofitable, but the previous text is profitable."""
    rng = np.random.default_rng(10)
    engine = made(slots=8, weigh_cost=True)
    paths = {f"{i}": rng.integers(0, 6, 1200).tolist() for i in range(8)}
    for name in paths:
        engine.start(name, PROMPT)
    done, drafts = dict.fromkeys(paths, 0), {name: [] for name in paths}

    def step():
        nonlocal drafts
        drafted = [len(drafts[name]) for name in paths]
        sampled = {n: path[done[n] :][: 1 + agreement(drafts[n], path[done[n] :])] for n, path in paths.items()}
        for name, tokens in sampled.items():
            done[name] += len(tokens)
        accepted = [max(0, len(tokens) - 1) for tokens in sampled.values()]
        seconds, planning = 1e-3 * (1 + 0.1 * rng.random()) + 1e-4 * sum(drafted), 1e-4 * engine.drafter.planned
        drafts = engine.step(sampled, drafted=drafted, accepted=accepted, seconds=seconds, planning=planning)

    for _ in range(400):
        step()
    engine.finish("0")
    del paths["0"]
    paths["again"], done["again"], drafts["again"] = random_text(rng, 600), 0, []
    begin(engine, "again", paths["again"])
    given, planned = [], []
    for _ in range(20):
        step()
        given.append(len(drafts["again"]))
        planned.append(engine.drafter.planned)
    assert np.mean(planned) < 0.2, "the other requests still rest"
    assert all(n > 0 for n in given[8:])
