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
        self.kept, self.forget, self.store_turns = map(_Method, (self._kept, self._forget, self._store))
        self.turns, self.stored = [], []

    async def _attach(self, _):
        return {}

    async def _kept(self):
        return list(self.turns)

    async def _forget(self, names):
        self.turns = [name for name in self.turns if name not in names]

    async def _store(self):
        self.stored = list(self.turns)

    async def _begin(self, starts, _):
        await asyncio.sleep(self.slow_s)
        self.about += [start.name for start in starts]

    async def _attempts(self):
        return list(self.about)


async def test_attempts_are_not_lost_while_their_reports_wait(monkeypatch):
    """A coordinator that opens again records them last, after it has waited for a worker that hangs."""
    monkeypatch.setattr(pools, "_ROLL_CALL_S", 0.01)
    worker, lost = Worker(0.0), []
    worker.attach = _Method(lambda _: asyncio.sleep(0, {"a_0": ""}))
    pool = WorkerPool(None, 5.0, lambda names, why, turns: lost.extend(names))
    await pool.join([worker], 5.0)
    worker.turns = ["a_0"]  # it was interrupted, and its report waits
    await asyncio.sleep(0.1)
    pool.ended("a_0", kept=True)
    pool.watch()
    await asyncio.sleep(0.1)
    pool.close()
    assert (lost, worker.turns, list(pool.kept)) == ([], ["a_0"], ["a_0"])


@pytest.mark.parametrize(("slow_s", "forgotten"), [(0.08, []), (0.0, ["a_1"])])
async def test_only_attempts_unknown_to_their_worker_are_lost(monkeypatch, slow_s, forgotten):
    """A query that overtakes a start finds nothing missing."""
    monkeypatch.setattr(pools, "_ROLL_CALL_S", 0.01)
    worker, lost = Worker(slow_s), []
    pool = WorkerPool(None, 5.0, lambda names, why, turns: lost.extend(names))
    await pool.join([worker], 5.0)
    pool.watch()
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
    pool = WorkerPool(None, 5.0, lambda names, why, turns: None)
    assert await pool.join([hung, sound], 0.1) == {}
    pool.close()
    assert len(pool) == 1
    assert killed == [hung]
    assert "no answer for 0 s" in pool.start_error
    assert "waiting for 1 of 2 agent loop workers to start or answer" in caplog.text


async def test_a_sample_continues_on_the_worker_that_keeps_its_turns(monkeypatch):
    """A restarted coordinator asks the workers; without that worker any other starts the sample over."""
    monkeypatch.setattr(pools.ray, "kill", lambda worker: None)
    workers, lost = [Worker(0.0) for _ in range(3)], []
    workers[2].turns = ["a_1"]
    pool = WorkerPool(None, 5.0, lambda names, why, turns: lost.append((names, turns)))
    await pool.join(workers)
    for number in range(3):
        pool.start([Start(f"{prompt}_{number}") for prompt in "abc"], 1)
    await asyncio.sleep(0.01)
    keeper = next(worker for worker in workers if "a_0" in worker.about)
    keeper.turns.append("a_0")
    pool.ended("a_0", kept=True)
    workers[0].turns.append("d_0")  # of an attempt that was lost before its report
    for name in ("a_0", "d_0"):  # reports may come twice
        pool.ended(name, kept=True)
    await asyncio.sleep(0.01)
    assert "d_0" not in workers[0].turns
    await pool.store_turns()
    assert keeper.stored == keeper.turns
    again = Start("a_65536", "a_0"), Start("a_65537", "a_1")
    pool.start(list(again), 1)
    await asyncio.sleep(0.01)
    assert "a_65536" in keeper.about
    assert "a_65537" in workers[2].about
    pool.forget(["a_1"])
    await asyncio.sleep(0.01)
    assert "a_1" not in workers[2].turns
    pool._give_up(keeper, asyncio.TimeoutError())
    running = sorted({*keeper.about} - {"a_0"})
    assert lost == [(running, ["a_0"])], "what it ran, and what it kept"
    pool.start([Start("a_131072", "a_0")], 1)
    await asyncio.sleep(0.01)
    assert "a_131072" in [name for worker in workers if worker is not keeper for name in worker.about]
    pool.close()
