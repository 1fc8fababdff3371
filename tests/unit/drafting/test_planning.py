"""Planning by several threads, within a narrow budget, and with histories that arrive while their requests run."""

import numpy as np
import pytest

from tests.unit.drafting.engine import KEY, Engine, history
from verl_rhyme.config import DraftingConfig
from verl_rhyme.drafting import adaptive
from verl_rhyme.drafting.adaptive import AdaptiveDrafter
from verl_rhyme.drafting.policies import build

pytestmark = pytest.mark.xdist_group("kernels")  # one process compiles them in a fresh checkout


@pytest.mark.parametrize("seed", range(4))
def test_drafts_do_not_depend_on_the_number_of_threads(seed, monkeypatch):
    """Requests come and go, the model learns, and parts are as small as a row."""
    monkeypatch.setattr(adaptive, "ROWS_A_THREAD", 1)
    rng = np.random.default_rng(seed)
    keys = [bytes([i]) * 16 for i in range(5)]
    texts = {key: rng.integers(0, 30, 400) for key in keys}
    histories = {key: history(*np.where(rng.random((3, 400)) < 0.1, 30, texts[key])) for key in keys[1:]}
    config = DraftingConfig(live_tokens=1 << 13, floor=0.02)
    engine = Engine(*(AdaptiveDrafter(config, histories.get, 8, threads=count) for count in (1, 2, 5)), rows=12)
    names = [""] * 12
    for number in range(150):
        for row, key in enumerate(keys * 2):
            if not names[row] or engine.lengths[names[row]] > 380 or rng.random() < 0.03:
                if names[row]:
                    engine.finish(names[row])
                names[row] = f"{number}-{row}"
                engine.start(names[row], [1, 2, 3], key)
        sampled = {}
        for row in rng.permutation(10)[: rng.integers(1, 11)].tolist():
            at = engine.lengths[names[row]] - 3
            new = texts[keys[row % 5]][at : at + rng.integers(1, 5)]
            sampled[names[row]] = np.where(rng.random(len(new)) < 0.1, 31, new)
        engine.step(sampled, rng.integers(0, 33), int(rng.integers(0, 60)), seconds=1e-2 + 1e-4 * rng.random())
    weights = [drafter._model.weights for drafter in engine.drafters]
    assert all((other == weights[0]).all() for other in weights[1:])
    assert (weights[0] != 0).any()


@pytest.mark.parametrize("policy", ["adaptive", "paper"])
def test_running_requests_draft_from_a_history_that_arrives(policy):
    released, text = [], np.random.default_rng(0).permutation(600)
    release = lambda key, history: released.append((key, history is not None))  # noqa: E731
    drafter = build(DraftingConfig(policy=policy), lambda key: None, 8, 1 << 30, release=release)
    engine = Engine(drafter)
    engine.start("a", [1, 2])
    engine.start("b", [1, 2])
    assert len(engine.follow("a", text[:100])) == 100
    assert drafter.add_history(KEY, history(text))
    assert len(engine.follow("a", text[100:300])) < 80
    assert len(engine.follow("b", text[:200])) < 80, "its sibling has the history as well"
    assert not drafter.add_history(KEY, history(text)), "the prompt already has a history"
    assert drafter.finish("a").history_hit
    assert released == []
    assert drafter.finish("b").history_hit
    assert released == [(KEY, True)]
    assert not drafter.add_history(KEY, history(text)), "no request waits"


@pytest.mark.parametrize("known", [False, True], ids=["a newer history", "an unchanged history"])
def test_siblings_stay_in_one_group_when_their_history_arrives(known):
    """The group's number changes with the history, and no text is indexed twice."""
    rng = np.random.default_rng(1)
    drafter = AdaptiveDrafter(DraftingConfig(live_tokens=1 << 14), lambda key: None, 8)
    engine = Engine(drafter)
    if known:
        engine.start("before", [1, 2])
        assert drafter.add_history(KEY, history([5, 6], step=7))
        engine.finish("before")
    text = rng.permutation(600)
    engine.start("a", [1, 2])
    engine.start("b", [1, 2])
    engine.follow("a", text[:300])
    assert drafter.add_history(KEY, history([5, 6], step=7))
    engine.step({"a": text[300:301], "b": text[:1]})
    assert drafter._live.arrays.fill.sum() == 303 + 3, "all text is indexed once"
    assert len(engine.follow("b", text[1:300])) < 60
    slots = drafter._slots
    groups = {int(slots.group[request.slot]) for request in drafter._requests.values()}
    assert groups == set(drafter._live.arrays.group[drafter._live.arrays.fill > 0].tolist())


def test_at_most_as_many_rows_are_planned_as_the_budget_has_tokens():
    """Rows with recent acceptance come first, and each other row gets a plan from time to time."""
    rows, budget = 32, 8
    text = np.random.default_rng(3).permutation(900)
    drafter = AdaptiveDrafter(DraftingConfig(live_tokens=1 << 12), {KEY: history(text)}.get, rows)
    engine = Engine(drafter, rows=rows)
    for row in range(rows):  # the first rows follow the history
        engine.start(f"{row}", [1, 2], KEY if row < 6 else bytes([row]) * 16)
    planned = np.zeros(rows)
    for i in range(600):
        drafts = engine.step(
            {f"{row}": text[i : i + 1] if row < 6 else [1000 + row] for row in range(rows)}, budget=budget
        ).values()
        slots = drafter._slots
        now = np.array([drafter._slots.visited[drafter._requests[f"{row}"].slot] == i + 1 for row in range(rows)])
        assert 0 < now.sum() <= budget
        assert all(slots.planned[drafter._requests[f"{row}"].slot] == 0 for row in np.flatnonzero(~now))
        assert sum(map(len, drafts)) <= budget
        planned += now
    assert planned.min() > 0
    assert planned[:6].mean() > 2 * planned[6:].mean()
