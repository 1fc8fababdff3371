"""Long waits are logged, and calls that fail are repeated."""

import asyncio
import itertools
import time

import pytest

from verl_rhyme.processes import waiting
from verl_rhyme.processes.waiting import insist, waiting_for


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(waiting, "EVERY_S", 0.03)
    monkeypatch.setattr(waiting, "RETRIES_S", (0.001, 0.001))


def test_a_long_wait_is_logged_again_and_again_until_it_is_over(caplog):
    with waiting_for(lambda: "an answer"):
        time.sleep(0.15)
    said = caplog.text.count("waiting for an answer")
    assert said >= 2
    time.sleep(0.1)
    assert caplog.text.count("waiting for an answer") <= said + 1


def flaky(failures, error=RuntimeError):
    """Return a call that fails so often, then returns its number."""
    calls = itertools.count(1)

    async def call():
        if (number := next(calls)) <= failures:
            raise error("Error in kv_list")
        return number

    return call


async def test_a_call_is_repeated_a_few_times(caplog):
    assert await insist(flaky(2), "the call") == 3
    assert caplog.text.count("the call failed (RuntimeError('Error in kv_list')): trying again") == 2
    with pytest.raises(RuntimeError):
        await insist(flaky(3), "the call")


async def test_a_permanent_error_is_raised_at_once():
    with pytest.raises(ValueError, match="kv_list"):
        await insist(flaky(1, ValueError), "the call", permanent=(ValueError,))


async def test_a_late_answer_is_an_error():
    with pytest.raises(asyncio.TimeoutError):
        await insist(lambda: asyncio.sleep(60), "the call", limit_s=0.01)
