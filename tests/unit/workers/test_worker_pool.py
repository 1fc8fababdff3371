import asyncio

from verl_rhyme.coordinator import worker_pool as pools
from verl_rhyme.coordinator.worker_pool import WorkerPool
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


def _lost(worker, forget=False):
    """Return the attempts of two that a pool reports as lost, over several queries."""
    found = []

    async def drive():
        pool = WorkerPool(None, 5.0, lambda sessions, why: found.extend(sessions))
        await pool.join([worker])
        pool.start([Start("a_0"), Start("a_1")], 1)
        await asyncio.sleep(0.1)
        if forget:
            worker.about.remove("a_1")
        await asyncio.sleep(0.1)
        pool.close()

    asyncio.run(drive())
    return found


def test_query_that_overtakes_a_start_loses_nothing(monkeypatch):
    monkeypatch.setattr(pools, "_ROLL_CALL_S", 0.01)
    assert _lost(Worker(slow_s=0.08)) == []


def test_attempt_unknown_to_its_worker_is_lost(monkeypatch):
    monkeypatch.setattr(pools, "_ROLL_CALL_S", 0.01)
    assert _lost(Worker(slow_s=0.0), forget=True) == ["a_1"]
