"""Drafts on machines whose steps have a shape: tokens per second over no drafts, from the first step of a new engine.

Each case was once below stock, or gained less than it could.
"""

from dataclasses import replace
from itertools import repeat

import numpy as np
import pytest

from tests.unit.drafting.virtual_engine import Machine, ModelAlone, Texts, VirtualEngine, knee, linear
from verl_rhyme.drafting.cost import StepCost
from verl_rhyme.drafting.weighing import Weighing
from verl_rhyme.planning import roofline
from verl_rhyme.planning.architecture import PUBLISHED, Architecture

pytestmark = pytest.mark.xdist_group("kernels")

COMPUTE = {"base": 0.004, "row": 0.006, "token": 0.006}
HALF = {"base": 0.050, "row": 0.003, "token": 0.003}
MEMORY = {"base": 0.010, "row": 2e-5, "token": 2e-5}


def gpu(rows):
    """A GPU replays its graph of a whole step only without drafts; here that is worth 2 of 5 ms."""
    return Machine(lambda r, d, p, _: 0.005 + 0.002 * (d > 0) + 2.7e-5 * max(0, r + d + p - 185), plan=6e-6 * rows)


def wide(token):
    """A plan of 128 rows takes an eighth of a step: rest where drafts gain less, or nothing at all."""
    return linear(0.012, 0.0, token, plan=0.0015)


def asynchronous(base, wait):
    """Stock's host works during the device's steps; where tokens must be known first, the device waits for it."""
    return linear(base, 2e-5, 2e-5, plan=0.0015, wait=wait)


#: Machine, probability to follow, length, rows, steps, gain of the first 60 steps, and of all.
CASES = [
    # Until 32 steps were seen, every draft token was verified at no price.
    *(
        (linear(**machine, noise=noise), follow, 400, 16, 400, early, late)
        for noise in (0.03, 0.3)
        for machine, follow, early, late in [
            (COMPUTE, 0.6, 0.97, 0.985),
            (COMPUTE, 0.8, 0.97, 0.985),
            (COMPUTE, 0.9, 0.97, 0.965),
            (HALF, 0.6, 0.97, 0.98),
            (HALF, 0.9, 1.2, 1.27),
            (MEMORY, 0.6, 1.1, 1.17),
            (MEMORY, 0.9, 2.5, 3.0),
        ]
    ),
    # Slots are refilled at once, and hardly any step admits no request.
    *((linear(**COMPUTE), 0.8, length, 64, 200, 0.97, 0.985) for length in (50, 100)),
    (wide(2e-5), 0.15, 400, 128, 200, 0.96, 0.98),
    (wide(8e-6), 0.3, 400, 128, 200, 0.96, 0.98),
    (wide(8e-6), 0.5, 400, 128, 200, 0.96, 0.98),
    (wide(8e-6), 0.8, 400, 128, 200, 1.45, 1.55),
    # Drafts fill a step up to its knee.
    (knee(0.010, 128), 0.6, 300, 64, 200, 1.15, 1.2),
    (knee(0.010, 128), 0.85, 300, 64, 200, 1.6, 1.68),
    (gpu(8), 0.6, 400, 8, 200, 0.97, 0.98),
    (gpu(8), 0.85, 400, 8, 200, 1.5, 1.8),
    (gpu(64), 0.6, 400, 64, 200, 0.97, 0.98),
    (gpu(64), 0.85, 400, 64, 200, 1.3, 1.45),
    (gpu(256), 0.85, 400, 256, 200, 0.93, 0.965),
    *(
        (asynchronous(base, wait), follow, 400, 64, 400, early, late)
        for base, wait, gain in ((0.009, 0.004, 1.3), (0.030, 0.010, 1.7))
        for follow, early, late in ((0.0, 0.985, 0.99), (0.3, 0.985, 0.975), (0.6, 0.985, 0.975), (0.85, 1.2, gain))
    ),
]


@pytest.mark.parametrize(("machine", "follow", "length", "rows", "steps", "early", "late"), CASES)
def test_first_steps_cost_nothing_and_later_ones_gain(machine, follow, length, rows, steps, early, late):
    log = VirtualEngine(machine, Texts(follow, length), rows).run(repeat(length), steps)
    assert log.gain(0, 60) > early
    assert log.gain(0, steps) > late


