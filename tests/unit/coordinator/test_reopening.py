"""A coordinator that is opened again while it is being opened, or gets other workers."""

import asyncio
from types import SimpleNamespace
from typing import ClassVar

import pytest

from verl_rhyme.agent_loop import stored_attempts
from verl_rhyme.agent_loop.session import PROMPTS
from verl_rhyme.coordinator import cleanup as cleanups
from verl_rhyme.coordinator import coordinator
from verl_rhyme.coordinator.coordinator import Coordinator
from verl_rhyme.processes.messages import NotOpen, ResumeState


class WorkerPool:
    """While the coordinator waits for its workers it is opened again."""

    made: ClassVar[list] = []

    def __init__(self, me, patience_s, lost):
        self.closed = False
        self.made.append(self)

    async def join(self, workers, limit_s=None):
        workers[0]._openings += 1
        return {}, []

    def close(self):
        self.closed = True

    def watch(self):
        pass


@pytest.fixture
def opened(monkeypatch):
    async def listing():
        return {}

    monkeypatch.setattr(coordinator, "tq", SimpleNamespace(async_kv_list=listing))
    monkeypatch.setattr(
        coordinator, "ray", SimpleNamespace(get_runtime_context=lambda: SimpleNamespace(current_actor=None))
    )
    monkeypatch.setattr(coordinator, "WorkerPool", WorkerPool)
    monkeypatch.setattr(WorkerPool, "made", [])
    for name in ("Rollout", "Expectations"):
        made = SimpleNamespace(scheduler=SimpleNamespace(), prompt_tokens=None)
        monkeypatch.setattr(coordinator, name, lambda *_, made=made: made)
    return Coordinator()


SETTING = SimpleNamespace(
    rules=None, filters=None, response_limit=1, lost_after=1.0, outage_s=900.0, placement=None, cost=None
)


@pytest.mark.parametrize("call", ["open", "add_workers"])
async def test_pool_of_an_outdated_call_is_closed(opened, call):
    arguments = {"open": (SETTING, [opened], ResumeState(None, [], 0, 1, 1), False), "add_workers": ([opened],)}
    before = SimpleNamespace(close=lambda: None)
    opened._opened = SimpleNamespace(setting=SETTING, pool=before, migrations=before)
    with pytest.raises(NotOpen):
        await getattr(opened, call)(*arguments[call])
    [pool] = WorkerPool.made
    assert pool.closed
    assert opened._opened is None or opened._opened.pool is before


async def test_no_entry_is_deleted_while_turns_are_stored(opened, monkeypatch):
    """TransferQueue gives the place of a deleted entry to another one, into which the turns would be written."""
    events = []

    async def clear(keys, partition_id):
        events.append("cleared")

    async def store_turns():
        events.append("storing")
        cleanup.clear(rollout, {PROMPTS: ["a"]}, set())
        await asyncio.sleep(0.05)
        events.append("stored")

    monkeypatch.setattr(stored_attempts.tq, "async_kv_clear", clear)
    opened._cleanup = cleanup = cleanups.Cleanup(opened._queue_lock)
    rollout = SimpleNamespace(state_dict=dict, content=SimpleNamespace(needs_prompt=lambda uid: False))
    opened._opened = SimpleNamespace(pool=SimpleNamespace(store_turns=store_turns), rollout=rollout)
    opened._capacity, opened._expectations = (
        SimpleNamespace(state={}),
        SimpleNamespace(prompt_state={}, pop_changes=dict),
    )
    await opened.state()
    await cleanup._clearing
    assert events == ["storing", "stored", "cleared"]


@pytest.mark.parametrize(
    "question", [("publish", 1, 1), ("wait_for_batch", False, True), ("take_batch",)], ids=lambda q: q[0]
)
async def test_outdated_call_does_not_change_the_new_rollout(opened, question):
    """The caller lost its connection and opened the coordinator again: a late answer could clear a trained batch."""

    async def refresh():
        opened._openings += 1

    def settled(_):
        opened._openings += 1
        return opened._openings > 1

    done = []
    rollout = SimpleNamespace(
        scheduler=SimpleNamespace(has_settled=settled, ledger=SimpleNamespace(samples=lambda state: ())),
        publish=lambda *_: done.append("published"),
        abandon_running=lambda: done.append("taken"),
    )
    opened._opened = SimpleNamespace(
        setting=SETTING, rollout=rollout, migrations=SimpleNamespace(refresh_replicas=refresh)
    )
    opened._cleanup = SimpleNamespace(delete_remembered=lambda _: None)
    with pytest.raises(NotOpen):
        await getattr(opened, question[0])(*question[1:])
    assert (done, opened._dispatching) == ([], False)
