"""Reports of attempts that end together are sent together."""

import asyncio

import pytest

from verl_rhyme.agent_loop import reports as module
from verl_rhyme.agent_loop.reports import Reports
from verl_rhyme.processes import waiting
from verl_rhyme.scheduling.attempts import Attempt, AttemptReport


class Coordinator:
    def __init__(self):
        self.messages, self.deaf, self.report_ended = [], 0, self

    async def remote(self, reports):
        if self.deaf:
            self.deaf -= 1
            raise ConnectionError("it restarts")
        self.messages.append([report.attempt.number for report in reports])


@pytest.fixture
def reports(monkeypatch):
    monkeypatch.setattr(waiting, "RETRIES_S", (0.001, 0.001))
    reports = Reports()
    reports.coordinator = Coordinator()
    return reports


def send(reports, number):
    return asyncio.ensure_future(reports.send(AttemptReport(Attempt("a", number), "interrupted")))


async def test_attempts_that_end_together_are_one_message_also_during_a_delivery(reports):
    first = [send(reports, number) for number in range(30)]
    await asyncio.sleep(module._DELAY_S)
    await asyncio.gather(*first, send(reports, 30))
    assert reports.coordinator.messages == [[*range(30)], [30]]


async def test_error_reaches_its_senders_and_no_later_one(reports):
    reports.coordinator.deaf = 3
    results = await asyncio.gather(send(reports, 0), send(reports, 1), return_exceptions=True)
    assert [type(result) for result in results] == [module.NotReported] * 2
    reports.coordinator.deaf = 2
    await send(reports, 0)
    assert reports.coordinator.messages == [[0]], "after two tries"


async def test_cancelled_sender_does_not_affect_other_reports(reports):
    one, other = send(reports, 0), send(reports, 1)
    await asyncio.sleep(0)
    one.cancel()
    await other
    assert 1 in reports.coordinator.messages[0]
