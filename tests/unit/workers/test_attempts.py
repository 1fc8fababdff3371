"""What an agent loop worker runs, ends and reports."""

import asyncio
from types import SimpleNamespace

import pytest

from verl_rhyme.workers import agent_loop
from verl_rhyme.workers.agent_loop import SessionAgentLoopWorker
from verl_rhyme.workers.session import STARTS, Interrupted, Start, current, session_key

_Worker = SessionAgentLoopWorker.__ray_metadata__.modified_class


class Worker(_Worker):
    """Its agent loop is what a test says."""

    def __init__(self, run):
        self.run, self.reports, self.broken = run, {}, False
        self._coupled, self._seed, self._attempts = False, 0, {}
        self._reports = self  # type: ignore[assignment]

    async def send(self, key, fields, tag):
        if self.broken:
            raise ConnectionError("gone")
        self.reports[key] = tag

    async def _run_agent_loop(self, sampling_params, trajectory, trace, session_id, **prompt):
        await self.run(self, sampling_params, session_id, prompt)

    async def start(self, *starts):
        await self._run_prompt({"uid": "a", "global_steps": 4, STARTS: list(starts)}, {}, {"validate": False})


def first(number, kept=None):
    return Start(session_key("a", number), kept, 0, partial=True)


async def test_an_attempt_is_known_from_the_start_until_it_has_been_reported():
    async def run(worker, params, session_id, prompt):
        raise Interrupted

    worker = Worker(run)
    task = asyncio.create_task(worker.start(first(0), first(1)))
    await asyncio.sleep(0)
    assert sorted(await worker.attempts()) == ["a_0", "a_1"]
    await task
    assert await worker.attempts() == []
    assert {key: tag["status"] for key, tag in worker.reports.items()} == {"a_0": "interrupted", "a_1": "interrupted"}


async def test_an_abandoned_attempt_ends_without_a_word_and_alone():
    release = asyncio.Event()

    async def run(worker, params, session_id, prompt):
        if session_id:
            await asyncio.sleep(60)
        await release.wait()
        raise Interrupted

    worker = Worker(run)
    task = asyncio.create_task(worker.start(first(0), first(1)))
    await asyncio.sleep(0.01)
    await worker.abandon(["a_1", "b_7"])
    await asyncio.sleep(0.01)
    assert await worker.attempts() == ["a_0"]
    release.set()
    await task
    assert list(worker.reports) == ["a_0"]


async def test_one_whose_report_fails_is_known_no_longer(caplog):
    async def run(worker, params, session_id, prompt):
        raise Interrupted

    worker = Worker(run)
    worker.broken = True
    with caplog.at_level("WARNING"):
        await worker.start(first(0))
    assert await worker.attempts() == []
    assert "could not be reported" in caplog.text


async def test_each_attempt_reports_under_its_own_name_and_its_agent_loop_sees_the_sample():
    async def run(worker, params, session_id, prompt):
        assert session_id == current().sample == 2
        assert params == {}
        raise Interrupted

    worker, again = Worker(run), session_key("a", 2, attempt=3)
    await worker.start(Start(again, None, 0))
    assert list(worker.reports) == [again] != ["a_2"]


async def test_what_cannot_be_recalled_is_begun_anew(monkeypatch):
    async def gone(**kwargs):
        raise ValueError("keys or partition were not found!")

    async def run(worker, params, session_id, prompt):
        assert current().kept == []
        raise Interrupted

    monkeypatch.setattr(agent_loop.tq, "async_kv_batch_get", gone)
    worker = Worker(run)
    await worker.start(first(0, kept="a_0"))
    assert worker.reports["a_0"]["status"] == "interrupted"


@pytest.mark.parametrize("several", [False, True])
async def test_an_answer_without_generation_is_stored_with_the_version_it_was_made_under(monkeypatch, several):
    stored = []

    async def store(self, output, validate, **kwargs):
        stored.append(output)

    async def run(worker, params, session_id, prompt):
        output = SimpleNamespace(extra_fields={"min_global_steps": None})
        outputs = [output, SimpleNamespace(extra_fields={"max_global_steps": 1})] if several else output
        await worker._agent_loop_postprocess(outputs, False, session_id=session_id, **prompt)

    monkeypatch.setattr(agent_loop._AgentLoopWorker, "_agent_loop_postprocess", store)
    worker = Worker(run)
    await worker.start(first(0))
    assert worker.reports["a_0"] == {"status": "generated", "tokens": 0, "first_version": None}
    versions = [output.extra_fields for output in (stored[0] if several else stored)]
    assert versions[0] == {"min_global_steps": 3, "max_global_steps": 3}
    assert versions[1:] == ([{"min_global_steps": 3, "max_global_steps": 1}] if several else [])


async def test_a_failure_is_reported_with_the_end_of_its_text():
    """A remote error has a long traceback before its message."""

    async def run(worker, params, session_id, prompt):
        raise RuntimeError("at some place\n" * 1000 + "KeyError: 'answer'")

    worker = Worker(run)
    await worker.start(first(0))
    tag = worker.reports["a_0"]
    assert tag["status"] == "failed"
    assert tag["error"].endswith("KeyError: 'answer'")
    assert len(tag["error"]) <= 1000
