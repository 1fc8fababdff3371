"""Samples of a validation that fail start again, like those of training."""

import asyncio
import time

import pytest

from verl_rhyme.agent_loop.validation import Validation
from verl_rhyme.processes.deadline import NoAnswer
from verl_rhyme.scheduling import retries

SAMPLES = [(f"v{uid}", number) for uid in range(10) for number in range(2)]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Pauses of milliseconds."""
    monkeypatch.setattr(retries, "PAUSE_S", 0.001)
    monkeypatch.setattr(retries, "LONGEST_PAUSE_S", 0.06)


async def validate(validation, judge):
    """Return what each sample returned or raised; the last ones take 0.2 s."""

    async def run(sample):
        async def call():
            await asyncio.sleep(0.01 * SAMPLES.index(sample))
            judge(sample)
            return sample

        return await validation.run(sample, call)

    return await asyncio.wait_for(asyncio.gather(*map(run, SAMPLES), return_exceptions=True), 20)


async def test_an_outage_is_waited_out():
    began, calls = time.monotonic(), []

    def judge(sample):
        calls.append(sample)
        if time.monotonic() < began + 1:
            raise ConnectionError("no judge")

    assert await validate(Validation(outage_s=30), judge) == SAMPLES
    assert len(calls) < 15 * len(SAMPLES), "a service that is away is asked by a few samples"


@pytest.mark.parametrize(
    ("error", "tries"), [(KeyError, retries.TRIES), (NoAnswer, 2), (asyncio.CancelledError, retries.TRIES)]
)
async def test_a_sample_that_fails_while_others_succeed_is_left_out(caplog, monkeypatch, error, tries):
    """Or after a minute, if the others have succeeded before."""
    monkeypatch.setattr(retries, "REPLACE_S", 0.3)
    calls = []

    def judge(sample):
        calls.append(sample)
        if sample == SAMPLES[0]:
            raise error("no ground truth")

    found = await validate(Validation(outage_s=30), judge)
    assert [type(result) for result in found[:1]] == [error]
    assert found[1:] == SAMPLES[1:]
    assert calls.count(SAMPLES[0]) >= tries
    assert "validation goes on without sample 0 of validation prompt v0" in caplog.text


@pytest.mark.parametrize(("error", "outage_s"), [(ConnectionError, 0.5), (TypeError, 900.0)])
async def test_after_the_limit_the_rest_is_left_out(caplog, monkeypatch, error, outage_s):
    """Wrong code ends sooner, as in training: if no sample has ever succeeded."""
    monkeypatch.setattr(retries, "BROKEN_S", 0.3)
    validation, away = Validation(outage_s), [True]

    def judge(sample):
        if away[0]:
            raise error("no judge")

    found = await validate(validation, judge)
    assert {type(result) for result in found} <= {error, retries.RolloutError}
    assert caplog.text.count("validation goes on without the samples that fail") == 1
    assert "no judge" in caplog.text
    away[0] = False
    assert await validate(validation, judge) == SAMPLES, "the next validation begins anew"