def with_a_tail(rollouts):
    """Yield the lengths of each rollout's 64 responses, of which few are long."""
    rng = np.random.default_rng(0)
    for _ in range(rollouts):
        lengths = np.clip(np.exp(rng.normal(4.6, 0.7, 64)), 20, 1200).astype(int)
        lengths[:4] = 700, 900, 1000, 1200
        yield lengths


@pytest.mark.parametrize(("follow", "whole"), [(0.5, 1.08), (0.75, 1.55)])
def test_wide_batch_after_a_narrow_tail(follow, whole):
    """Rollouts whose rows start together, and end in a long tail of few rows where drafts cost nothing."""
    engine, begin = VirtualEngine(knee(0.012, 48), Texts(follow, 1200), 64), 0
    for lengths in with_a_tail(3):
        log = engine.run(lengths)
        stock = sum(engine.machine.seconds((lengths >= step).sum(), 0, 0, 0) for step in range(1, 1201))
        assert log.gain(begin, wider=32) > 0.97
        assert stock / sum(log.seconds[begin:]) > whole
        begin = len(log.rows)


class Informed(Weighing):
    """Knows a machine's price, and makes no experiments."""

    def __init__(self, machine):
        super().__init__(32, True)
        self.cost = KnownCost(machine)

    def _experiment(self, rows):
        return 0

    def _omits(self, rows, gain):
        return False


class KnownCost(StepCost):
    """The true price, from the first step on."""

    ready = True

    def __init__(self, machine):
        super().__init__()
        self._machine = machine

    def room(self, rows):
        return 1 << 12

    def prices(self, rows, most):
        return np.array([self._machine.seconds(rows, drafted, 0, 0) for drafted in range(most + 1)])


@pytest.mark.parametrize(
    ("name", "tp", "rows", "follow"),
    [
        # A convex price was three times the true one, or taught to draft nothing.
        ("Qwen/Qwen3-30B-A3B", 1, 8, 0.9),
        ("Qwen/Qwen3-30B-A3B", 2, 4, 0.9),
        ("zai-org/GLM-4.5-Air", 2, 8, 0.9),
        ("openai/gpt-oss-20b", 1, 4, 0.9),
        # Few rows, of which each draft token loads as many experts as a row; and many.
        ("Qwen/Qwen3-30B-A3B", 1, 1, 0.6),
        ("Qwen/Qwen3-30B-A3B", 2, 2, 0.6),
        ("openai/gpt-oss-20b", 1, 16, 0.6),
        ("Qwen/Qwen3-30B-A3B", 2, 64, 0.6),
    ],
)
def test_the_price_of_a_mixture_is_soon_known(name, tp, rows, follow):
    """A mean of three texts, by a step's time on H100s; the drafter that knows it makes no experiments."""
    model = Architecture.read(PUBLISHED[name])
    step = replace(roofline.replica(model, roofline.GPUS["H100"], tp).step, drafting=0.0, waiting=0.0)
    machine = Machine(lambda r, d, p, _: step.seconds(r, 0.0, d + p), plan=6e-6 * rows, experts=model.mixture.experts)
    ours, first, known = [], [], []
    for seed in range(3):
        log = VirtualEngine(machine, Texts(follow, 400, seed), rows, seed).run(repeat(400), 200)
        ours.append(log.gain(0, 200))
        first.append(log.gain(0, 60))
        engine = VirtualEngine(machine, Texts(follow, 400, seed), rows, seed)
        engine.drafter.weighing = Informed(machine)
        known.append(engine.run(repeat(400), 200).gain(0, 200))
    assert np.mean(ours) > 0.97 * np.mean(known)
    assert np.mean(first) > 0.98
    assert np.mean(ours) > 0.98


