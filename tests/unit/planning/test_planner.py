"""Splits of GPUs between rollout and training, over sites, kinds, prices, and bounds of staleness."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import cpu_seconds
from verl_rhyme.planning.cost import ReplicaCost, StepCost
from verl_rhyme.planning.planner import BOUNDS, NoSplit, Problem, colocated, plan, plan_bounds, profitable, split
from verl_rhyme.planning.sites import Model, Pool
from verl_rhyme.planning.times import Training, Work, rollout

LENGTHS = np.exp(np.random.default_rng(0).normal(7, 1, 2000)).clip(1, 8000)
WORK = Work(LENGTHS, samples=512, group=8, prompt_tokens=200)
FAST = ReplicaCost(StepCost(base=8e-3, row=3e-5, cached=2e-8), prefill=3e-5, slots=64, gpus=2)
SLOW = ReplicaCost(StepCost(base=8e-3, row=3e-4, cached=2e-8), prefill=3e-4, slots=64, gpus=2)
TRAINING = Training(token=1e-3, update=2.0, copy_gpus=2, reserve=10e9)
MODEL = Model(7e9)


def pool(site="here", kind="h800", gpus=32, price=2.85, cost=FAST, training=TRAINING, **other):
    replicas = {} if cost is None else {cost.gpus: cost}
    return Pool(
        site, kind, gpus, **{"node": 8, "memory": 80e9, "price": price, **other}, replicas=replicas, training=training
    )


def problem(*pools, bound=1, work=WORK, links=None, **other):
    return Problem(pools or (pool(),), MODEL, work, bound, 1.0, links=links or {}, **other)


# ---- times ----


@given(st.integers(1, 64), st.integers(0, 8), st.floats(0, 500))
def test_rollout_is_no_slower_with_a_replica_more_and_no_faster_with_longer_training(count, bound, after):
    seconds = rollout(FAST, np.array([count, count + 1.0]), WORK, bound, after)
    assert seconds[1] <= seconds[0] * (1 + 1e-9)
    assert (rollout(FAST, np.array([count, count + 1.0]), WORK, bound, after + 10) >= seconds - 1e-9).all()
    assert (rollout(FAST, np.array([count, count + 1.0]), WORK, bound + 1, after) <= seconds + 1e-9).all()
    assert np.isinf(rollout(FAST, 0, WORK, bound, after))
    full = ReplicaCost(FAST.step, FAST.prefill, FAST.slots, room=9000)
    assert rollout(full, 4, WORK, min(bound, 1)) > 1.2 * rollout(FAST, 4, WORK, min(bound, 1)), "a small cache"


@given(st.integers(0, 8), st.floats(0, 1e3))
def test_the_longest_response_has_the_time_until_it_is_due(bound, after):
    """Linear work once an update; its own steps and what comes after within k + 1 of them."""
    seconds = float(rollout(FAST, 1000, Work(np.full(10, 1000.0), 1000), bound, after))
    linear = FAST.step.row * 1000 + FAST.step.cached * 1000 * 500
    assert seconds == pytest.approx(linear + (FAST.step.base * 1000 + after) / (bound + 1), rel=1e-6)


@given(st.floats(1.1, 8), st.floats(0.1, 5))
def test_drafts_are_fewer_steps_with_more_work_in_each(pace, overhead):
    """A token's seconds beside 31 others: those of a step, over the tokens that it makes for a request."""
    plain = ReplicaCost(StepCost(8e-3, 3e-5, 2e-8, draft=1e-5, drafting=1e-3, waiting=2e-5))
    step = plain.step.seconds(32, 1e5, 32 * (pace - 1) * overhead)
    assert plain.drafted(pace, overhead).step.seconds(32, 1e5) == pytest.approx(step / pace)
    assert plain.drafted(1.0, overhead) == plain


def test_remaining_tokens_match_random_draws():
    """A response is met with a chance that goes with its length, at any of its tokens."""
    rng = np.random.default_rng(0)
    met = rng.choice(LENGTHS, p=LENGTHS / LENGTHS.sum(), size=(4000, 15)) * rng.random((4000, 15))
    told = float(Work(LENGTHS, 64).longest_left(15))
    assert told == pytest.approx(np.quantile(met, 15 / 16) - met.mean(), rel=0.05)


@pytest.mark.parametrize("samples", [1, 5, 40])
def test_a_replica_of_one_slot_takes_one_after_another(samples):
    """Equal lengths, one slot: the steps are those of all responses, and no more."""
    one = ReplicaCost(StepCost(base=1e-2), slots=1)
    seconds = rollout(one, 1, Work(np.full(3, 100.0), samples))
    assert float(seconds) == pytest.approx(samples * 100 * 1e-2)


def test_siblings_share_their_prompts_prefill():
    """Of 64 prompts of 8 samples, one replica prefills 64, and each of 512 one."""
    for replicas, prompts in ((1, 64), (512, 1)):
        took = [rollout(ReplicaCost(FAST.step, prefill, 1024), replicas, WORK) for prefill in (0.0, 1.0)]
        assert took[1] - took[0] == pytest.approx(200 * prompts)


