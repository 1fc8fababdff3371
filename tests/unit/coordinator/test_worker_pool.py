"""A pool reports attempts as lost that their worker does not know."""

import asyncio
from types import SimpleNamespace

import pytest

from verl_rhyme.coordinator import worker_pool as pools
from verl_rhyme.coordinator.worker_pool import WorkerPool
from verl_rhyme.scheduling.attempts import Attempt, AttemptReport, Start


class _Method:
    def __init__(self, call):
        self.remote = lambda *arguments: asyncio.ensure_future(call(*arguments))


class Worker:
    """A worker whose first message may be processed last, as Ray allows for an asynchronous actor."""

    def __init__(self, slow_s=0.0):
        self.slow_s, self.about, self.turns, self.stored, self.hangs = slow_s, [], [], [], False

    def __getattr__(self, name):
        return _Method(getattr(self, f"on_{name}"))

    async def on_attach(self, _):
        return dict.fromkeys(self.about, ""), [AttemptReport(attempt, "interrupted") for attempt in self.turns]

    async def on_forget(self, attempts):
        self.turns = [attempt for attempt in self.turns if attempt not in attempts]

    async def on_store_turns(self):
        while self.hangs:
            await asyncio.sleep(0.01)
        self.stored = list(self.turns)

    async def on_start_attempts(self, starts, _):
        await asyncio.sleep(self.slow_s)
        self.about += [start.attempt for start in starts]

    async def on_abandon(self, attempts, drafts):
        self.about = [attempt for attempt in self.about if attempt not in attempts]
        self.turns += drafts

    async def on_attempts(self):
        await asyncio.sleep(3600 * self.hangs)
        return list(self.about)


A0, A1, D0 = Attempt("a", 0), Attempt("a", 1), Attempt("d", 0)


@pytest.fixture
async def pool(monkeypatch):
    """A pool, whose ``lost`` has what it reports; ``killed`` has the workers that it gave up."""
    monkeypatch.setattr(pools, "_ROLL_CALL_S", 0.01)
    killed, lost = [], []
    monkeypatch.setattr(pools, "ray", SimpleNamespace(kill=killed.append))
    pool = WorkerPool(None, 0.5, lambda attempts, why, turns: lost.append((attempts, turns)))
    pool.killed, pool.lost = killed, lost
    yield pool
    pool.close()


async def test_attempts_are_not_lost_while_their_reports_wait(pool):
    """A coordinator that opens again records them last, after it has waited for a worker that hangs."""
    worker = Worker()
    worker.about = [A0]
    await pool.join([worker], 5.0)
    worker.about, worker.turns = [], [A0]  # it was interrupted, and its report waits
    await asyncio.sleep(0.05)
    pool.ended(A0, kept=True)
    pool.watch()
    await asyncio.sleep(0.05)
    assert (pool.lost, worker.turns, list(pool._kept)) == ([], [A0], [A0])


@pytest.mark.parametrize(("slow_s", "forgotten"), [(0.08, []), (0.0, [A1])])
async def test_only_attempts_unknown_to_their_worker_are_lost(pool, slow_s, forgotten):
    """A query that overtakes a start finds nothing missing."""
    worker = Worker(slow_s)
    await pool.join([worker], 5.0)
    pool.watch()
    pool.start([Start(A0), Start(A1)], 1)
    await asyncio.sleep(0.1)
    worker.about = [attempt for attempt in worker.about if attempt not in forgotten]
    await asyncio.sleep(0.1)
    assert pool.lost == [(forgotten, [])] * bool(forgotten)
    assert len(pool) == 1


async def test_worker_that_hangs_is_given_up_by_a_coordinator_that_joins_it(pool):
    """As after a restart of the coordinator: its attempts are unknown, and start again elsewhere."""
    hung, sound = Worker(), Worker()
    hung.on_attach = lambda _: asyncio.sleep(3600)
    assert await pool.join([hung, sound], 0.1) == ({}, [])
    assert len(pool) == 1
    assert pool.killed == [hung]
    assert "no answer for 0 s" in pool.start_error


async def test_turns_are_stored_until_a_worker_that_hangs_is_killed(pool):
    """One that stored them later could write into entries that are deleted meanwhile."""
    worker = Worker()
    worker.turns = [A0]
    await pool.join([worker])
    worker.hangs = True
    pool.watch()
    storing = asyncio.ensure_future(pool.store_turns())
    await asyncio.sleep(0.3)
    assert not storing.done()
    await asyncio.sleep(0.4)
    assert (pool.killed, pool.lost) == ([worker], [([], [A0])])
    storing.cancel()


async def test_a_sample_continues_on_the_worker_that_keeps_its_turns(pool):
    """A restarted coordinator asks the workers; without that worker any other starts the sample over."""
    keeper, other = Worker(), Worker()
    keeper.turns = [A1]
    await pool.join([keeper, other])
    pool.start([Start(A0)], 1)
    await asyncio.sleep(0.01)
    keeper.turns.append(A0)
    other.turns.append(D0)  # of an attempt that was lost before its report
    for attempt in (A0, A0, D0):  # reports may come twice
        pool.ended(attempt, kept=True)
    others = [Attempt("b", number) for number in range(3)]
    pool.start([Start(attempt) for attempt in others], 1)
    again = Attempt("a", 0, 1), Attempt("a", 1, 1)
    pool.start([Start(again[0], A0), Start(again[1], A1)], 1)
    await pool.store_turns()
    await asyncio.sleep(0.01)
    assert (other.about, other.turns, keeper.stored) == ([], [], [A1, A0])
    pool.forget([A1])
    pool.abandon([again[1]], lambda attempt: True)
    await asyncio.sleep(0.01)
    assert keeper.turns == [A0, again[1]], "a draft"
    pool._give_up(keeper, asyncio.TimeoutError())
    assert pool.lost == [([again[0], *others], [A0, again[1]])], "what it ran, and what it kept"
    pool.start([Start(Attempt("a", 0, 2), A0)], 1)
    await asyncio.sleep(0.01)
    assert other.about == [Attempt("a", 0, 2)]