@pytest.mark.parametrize(("right", "first", "later"), [(0.8, 0.97, 0.97), (0.5, 0.97, 0.97), (0.0, 1.1, 1.15)])
@pytest.mark.parametrize("machine", [linear(**MEMORY), knee(0.012, 128), gpu(0)])
def test_text_beside_the_models_drafter_is_not_below_it_alone(machine, right, first, later):
    """Batches of all widths up to 64, of which each learnt on its own whether the model's drafter gains."""
    machine = replace(machine, row_plan=6e-6, model=0.0015, right=right)
    ours, alone = [], []
    for seconds, drafter in ((ours, None), (alone, ModelAlone())):
        engine, begin = VirtualEngine(machine, Texts(0.3, 1200), 64, drafter=drafter), 0
        for lengths in with_a_tail(4):
            log = engine.run(lengths)
            seconds.append(sum(log.seconds[begin:]))
            begin = len(log.rows)
    assert alone[0] / ours[0] > first
    assert sum(alone[1:]) / sum(ours[1:]) > later


def test_rests_while_drafts_are_expensive_and_resumes_later():
    """A draft token costs ten rows at first, and nothing later."""
    engine = VirtualEngine(linear(0.004, 0.001, 0.010, plan=5e-4), Texts(0.9, 400), 16)
    log = engine.run(repeat(400), 300)
    assert 0 < np.mean(log.planned[100:]) < 0.1, "some plans must test whether drafting is profitable"
    assert log.gain(0, 300) > 0.96
    engine.machine = linear(0.004, 0.001, 1e-5, plan=5e-4)
    engine.run(repeat(400), 600)
    assert np.mean(log.planned[-100:]) > 0.9
    assert log.gain(-100) > 1.8


def test_follows_contexts_that_grow():
    """Rows with long contexts take most of a step; draft tokens do not."""
    machine = Machine(lambda r, d, p, text: 0.004 + 1e-3 * r + 1e-3 * (d + p) + 4e-6 * text)
    log = VirtualEngine(machine, Texts(0.9, 1000), 16).run(repeat(1000), 600)
    assert log.gain(0, 60) > 0.97
    assert log.gain(300, 600) > 1.0


def test_wakes_when_text_repeats():
    """A batch of 128 rows that hardly repeated does now, which neither the price nor the confidence know."""
    texts = Texts(0.3, 100)
    engine = VirtualEngine(linear(0.012, 0.0, 8e-6, plan=0.0015), texts, 128)
    engine.run(repeat(100, 3 * 128))
    assert np.mean(engine.log.planned[20:]) < 0.05
    texts.follow, begin = 0.9, len(engine.log.rows)
    engine.run(repeat(100, 6 * 128))
    assert np.mean(engine.log.planned[begin + 100 :]) > 0.9
    assert engine.log.gain(begin + 100) > 1.5


def test_an_asynchronous_engine_wakes_soon():
    """The first drafts cost a wait that few tokens do not repay: it must try many at once."""
    texts = Texts(0.0, 160)
    engine = VirtualEngine(linear(0.009, 0.0, 1e-7, plan=0.0012, wait=0.003), texts, 64)
    for least in (1.3, 1.7):
        texts.follow, begin = 0.0, len(engine.log.rows)
        engine.run(repeat(160, 64))
        assert engine.log.gain(begin) > 0.95
        texts.follow, begin = 0.85, len(engine.log.rows)
        engine.run(repeat(160, 64))
        assert engine.log.gain(begin) > least


@pytest.mark.parametrize(("right", "follow", "late"), [(0.0, 0.3, 0.96), (0.8, 0.3, 1.4), (0.8, 0.85, 1.65)])
def test_an_asynchronous_engine_decides_on_the_models_drafter(right, follow, late):
    """Its steps without drafts had no time while it waited: no trial ended, and omitted drafts never came back."""
    machine = replace(asynchronous(0.009, 0.004), model=0.0015, right=right)
    log = VirtualEngine(machine, Texts(follow, 400), 64).run(repeat(400), 500)
    assert log.gain(0, 60) > 0.95
    assert log.gain(0, 500) > late


def test_an_experiment_that_would_be_too_large_is_not_begun():
    """A wide batch began one at most probes, to know the price of more tokens than an experiment verifies."""
    log = VirtualEngine(gpu(256), Texts(0.85, 400), 256).run(repeat(400), 700)
    assert log.gain(200) > 0.988


def test_drafts_that_are_never_accepted_end():
    """An engine that drops all drafts lost a third of its speed for ever."""
    log = VirtualEngine(linear(**MEMORY, plan=1e-4), Texts(0.9, 400), 16, verifies=False).run(repeat(400), 400)
    assert log.gain(100, 400) > 0.97
