"""Reports of samples that end together are sent together, first to the queue, then to the coordinator."""

import asyncio

import pytest

from verl_rhyme.agent_loop import reports as module
from verl_rhyme.agent_loop.reports import Reports
from verl_rhyme.processes import waiting
from verl_rhyme.processes.queue import repeated
from verl_rhyme.scheduling.attempts import Ended


class Queue:
    """TransferQueue and, as ``report_ended.remote``, the coordinator."""

    def __init__(self):
        self.stored, self.reported, self.order, self.fail, self.deaf, self.hang = [], [], [], 0, 0, False
        self.report_ended = self

    async def put(self, keys, partition_id, fields, tags):
        await asyncio.sleep(0)
        if self.fail:
            self.fail -= 1
            raise ConnectionError("gone")
        assert fields.batch_size[0] == len(keys)
        self.stored.append(dict(zip(keys, [tag["status"] for tag in tags], strict=True)))
        self.order.append("stored")

    async def remote(self, ended):
        if self.hang:
            await asyncio.sleep(60)
        if self.deaf:
            self.deaf -= 1
            raise ConnectionError("it restarts")
        self.reported.append({reported.name: reported.status for reported in ended})
        self.order.append("reported")


@pytest.fixture
def queue(monkeypatch):
    queue = Queue()
    monkeypatch.setattr(module.tq, "async_kv_batch_put", repeated(queue.put, "the queue"))
    monkeypatch.setattr(waiting, "RETRIES_S", (0.001, 0.001))
    return queue


@pytest.fixture
def reports(queue):
    reports = Reports()
    reports.attach(queue)
    return reports


def send(reports, session, status="interrupted"):
    left = {"turns": [], "records": []} if status in ("interrupted", "generated") else None
    return reports.send(Ended(session, status), left)


async def test_attempts_that_end_together_are_one_message(reports, queue):
    await asyncio.gather(*(send(reports, f"a_{i}") for i in range(30)))
    assert queue.stored == queue.reported == [{f"a_{i}": "interrupted" for i in range(30)}]
    assert queue.order == ["stored", "reported"], "a coordinator that is started anew looks into the queue"


async def test_reports_without_columns_skip_the_queue(reports, queue):
    await asyncio.gather(send(reports, "a_0", "finished"), send(reports, "a_1", "failed"), send(reports, "a_2"))
    assert queue.stored == [{"a_2": "interrupted"}]
    assert queue.reported == [{"a_0": "finished", "a_1": "failed"}, {"a_2": "interrupted"}]


async def test_report_during_a_delivery_is_not_lost(reports, queue):
    first = asyncio.create_task(send(reports, "a_0"))
    await asyncio.sleep(module._DELAY_S)
    await asyncio.gather(first, send(reports, "a_1"))
    assert sorted(session for message in queue.reported for session in message) == ["a_0", "a_1"]


async def test_error_reaches_its_senders_and_no_later_one(reports, queue):
    queue.fail = 3
    results = await asyncio.gather(send(reports, "a_0"), send(reports, "a_1"), return_exceptions=True)
    assert [type(result) for result in results] == [module.NotReported] * 2
    assert queue.reported == [], "what is not stored is not reported"
    await send(reports, "a_0")
    assert queue.reported == [{"a_0": "interrupted"}]


async def test_failed_report_is_sent_again_and_stored_once(reports, queue):
    queue.fail = queue.deaf = 2
    await send(reports, "a_0")
    assert queue.stored == queue.reported == [{"a_0": "interrupted"}]


async def test_hung_coordinator_is_an_error(reports, queue, monkeypatch):
    monkeypatch.setattr(module, "_TIMEOUT_S", 0.01)
    queue.hang = True
    with pytest.raises(module.NotReported, match=r"the coordinator.*TimeoutError"):
        await send(reports, "a_0")


async def test_cancelled_sender_does_not_affect_other_reports(reports, queue):
    one, other = (asyncio.create_task(send(reports, session)) for session in ("a_0", "a_1"))
    await asyncio.sleep(0)
    one.cancel()
    await other
    assert "a_1" in queue.reported[0]
