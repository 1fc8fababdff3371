"""Drafts from an interrupted response: bounds, realignment after edits, learning, and isolation of requests."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.drafting import engine
from tests.unit.drafting.engine import KEY
from verl_rhyme.config import DraftingConfig
from verl_rhyme.drafting import regrowth
from verl_rhyme.drafting.adaptive import AdaptiveDrafter, slot_arrays
from verl_rhyme.drafting.arrays import Batch, Plans
from verl_rhyme.drafting.policy import RequestCounts
from verl_rhyme.drafting.regrowth import BEGAN

pytestmark = pytest.mark.xdist_group("kernels")  # one process compiles them in a fresh checkout

PROMPT = [7, 8, 9]


class Engine(engine.Engine):
    """Requests that each follow a fixed path; draft tokens on the path are accepted."""

    def __init__(self, slots=4, rows=16, vocabulary=1 << 20, **config):
        config = DraftingConfig(**{"weigh_cost": False, "live_tokens": 1 << 10, **config})
        super().__init__(AdaptiveDrafter(config, lambda key: None, slots, vocabulary), rows=rows, width=4096)
        self.live = {}

    def start(self, name, path, previous=None, key=KEY):
        path = [int(token) for token in path]
        self.live[name] = {"path": path, "new": path[:1], "done": 1, "draft": [], "accepted": 0}
        super().start(name, PROMPT, key, None if previous is None else np.asarray(previous, np.int32))

    def finish(self, name):
        del self.live[name]
        return super().finish(name)

    def step(self, limits=32, budget=1 << 20, seconds=None, planning=0.0, only=None):
        """Draft for all live requests and verify the drafts."""
        live = {name: r for name, r in self.live.items() if only is None or name in only}
        drafts = super().step(
            {name: r["new"] for name, r in live.items()},
            limits,
            budget,
            [len(r["draft"]) for r in live.values()],
            [r["accepted"] for r in live.values()],
            seconds,
            planning,
        )
        for name, r in live.items():
            future = r["path"][r["done"] :]
            r["draft"], r["new"] = drafts[name], future[: engine.agreement(drafts[name], future) + 1]
            r["done"], r["accepted"] = r["done"] + len(r["new"]), max(0, len(r["new"]) - 1)
        return drafts

    def run(self, name, **kwargs):
        """Run to the end of the path. Returns the number of steps and the drafted tokens of each."""
        drafted = []
        while self.live[name]["done"] < len(self.live[name]["path"]):
            drafted.append(len(self.step(only={name}, **kwargs)[name]))
        self.step(only={name}, limits=0)  # reports the verification of the last draft
        return len(drafted), drafted


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
    engine = Engine(max_tokens=longest)
    for i in range(3):  # warm-up, because the prior does not draft 128 tokens
        text = random_text(rng, 1500)
        engine.start(f"{i}", text, text)
        engine.run(f"{i}", limits=longest)
        engine.finish(f"{i}")
    text = random_text(rng, 2000)
    engine.start("a", text, text)
    steps, drafted = engine.run("a", limits=longest)
    counts = engine.finish("a")
    assert steps <= len(text) / (longest + 1) + 3
    assert counts.drafted_tokens == sum(drafted)
    assert counts.drafted_tokens - 1 <= counts.accepted_tokens == counts.reverified_tokens, (
        "all but the last draft, which no token follows"
    )


@given(seed=st.integers(0, 10**6), edits=st.integers(0, 15), kind=st.sampled_from(["substitute", "insert", "delete"]))
@settings(max_examples=40, deadline=None)
def test_realigns_after_edits(seed, edits, kind):
    rng = np.random.default_rng(seed)
    text = random_text(rng, 1200)
    previous = edited(rng, text, edits, (kind,))
    engine = Engine()
    engine.start("a", text, previous)
    steps, _ = engine.run("a")
    # A truncated window, and the tokens until the texts realign: the insertion into the response and four more.
    lost = {"substitute": 2, "insert": 8, "delete": 12 + 8}[kind]
    assert steps <= len(text) / 16 + 8 + lost * edits


def test_expected_acceptance_matches_the_observed_one():
    rng = np.random.default_rng(5)
    engine = Engine()
    expected = observed = 0.0
    for i in range(60):
        text = np.array(random_text(rng, 400))
        previous = np.where(rng.random(400) < 0.1, 100_000 + np.arange(400), text)
        engine.start("a", text, previous)
        live = engine.live["a"]
        while live["done"] < len(text):
            before = live["done"]
            draft = engine.step()["a"]
            if i >= 10 and before + len(draft) < len(text):
                expected += engine.drafter.reach[0, : engine.drafter.granted[0]].sum()
                observed += live["accepted"]
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
        slots, table = slot_arrays(1, 8), regrowth.prior()
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
    engine = Engine(slots=1)
    old, new = random_text(rng, 300), random_text(rng, 300)
    engine.start("old", old, old)
    engine.step()
    engine.finish("old")
    engine.start("new", old, key=b"n" * 16)  # the same path without a previous text
    engine.drafter._live.arrays.head_group[:], engine.drafter._live.arrays.counts[:] = -1, 0
    assert engine.step()["new"] == []
    counts = engine.finish("new")
    assert counts == RequestCounts()
    engine.start("third", new, new)
    engine.run("third")
    assert engine.finish("third").reverified_tokens > 280


def test_previous_text_is_drafted_while_other_requests_rest():
    """At a tenth of a step per draft token, guesses among six are unprofitable, but the previous text is profitable."""
    rng = np.random.default_rng(10)
    engine = Engine(slots=8, weigh_cost=True)
    for i in range(8):
        engine.start(f"{i}", rng.integers(0, 6, 1200))
    drafted = 0

    def step():
        nonlocal drafted
        seconds, planning = 1e-3 * (1 + 0.1 * rng.random()) + 1e-4 * drafted, 1e-4 * engine.drafter.planned
        drafts = engine.step(seconds=seconds, planning=planning)
        drafted = sum(map(len, drafts.values()))
        return drafts

    for _ in range(400):
        step()
    engine.finish("0")
    text = random_text(rng, 600)
    engine.start("again", text, text)
    drafts, planned = [], []
    for _ in range(20):
        drafts.append(len(step()["again"]))
        planned.append(engine.drafter.planned)
    assert np.mean(planned) < 0.2, "the other requests still rest"
    assert all(n > 0 for n in drafts[8:])
