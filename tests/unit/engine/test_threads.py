"""Planning threads: no call outlives ``run``, deferred calls come first, and threads that do not start cost no call."""

import threading
import time
from functools import partial
from unittest.mock import Mock

import pytest

from verl_rhyme.engine.threads import PlanningThreads


def test_run_waits_for_all_threads_and_raises_errors():
    """The data of the calls may be freed as soon as ``run`` returns."""
    pool, ended, hold = PlanningThreads(3), [], threading.Event()

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
    pool.close()


@pytest.mark.parametrize("count", [1, 3])
def test_deferred_calls_run_in_order_before_the_next_plans(count):
    pool, ended, hold = PlanningThreads(count), [], threading.Event()
    threading.Timer(0.1, hold.set).start()
    pool.defer(lambda: (hold.wait(10), ended.append("first")))
    pool.defer(partial(ended.append, "second"))  # without a plan in between, as for a resting drafter
    pool.run([partial(ended.append, "plan")] * 2)
    assert ended == ["first", "second", "plan", "plan"]
    pool.close()


@pytest.mark.parametrize("count", [1, 3])
def test_error_of_a_deferred_call_is_raised_once(count):
    pool, ended = PlanningThreads(count), []

    def fails():
        raise ValueError("not counted")

    def failing():
        pool.defer(fails)  # raises here without other threads
        pool.run([])

    with pytest.raises(ValueError, match="not counted"):
        failing()
    pool.run([partial(ended.append, "after it")])
    assert ended == ["after it"]
    pool.close()


def test_deferred_call_runs_at_once_if_no_thread_starts(monkeypatch):
    pool, ended = PlanningThreads(2), []
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    pool.defer(lambda: ended.append(1))
    assert ended == [1]
    assert pool.count == 1
    pool.run([lambda: ended.append(2)])
    assert ended == [1, 2]


@pytest.mark.parametrize("started", [0, 1])
def test_no_call_outlives_run_if_a_thread_cannot_start(started, monkeypatch):
    """The next call runs none either, because its histories may have been freed."""
    start, starts = threading.Thread.start, []

    def refuse(thread):
        starts.append(thread)
        if len(starts) > started:
            raise RuntimeError("can't start new thread")
        start(thread)

    pool, running, ended = PlanningThreads(4), [], []

    def plan(i):
        running.append(i)
        time.sleep(0.05)
        ended.append(i)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    pool.run([partial(plan, i) for i in range(4)])
    assert set(running) == set(range(4))
    assert len(ended) == len(running)
    assert pool.count == 1
    pool.run([lambda: ended.append("alone")])
    assert len(ended) == len(running) + 1
    pool.close()
