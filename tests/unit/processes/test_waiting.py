"""Long waits are logged, and calls that fail are repeated."""

import asyncio
import time

import pytest

from verl_rhyme.processes import waiting
from verl_rhyme.processes.waiting import insist, waiting_for


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(waiting, "EVERY_S", 0.03)
    monkeypatch.setattr(waiting, "RETRIES_S", (0.001, 0.001))


@pytest.mark.parametrize("what", ["an answer", lambda: "an answer"], ids=["text", "call"])
def test_a_long_wait_is_logged_again_and_again_until_it_is_over(caplog, what):
    with waiting_for(what):
        time.sleep(0.15)
    said = caplog.text.count("waiting for an answer")
    assert said >= 2
    time.sleep(0.1)
    assert caplog.text.count("waiting for an answer") <= said + 1
    with waiting_for("no time"):
        pass
    time.sleep(0.05)
    assert "no time" not in caplog.text


class Flaky:
    """Fails so often, then answers."""

    def __init__(self, failures, error=RuntimeError):
        self.failures, self.error, self.calls = failures, error, 0

    async def __call__(self):
        self.calls += 1
        if self.calls <= self.failures:
            raise self.error("Error in kv_list")
        return self.calls


async def test_a_call_is_repeated_a_few_times(caplog):
    assert await insist(Flaky(2), "the call") == 3
    assert caplog.text.count("the call failed (RuntimeError('Error in kv_list')): trying again") == 2
    with pytest.raises(RuntimeError):
        await insist(Flaky(3), "the call")


async def test_a_permanent_error_is_raised_at_once():
    call = Flaky(1, ValueError)
    with pytest.raises(ValueError, match="kv_list"):
        await insist(call, "the call", permanent=(ValueError,))
    assert call.calls == 1


async def test_a_late_answer_is_an_error():
    with pytest.raises(asyncio.TimeoutError):
        await insist(lambda: asyncio.sleep(60), "the call", limit_s=0.01)