# ---- plans ----


def exhaustive(given):
    """All splits over one pool to generate and one to train."""
    found = []
    for train, roll in itertools.product(given.pools, repeat=2):
        for tp in roll.replicas:
            for y, x in itertools.product(train.shares(train.training.copy_gpus), roll.shares(tp)):
                apart = train is not roll or train.fits(x, y)
                if apart and not (train.check_training(MODEL, y) or roll.check_replica(MODEL, given.work, tp)):
                    found.append(split(given, (train, y), (roll, x), tp))
    return min(each.value for each in found)


@settings(max_examples=30)
@given(
    st.integers(1, 5),
    st.integers(1, 5),
    st.floats(0.2, 5),
    st.sampled_from([0, 1, 4]),
    st.sampled_from(["time", "cost"]),
    st.floats(1e-4, 1e-2),
)
def test_no_split_is_better_by_more_than_it_is_worth(here, there, price, bound, objective, token):
    training = Training(token, 2.0, 2, 10e9)
    pools = [pool(gpus=8 * here, training=training), pool("there", "h20", 8 * there, price, SLOW, training)]
    links = {frozenset(("here", "there")): 1e9}
    given = problem(*pools, bound=bound, links=links, objective=objective)
    best = plan(given).best
    assert best.train_gpus + best.rollout_gpus == best.gpus
    assert best.train is not best.rollout or best.train.fits(best.train_gpus, best.rollout_gpus)
    assert best.value <= exhaustive(given) * (1.01 + 1e-9)
    again = split(given, (best.train, best.train_gpus), (best.rollout, best.rollout_gpus), best.tp)
    assert again.step == pytest.approx(best.step)


def test_it_is_no_further_from_the_best_than_a_split_is_worth():
    """Over all arrangements together: not that much within one, and as much again between two. Generation on g GPUs
    takes 8 + 2.8 / g seconds, or 0.7% more where g may also be 20."""
    work = Work(np.full(7, 1000.0), 512, 8)
    quick, slower = (ReplicaCost(StepCost(base, 2.72e-6), slots=1024, gpus=2) for base in (8e-3, 8.072e-3))
    train = pool("a", gpus=2, cost=None, training=Training(1e-6, 1.0, 2))
    coarse, fine = pool("b", gpus=64, cost=quick, training=None), pool("c", gpus=64, node=4, cost=slower, training=None)
    links = {frozenset(("a", site)): 1e15 for site in "bc"}
    given = problem(train, coarse, fine, bound=0, work=work, links=links)
    found = plan(given)
    shares = [(each.rollout.site, each.rollout_gpus) for each in (found.best, found.others[0])]
    assert shares == [("b", 24), ("c", 20)]
    assert found.best.step <= 1.01 * split(given, (train, 2), (coarse, 64), 2).step < found.others[0].step


def test_shares_are_replicas_in_a_node_or_whole_nodes():
    assert [pool(gpus=32).shares(unit) for unit in (4, 16)] == [[4, 8, 16, 24, 32], [16, 32]]
    assert pool(gpus=4).shares(1) == [1, 2, 3, 4]
    assert pool(gpus=16).fits(4, 4)
    assert pool(gpus=16).fits(12, 4) is False  # a node and a half, and a half: no two roles share one then
    assert not pool(gpus=8).fits(6, 4)


def test_prices_are_needed_for_costs_alone():
    assert plan(problem(pool(price=0.0), objective="cost")).best.cost == 0
    assert plan(problem(pool(price=None))).best.cost is None
    with pytest.raises(ValueError, match="set price for here/h800"):
        problem(pool(price=None), objective="cost")


@pytest.mark.parametrize(
    ("pools", "more", "reason"),
    [
        ([pool(memory=8e9)], {}, "14 GB of weights do not fit, 80% of 2 GPUs are 13 GB"),
        (
            [pool(gpus=8, memory=40e9, training=Training(1e-3, 2.0, 2, 30e9))],
            {},
            r"training on 8 GPUs of here/h800: each needs 62 GB .* has 40 GB",
        ),
        (  # also where the batch is so small that it hardly has the longest response
            [pool(cost=ReplicaCost(FAST.step, room=7000, gpus=2))],
            {"work": Work(LENGTHS, 2, 1, 200)},
            "may have 8200 tokens, and the KV cache holds 7000",
        ),
        ([pool(gpus=8, training=Training(1e-3, 0.0, 16))], {}, "have no share for model copies over 16"),
        ([pool(gpus=8, training=Training(1e-4, 2.0, 8, 30e9))], {}, "its 8 GPUs are too few for both"),
        ([pool(training=None)], {}, "no GPUs can train"),
        ([pool(cost=None)], {}, "no GPUs can generate"),
        (
            [pool(), pool("there", training=None)],
            {"slowest": 1},
            r"no step takes 1 s or less, the fastest takes \d+ s: .*\n.*no link",
        ),
    ],
)
def test_an_impossible_split_has_a_reason(pools, more, reason):
    with pytest.raises(NoSplit, match=reason):
        plan(problem(*pools, **more))


