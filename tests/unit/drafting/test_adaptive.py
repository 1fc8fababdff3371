"""The adaptive drafter: its sources, its expected acceptance, and its bounds."""

from itertools import pairwise

import numpy as np
import pytest

from tests.unit.drafting.engine import KEY, OTHER_KEY, Engine, history
from verl_rhyme.config import DraftingConfig
from verl_rhyme.drafting import kernels
from verl_rhyme.drafting.adaptive import AdaptiveDrafter
from verl_rhyme.drafting.kernels import BLOCK
from verl_rhyme.drafting.policy import SOURCES, RequestCounts

pytestmark = pytest.mark.xdist_group("kernels")  # one process compiles them in a fresh checkout


def make(histories=None, slots=8, **config):
    return AdaptiveDrafter(DraftingConfig(**config), (histories or {}).get, slots)


def test_continues_the_prompts_history():
    engine = Engine(make({KEY: history(range(200, 400))}))
    engine.start("a", [1, 2, 3])
    counts = engine.follow("a", list(range(200, 400)))
    assert len(counts) < 40, "200 tokens of the history took too many steps"
    drafted, accepted = map(sum, zip(*counts, strict=True))
    found = engine.finish("a")
    assert (found.drafted_tokens, found.accepted_tokens, found.verify_steps) == (
        drafted,
        accepted,
        sum(d > 0 for d, _ in counts),
    )
    assert found.history_hit
    assert found.by_source[SOURCES.index("history")] == [drafted, accepted]
    assert engine.drafter.finish("a") == RequestCounts()


@pytest.mark.parametrize(("key", "source"), [(KEY, "siblings"), (OTHER_KEY, "others")])
def test_drafts_from_other_live_requests(key, source):
    engine = Engine(make())
    text = np.random.default_rng(0).integers(0, 500, 300).tolist()
    engine.start("first", [1, 2])
    assert sum(d for d, _ in engine.follow("first", text)) < 100
    engine.start("second", [1, 2], key)
    counts = engine.follow("second", text)
    assert len(counts) < 60, f"no drafts from {source}"
    found = engine.finish("second")
    assert found.history_hit is False
    assert found.by_source[SOURCES.index(source)][1] > 0.5 * found.accepted_tokens > 0


def test_drafts_from_the_requests_text():
    engine = Engine(make())
    engine.start("a", [1, 2])
    period = np.random.default_rng(1).integers(0, 500, 40).tolist()
    assert len(engine.follow("a", period * 6)) < 90


def test_longest_matches_of_the_group_win_over_the_latest():
    engine = Engine(make())
    phrase, common = list(range(10, 20)), 7
    later = [token for i in range(20) for token in (200 + i, common, 300 + i)]
    engine.start("first", [1, 2])
    engine.step({"first": [*phrase, common, 100, *later]})
    engine.start("second", [1, 2])
    engine.step({"second": [*phrase, common]})
    drafter = engine.drafter
    slot, scratch = drafter._requests["second"].slot, drafter._scratch[0]
    scratch.context[: len(phrase) + 1] = [*phrase, common]
    n = kernels._occurrences(drafter._live.arrays, drafter._slots, scratch, slot, len(phrase) + 1, -1)
    assert n == kernels.MAX_GROUP
    followed = [int(drafter._live.arrays.text[position + 1]) for position in scratch.position[:n]]
    assert scratch.match[followed.index(100)] == len(phrase) + 1
    assert sorted(scratch.match[:n])[:-1] == [1] * (n - 1)


def test_stops_drafting_never_accepted_tokens():
    rng = np.random.default_rng(2)
    engine = Engine(make({KEY: history(*rng.integers(0, 4, (4, 200)))}))
    engine.start("a", [1, 2])
    counts = engine.follow("a", (rng.integers(0, 200, 600) * 4 % 797).tolist())
    assert sum(d for d, _ in counts[-100:]) <= 10


