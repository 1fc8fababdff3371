"""Requests that need a newer policy wait at the server's gate, and weights wait until no request runs."""

import asyncio

import pytest

from verl_rhyme.engine.gate import Gate


async def started(work):
    task = asyncio.create_task(work)
    for _ in range(5):
        await asyncio.sleep(0)
    return task


@pytest.fixture
def gate():
    return Gate()


async def test_request_for_a_newer_version_waits_for_it(gate):
    await gate.open(3)
    assert await gate.enter("old", 2)
    assert await gate.enter("current", 3)
    waits = await started(gate.enter("next", 4))
    after = await started(gate.enter("after", 5))
    assert not waits.done()
    assert gate.running == 2
    await gate.open(4)
    assert await waits
    assert not after.done()
    await gate.open(7)
    assert await after
    assert gate.running == 4


async def test_new_weights_wait_for_running_requests_but_not_for_waiting_ones(gate):
    assert await gate.enter("a", 0)
    assert await gate.enter("b", 0)
    await started(gate.enter("next", 1))
    empty = await started(gate.wait_until_idle())
    await gate.leave()
    assert not empty.done()
    await gate.leave()
    await asyncio.wait_for(empty, 1)


async def test_cancelled_request_never_enters_and_leaves_no_state(gate):
    waits, caller = await started(gate.enter("a", 1)), await started(gate.enter("b", 1))
    assert not await gate.cancel("c")
    assert await gate.cancel("a")
    assert not await waits
    caller.cancel()  # as if its client had gone
    await asyncio.wait({caller})
    assert not await gate.cancel("a")
    assert not await gate.cancel("b")
    await gate.open(1)
    assert gate.running == 0


async def test_shut_gate_turns_away_waiting_and_new_requests_until_weights_arrive(gate):
    waits = await started(gate.enter("next", 1))
    await gate.close()
    assert not await waits
    assert not await gate.enter("late", 0)
    assert not await gate.enter("later", 7)
    assert gate.running == 0
    await gate.open(7)
    assert await gate.enter("again", 7)
    assert not (await started(gate.enter("next", 8))).done()
