"""Planning threads: no call outlives ``run``, and deferred calls come first."""

import threading
from functools import partial

import pytest

from verl_rhyme.drafting.threads import Threads


def test_run_waits_for_all_threads_and_raises_errors():
    """The data of the calls may be freed as soon as ``run`` returns."""
    pool, ended, hold = Threads(3), [], threading.Event()

    def fails():
        hold.set()
        raise ValueError("row")

    def lasts():
        assert hold.wait(10)
        ended.append(True)

    for calls in ([fails, lasts, lasts], [lasts, fails, lasts]):
        ended.clear()
        with pytest.raises(ValueError, match="row"):
            pool.run(calls)
        assert ended == [True, True]


@pytest.mark.parametrize("count", [1, 3])
def test_deferred_calls_run_in_order_before_the_next_plans(count):
    pool, ended, hold = Threads(count), [], threading.Event()
    threading.Timer(0.1, hold.set).start()
    pool.defer(lambda: (hold.wait(10), ended.append("first")))
    pool.defer(partial(ended.append, "second"))  # without a plan in between, as for a resting drafter
    pool.run([partial(ended.append, "plan")] * 2)
    assert ended == ["first", "second", "plan", "plan"]


@pytest.mark.parametrize("count", [1, 3])
def test_error_of_a_deferred_call_is_raised_once(count):
    pool, ended = Threads(count), []

    def fails():
        raise ValueError("not counted")

    def failing():
        pool.defer(fails)  # raises here without other threads
        pool.run([])

    with pytest.raises(ValueError, match="not counted"):
        failing()
    pool.run([partial(ended.append, "after it")])
    assert ended == ["after it"]
