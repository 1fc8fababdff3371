"""A pool reports attempts as lost that their worker does not know."""

import asyncio
from types import SimpleNamespace

import pytest

from verl_rhyme.coordinator import worker_pool as pools
from verl_rhyme.coordinator.worker_pool import WorkerPool
from verl_rhyme.processes import waiting
from verl_rhyme.scheduling.attempts import Start


class _Method:
    def __init__(self, call):
        self.remote = lambda *arguments: asyncio.ensure_future(call(*arguments))


class Worker:
    """A worker whose first message may be processed last, as Ray allows for an asynchronous actor."""

    def __init__(self, slow_s):
        self.slow_s, self.about = slow_s, []
        self.attach, self.start_attempts, self.attempts = map(_Method, (self._attach, self._begin, self._attempts))

    async def _attach(self, _):
        return {}

    async def _begin(self, starts, _):
        await asyncio.sleep(self.slow_s)
        self.about += [start.name for start in starts]

    async def _attempts(self):
        return list(self.about)


@pytest.mark.parametrize(("slow_s", "forgotten"), [(0.08, []), (0.0, ["a_1"])])
async def test_only_attempts_unknown_to_their_worker_are_lost(monkeypatch, slow_s, forgotten):
    """A query that overtakes a start finds nothing missing."""
    monkeypatch.setattr(pools, "_ROLL_CALL_S", 0.01)
    worker, lost = Worker(slow_s), []
    pool = WorkerPool(None, 5.0, lambda names, why: lost.extend(names))
    await pool.join([worker], 5.0)
    pool.start([Start("a_0"), Start("a_1")], 1)
    await asyncio.sleep(0.1)
    worker.about = [name for name in worker.about if name not in forgotten]
    await asyncio.sleep(0.1)
    pool.close()
    assert lost == forgotten
    assert len(pool) == 1


async def test_worker_that_hangs_is_given_up_by_a_coordinator_that_joins_it(monkeypatch, caplog):
    """As after a restart of the coordinator: its attempts are unknown, and start again elsewhere."""
    killed = []
    monkeypatch.setattr(pools, "ray", SimpleNamespace(kill=killed.append))
    monkeypatch.setattr(waiting, "EVERY_S", 0.02)
    hung, sound = Worker(0.0), Worker(0.0)
    hung.attach = _Method(lambda _: asyncio.sleep(3600))
    pool = WorkerPool(None, 5.0, lambda names, why: None)
    assert await pool.join([hung, sound], 0.1) == {}
    pool.close()
    assert len(pool) == 1
    assert killed == [hung]
    assert "no answer for 0 s" in pool.start_error
    assert "waiting for 1 of 2 agent loop workers to start or answer" in caplog.text