def test_predicted_acceptance_matches_the_observed_one():
    """The target leaves its text with probability 1/4 at every token, and later drafts expect this."""
    rng = np.random.default_rng(3)
    text = rng.integers(0, 1000, 400)
    engine = Engine(make({KEY: history(text)}, floor=0.05))
    expected = observed = 0.0
    for i in range(60):
        engine.start(f"{i}", [1, 2])
        noise = rng.random(len(text)) < 0.25
        path = np.where(noise, 1000 + rng.integers(0, 10**6, len(text)), text).tolist()
        for drafted, accepted, done in engine.verify(f"{i}", path):
            if i >= 20 and done + drafted < len(path):
                expected += engine.drafter.reach[0, : engine.drafter.granted[0]].sum()
                observed += accepted
        engine.finish(f"{i}")
    assert observed > 1000
    assert expected == pytest.approx(observed, rel=0.15)


def test_limits_budget_and_vocabulary():
    drafter = AdaptiveDrafter(DraftingConfig(max_tokens=8), {KEY: history(range(100))}.get, 8, vocabulary=50)
    engine = Engine(drafter)
    engine.start("a", [1, 2])
    engine.start("b", [1, 2])
    engine.follow("a", list(range(40)))
    assert engine.step({"a": [41], "b": [41]}, limit=0) == {"a": [], "b": []}
    assert engine.step({"a": [42], "b": [42]}, budget=0) == {"a": [], "b": []}
    drafts = engine.step({"a": [43], "b": [43]}, limit=3)
    assert all(len(draft) <= 3 for draft in drafts.values())
    drafts = engine.step({"a": [44], "b": [44]}, budget=4)
    assert sum(map(len, drafts.values())) <= 4
    assert engine.step({"a": [45]})["a"] in ([46, 47, 48, 49][:n] for n in range(1, 5)), "50 is outside the vocabulary"


def test_missed_step_and_restart_are_harmless():
    engine = Engine(make({KEY: history(range(100))}))
    engine.start("a", [1, 2])
    engine.follow("a", list(range(20)))
    engine.step({"a": [20, 21, 22, 23, 24]})
    assert engine.step({"a": [25]})["a"][:1] == [26]
    engine.drafter.start("a", KEY)
    assert engine.step({"a": [26]})["a"][:1] == [27]
    assert len(engine.drafter) == 1


def test_more_requests_than_slots():
    engine = Engine(make({KEY: history(range(100))}, slots=2), rows=16)
    for i in range(10):
        engine.start(f"{i}", [1, 2])
    for token in range(10):
        drafts = engine.step({f"{i}": [token] for i in range(10)})
    assert all(draft[:1] == [10] for draft in drafts.values())
    for i in range(10):
        engine.finish(f"{i}")
    assert len(engine.drafter) == 0


def test_memory_is_bounded_and_old_text_is_overwritten():
    drafter = make(live_tokens=16 * BLOCK, slots=2)
    live = drafter._live.arrays
    arrays = list(map(id, live))
    engine = Engine(drafter, rows=2)
    rng = np.random.default_rng(4)
    seen, drafted = set(), 0
    for i in range(40):
        key = int(i // 2).to_bytes(16, "big")
        engine.start(f"{i}", [1, 2], key)
        path = rng.integers(0, 300, 700).tolist()
        seen.update(zip([2, *path], path, strict=False))
        done, tokens = 0, path[:1]
        while tokens:
            draft = engine.step({f"{i}": tokens})[f"{i}"]
            done += len(tokens)
            text = [*path[done - 1 : done], *draft]
            for pair in pairwise(text):
                assert pair in seen, "drafted a pair that is in no text"
                drafted += 1
            tokens = path[done : done + 1]
        engine.finish(f"{i}")
    assert drafted
    assert live.fill.sum() <= 16 * BLOCK
    assert list(map(id, drafter._live.arrays)) == arrays, "no array has grown"
