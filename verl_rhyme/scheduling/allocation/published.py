"""Algorithm 1 as published (StreamRL, arXiv:2504.15930, section 4.2): how many GPUs generate and how many train.

Both take a batch's seconds by GPUs as functions, as a profile tells them. What verl-rhyme plans with is
:mod:`verl_rhyme.scheduling.allocation.planner`, of which this is the special case of one kind of GPU, of no memory
limit, and of stages that a step waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Seconds = Callable[[int], float]


def within(p_gen: Seconds, p_train: Seconds, gpus: int) -> tuple[int, int]:
    """One data centre: GPUs that generate and that train, of so many.

    Of splits that are equally fast, that of the fewest GPUs, then that with the fewest which generate.

    Raises:
        ValueError: There are fewer than two.
    """
    if gpus < 2:
        raise ValueError(f"a split needs two GPUs at least, not {gpus}")
    generated, trained = ([p(n) for n in range(1, gpus)] for p in (p_gen, p_train))
    splits = ((x, y) for x in range(1, gpus) for y in range(1, gpus - x + 1))
    return min(splits, key=lambda split: (max(generated[split[0] - 1], trained[split[1] - 1]), sum(split), split))


def across(p_gen: Seconds, p_train: Seconds, there: int, here: int) -> tuple[int, int]:
    """Two data centres, one that generates and one that trains: the GPUs of each that are used. The faster stage keeps
    no more of its own than bring it to the pace of the other.

    Raises:
        ValueError: One has none.
    """
    if min(there, here) < 1:
        raise ValueError(f"both data centres need a GPU, not {there} and {here}")
    generated, trained = p_gen(there), p_train(here)
    if generated < trained:
        return _nearest(p_gen, there, trained), here
    return there, _nearest(p_train, here, generated)


def _nearest(p: Seconds, gpus: int, seconds: float) -> int:
    counts: Sequence[int] = range(1, gpus + 1)
    return min(counts, key=lambda n: (abs(p(n) - seconds), n))
