"""Tokens of the model's own drafter as a source of drafts."""

from itertools import repeat

import numpy as np
import pytest

from tests.unit.drafting.engine import KEY, Engine, history
from tests.unit.drafting.test_adaptive import make
from tests.unit.drafting.virtual_engine import Texts, VirtualEngine, linear
from verl_rhyme.drafting import kernels
from verl_rhyme.drafting.budget import Proposals
from verl_rhyme.drafting.policy import SOURCES

pytestmark = pytest.mark.xdist_group("kernels")

COMPUTE = {"base": 0.004, "row": 0.006, "token": 0.006}
MEMORY = {"base": 0.010, "row": 2e-5, "token": 2e-5}


def test_compiled_code_and_counts_name_the_same_sources():
    assert len(SOURCES) == kernels.N_SOURCES


def text(length, seed=0):
    return np.random.default_rng(seed).integers(0, 500, length).tolist()


def follow(engine, path, right, tokens=3):
    """Verify drafts against ``path``; the model's chain is right or not. Returns drafted and accepted tokens."""
    rng, steps, done, drafted, accepted = np.random.default_rng(1), [], 1, 0, 0
    new = path[:1]
    while done < len(path):
        chain = np.resize(path[done:], tokens) if right else rng.integers(500, 1000, tokens)
        draft = engine.step({"a": new}, drafted=[drafted], accepted=[accepted], chains=chain[None].astype(np.int32))[
            "a"
        ]
        agreed = int(np.cumprod(np.equal(draft[: len(path) - done], path[done : done + len(draft)])).sum())
        steps.append((len(draft), agreed))
        new = path[done : done + agreed + 1]
        done, drafted, accepted = done + len(new), len(draft), len(new) - 1
    return steps


def test_new_text_is_drafted_by_the_model():
    engine = Engine(make())
    engine.start("a", [1, 2])
    steps = follow(engine, text(300), right=True)
    assert sum(accepted for _, accepted in steps) > 2.5 * len(steps)
    counts = engine.finish("a")
    assert counts.by_source[SOURCES.index("model")][1] > 0.95 * counts.accepted_tokens


def test_a_model_that_is_wrong_is_not_drafted_for_long():
    engine = Engine(make())
    engine.start("a", [1, 2])
    steps = follow(engine, text(1500), right=False)
    assert sum(drafted for drafted, _ in steps[-200:]) < 250 < sum(drafted for drafted, _ in steps[:200])


def test_text_goes_on_where_the_chain_ends():
    """Its last tokens are in the history; those before the chain are not."""
    known = text(40)
    engine = Engine(make({KEY: history(known)}))
    engine.start("a", [1, 2, 3])
    chain = np.array([known[:3]], np.int32)
    draft = engine.step({"a": [600]}, chains=chain)["a"]
    assert draft[:3] == known[:3]
    assert len(draft) > 5
    assert draft == known[: len(draft)]


def test_the_chain_alone_is_drafted_while_searches_rest(monkeypatch):
    known = text(40)
    engine = Engine(make({KEY: history(known)}))
    engine.start("a", [1, 2, 3])
    monkeypatch.setattr(engine.drafter.weighing, "plans", lambda *_: False)
    chain = np.array([known[:3]], np.int32)
    assert engine.step({"a": [600]}, chains=chain)["a"] == known[:3]
    assert engine.step({"a": known[:3]})["a"] == []


def test_the_chain_ends_where_the_walk_leaves_it():
    """Ten responses of the history against the model, which agrees with them for a token."""
    known = text(60)
    engine = Engine(make({KEY: history(*[known] * 10)}))
    engine.start("a", known[:20])
    chain = np.array([[known[21], 700, 701]], np.int32)
    draft = engine.step({"a": [known[20]]}, chains=chain)["a"]
    assert len(draft) > 5
    assert draft == known[21 : 21 + len(draft)]


def test_no_chain_and_an_empty_chain_draft_the_same():
    drafts = []
    for chains in (None, np.zeros((1, 0), np.int32)):
        engine = Engine(make({KEY: history(text(60))}))
        engine.start("a", [1, 2])
        drafts.append([engine.step({"a": [token]}, chains=chains)["a"] for token in text(60)[:40]])
    assert drafts[0] == drafts[1]


@pytest.mark.parametrize("noise", [0.03, 0.3])
@pytest.mark.parametrize(
    ("machine", "model", "right", "early", "late"),
    [
        (COMPUTE, 0.65, 0.7, 0.98, 0.99),
        (COMPUTE, 0.65, 0.0, 0.95, 0.98),
        (COMPUTE, 0.02, 0.7, 0.98, 0.98),
        (MEMORY, 0.15, 0.7, 0.99, 1.75),
        (MEMORY, 0.15, 0.0, 0.98, 0.99),
        (MEMORY, 0.65, 0.3, 0.98, 0.98),
    ],
)
@pytest.mark.parametrize("slots", [1, 16])
def test_the_model_drafts_where_it_gains(machine, model, right, early, late, noise, slots):
    """On text that never repeats; ``model`` is the drafter's time in steps without drafts."""
    priced = linear(**machine, noise=noise, right=right)
    priced.model = model * priced.seconds(slots, 0, 0, 0)
    log = VirtualEngine(priced, Texts(0.0, 400), slots).run(repeat(400), 800)
    assert log.gain(0, 60) > early
    assert log.gain(0, 800) > late


def test_an_unlucky_trial_does_not_decide():
    """Of one row, a single step says little: half of the drafts' first tokens are wrong."""
    for seed in range(10):
        priced = linear(**MEMORY, noise=0.03, right=0.5)
        priced.model = 0.3 * priced.seconds(1, 0, 0, 0)
        log = VirtualEngine(priced, Texts(0.0, 400, seed), 1, seed).run(repeat(400), 800)
        assert log.gain(0, 800) > 1.2


@pytest.mark.parametrize("drafter", [0.05, 0.15])
def test_a_drafter_that_loses_at_all_times_is_not_taken_up_as_steps_change(drafter):
    """Rows become fewer, so that a step has fewer tokens than at the last trial; ``drafter``: its share of a step."""
    rng, proposals = np.random.default_rng(0), Proposals()
    lost, total, last = 0.0, 0.0, None
    for step in range(2000):
        rows = 255 - step // 16
        seconds = (1 + rows / 500) * np.exp(0.05 * rng.standard_normal())
        if last is not None:
            proposals.observe(*last)
        wanted = proposals.wanted(rows)
        assert not proposals.faster(rows)
        total, lost = total + seconds, lost + drafter * wanted * seconds
        last = rows, wanted, rows, seconds * (1 + drafter * wanted)
    assert 0 < lost < 0.006 * total