def test_memory_lets_only_larger_shares_train():
    tight = Training(1e-5, 2.0, 8, 50e9)  # 5.25 GB of weights and gradients, 84 GB over all
    little = pool(gpus=64, memory=60e9, training=tight)
    assert [gpus for gpus in little.shares(8) if little.check_training(MODEL, gpus)] == [8, 16]
    assert plan(problem(little, objective="cost")).best.train_gpus >= 24


def test_a_sample_costs_all_gpus_for_its_share_of_a_step():
    """16 GPUs at 3 and 8 at 1 an hour: 56 an hour, for 512 samples a step."""
    there = pool("there", price=1.0)
    given = problem(pool(price=3.0), there, links={frozenset(("here", "there")): 1e12})
    made = split(given, (given.pools[0], 16), (there, 8), 2)
    assert (made.hourly, made.gpus, made.rollout_gpus) == (56, 24, 8)
    assert made.cost == pytest.approx(56 / 3600 * made.step / 512)
    assert made.train_idle == pytest.approx(1 - made.trained / made.step)
    turns = colocated(given, given.pools[0], 32, 2)
    assert turns.cost == pytest.approx(96 / 3600 * turns.step / 512)


def test_the_plan_is_compared_with_turns():
    uneven = problem(pool(training=Training(token=3e-3, update=2.0, copy_gpus=2, reserve=10e9)))
    found = plan(uneven)
    steps = [other.step for other in found.others]
    assert steps == sorted(steps)
    assert found.turns == colocated(uneven, found.best.train, 32, 2)
    assert (found.turns.gpus, found.turns.arrangement) == (32, "in turns on here/h800")
    assert found.turns.step == pytest.approx(found.turns.rolled_out + found.turns.trained)


def test_4096_gpus_at_two_sites_are_planned_in_seconds():
    links = {frozenset(("here", "there")): 10e9}
    pools = [replace(pool(site, gpus=2048), replicas=dict.fromkeys((2, 4, 8), FAST)) for site in ("here", "there")]
    found = []
    work = Work(LENGTHS, 65536, 16, 300)
    assert cpu_seconds(lambda: found.append(plan(problem(*pools, work=work, links=links)))) < 20  # three, on one core
    [found] = found
    assert found.compared > 100_000
    assert found.best.gpus > 2048, "training at one site, rollout at the other"


def test_a_larger_bound_is_no_slower_and_the_least_that_is_nearly_the_best_is_profitable():
    plans = plan_bounds(problem(pool(gpus=64)))
    assert [found.max_staleness for found in plans] == list(BOUNDS)
    steps = [found.best.step for found in plans]
    assert all(after <= before * 1.01 for before, after in itertools.pairwise(steps))
    chosen = profitable(plans)
    assert chosen.best.step <= 1.1 * min(steps)
    assert all(found.best.step > 1.1 * min(steps) for found in plans if found.max_staleness < chosen.max_staleness)


def test_the_trainer_is_blocked_only_for_its_copy_of_the_weights():
    """But on-policy, where it waits for samples under them."""
    for bound, less in ((0, 0.0), (1, 0.75)):
        all_of_it, copied = problem(bound=bound), problem(bound=bound, copy=0.25)
        home = all_of_it.pools[0]
        steps = [split(each, (home, 8), (home, 24), 2) for each in (all_of_it, copied)]
        assert steps[0].step - steps[1].step == pytest.approx(less)
    assert steps[0].binds == "trainer"


def test_the_bound_that_determines_a_step():
    """The longest response at small bounds alone; the trainer, slots, or a link where these are slow."""
    given = problem(pool(gpus=64))
    binds = [found.best.binds for found in plan_bounds(given)]
    assert binds[0] == "longest response" != binds[-1]
    home = given.pools[0]
    assert split(given, (home, 8), (home, 48), 2).binds == "trainer"
    few = ReplicaCost(FAST.step, FAST.prefill, slots=2, gpus=2)
    assert split(problem(pool(cost=few)), (pool(), 16), (pool(cost=few), 8), 2).binds == "slots"
    links = {frozenset(("here", "there")): MODEL.bytes / 300}
    there = pool("there", training=None)
    best = plan(problem(pool(cost=None), there, links=links)).best
    assert (best.binds, best.step >= 300) == ("link", True)
    assert plan(problem(pool(), there, links=links)).best.rollout.site == "here"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Work(np.array([]), 1),
        lambda: Work(np.array([0.0]), 1),
        lambda: Work(np.array([1.0]), 1, prompt_tokens=-1),
        lambda: Model(0),
        lambda: Training(0),
        lambda: Training(1, copy_gpus=0),
        lambda: pool(gpus=0),
        lambda: pool(gpus=12),
        lambda: pool(memory=0.0),
        lambda: pool(utilization=1.5),
        lambda: pool(price=-1.0),
        lambda: problem(bound=-1),
        lambda: problem(copy=-1.0),
        lambda: FAST.drafted(0.5, 1.0),
        lambda: FAST.drafted(2.0, -1.0),
    ],
)
def test_impossible_sizes_are_rejected(wrong):
    with pytest.raises(ValueError):  # noqa: PT011
        wrong()
