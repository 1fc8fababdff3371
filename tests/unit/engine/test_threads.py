"""Planning threads: no call outlives ``run``, deferred calls come first, and the caller can do it alone."""

import threading
from functools import partial

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


@pytest.mark.parametrize("count", [1, 3])
def test_deferred_calls_run_in_order_before_the_next_plans(count):
    pool, ended, hold = PlanningThreads(count), [], threading.Event()
    threading.Timer(0.1, hold.set).start()
    pool.defer(lambda: (hold.wait(10), ended.append("first")))
    pool.defer(partial(ended.append, "second"))  # without a plan in between, as for a resting drafter
    pool.run([partial(ended.append, "plan")] * 2)
    assert ended == ["first", "second", "plan", "plan"]


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


@pytest.mark.parametrize("started", [0, 1])
def test_caller_plans_alone_if_a_thread_cannot_start(started, monkeypatch, caplog):
    start, starts = threading.Thread.start, []

    def refuse(thread):
        starts.append(thread)
        if len(starts) > started:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    pool, ended = PlanningThreads(4), []
    assert pool.count == 1
    pool.defer(partial(ended.append, "deferred"))
    pool.run([partial(ended.append, i) for i in range(3)])
    assert ended == ["deferred", 0, 1, 2]
    assert "cannot start planning threads" in caplog.text
    for thread in starts[:started]:
        thread.join(10)
        assert not thread.is_alive()
