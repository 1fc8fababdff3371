"""Reports of samples that end together go together."""

import asyncio

import pytest

from verl_rhyme.workers import agent_loop


class Queue:
    def __init__(self):
        self.messages, self.fail, self.hang = [], 0, False

    async def put(self, keys, partition_id, fields, tags):
        await asyncio.sleep(0)
        if self.hang:
            await asyncio.sleep(60)
        if self.fail:
            self.fail -= 1
            raise ConnectionError("gone")
        assert fields.batch_size[0] == len(keys)
        self.messages.append(dict(zip(keys, [tag["status"] for tag in tags], strict=True)))


@pytest.fixture
def queue(monkeypatch):
    queue = Queue()
    monkeypatch.setattr(agent_loop.tq, "async_kv_batch_put", queue.put)
    monkeypatch.setattr(agent_loop, "_REPORT_RETRIES_S", (0.001, 0.001))
    return queue


def send(reports, key, status="interrupted"):
    return reports.send(key, {"turns": [], "records": []}, {"status": status})


async def test_what_ends_together_is_one_message(queue):
    reports = agent_loop._Reports()
    await asyncio.gather(*(send(reports, f"a_{i}") for i in range(30)))
    assert queue.messages == [{f"a_{i}": "interrupted" for i in range(30)}]


async def test_one_after_the_other_keeps_its_order(queue):
    reports = agent_loop._Reports()
    await send(reports, "a_0", "generated")
    await send(reports, "a_0", "failed")
    assert queue.messages == [{"a_0": "generated"}, {"a_0": "failed"}]


async def test_a_report_that_comes_while_one_is_sent_is_not_lost(queue):
    reports = agent_loop._Reports()
    first = asyncio.create_task(send(reports, "a_0"))
    await asyncio.sleep(agent_loop._REPORT_DELAY_S)
    await asyncio.gather(first, send(reports, "a_1"))
    assert sorted(key for message in queue.messages for key in message) == ["a_0", "a_1"]


async def test_an_error_reaches_all_whom_it_concerns_and_nobody_later(queue):
    reports = agent_loop._Reports()
    queue.fail = 3
    results = await asyncio.gather(send(reports, "a_0"), send(reports, "a_1"), return_exceptions=True)
    assert [type(result) for result in results] == [ConnectionError] * 2
    await send(reports, "a_0")
    assert queue.messages == [{"a_0": "interrupted"}]


async def test_a_report_that_fails_is_sent_again(queue):
    queue.fail = 2
    await send(agent_loop._Reports(), "a_0")
    assert queue.messages == [{"a_0": "interrupted"}]


async def test_a_queue_that_hangs_is_an_error_too(queue, monkeypatch):
    monkeypatch.setattr(agent_loop, "_REPORT_TIMEOUT_S", 0.01)
    queue.hang = True
    with pytest.raises(TimeoutError):
        await send(agent_loop._Reports(), "a_0")


async def test_a_cancelled_sender_takes_no_others_report_with_it(queue):
    reports = agent_loop._Reports()
    one, other = (asyncio.create_task(send(reports, key)) for key in ("a_0", "a_1"))
    await asyncio.sleep(0)
    one.cancel()
    await other
    assert "a_1" in queue.messages[0]
