"""Requests of TransferQueue that fail are repeated, with the real queue: ours and verl's."""

from types import SimpleNamespace

import pytest
import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from transfer_queue.client import AsyncTransferQueueClient
from verl.utils import transferqueue_utils

from verl_rhyme.agent_loop import worker as workers
from verl_rhyme.agent_loop.stored_attempts import _fetch
from verl_rhyme.processes import queue as module
from verl_rhyme.processes import waiting


class Flaky:
    """A request whose first call of each type fails."""

    def __init__(self, request):
        self.request, self.types = request, set()

    async def __call__(self, *args, request_type=None, **kwargs):
        if request_type not in self.types:
            self.types.add(request_type)
            raise RuntimeError("no answer")
        named = {} if request_type is None else {"request_type": request_type}
        return await self.request(*args, **named, **kwargs)


@pytest.fixture
def flaky(queue, monkeypatch):
    """The controller and the storage, where each type of request fails once."""
    client = tq.get_client()
    asked = [Flaky(client._request_controller)]
    monkeypatch.setattr(client, "_request_controller", asked[0])
    for name in ("put_data", "get_data", "clear_data"):
        asked.append(Flaky(getattr(client.storage_manager, name)))
        monkeypatch.setattr(client.storage_manager, name, asked[-1])
    monkeypatch.setattr(waiting, "RETRIES_S", (0.001,) * 4)  # a deletion has three requests
    return asked


def rows(**columns):
    return TensorDict({name: torch.tensor(column) for name, column in columns.items()}, batch_size=2)


def use_all():
    """Calls as verl's trainer and training workers make them."""
    tq.kv_batch_put(keys=["a", "b"], partition_id="p", fields=rows(x=[[1], [2]]), tags=[{"n": 1}, {"n": 2}])
    assert tq.kv_list() == {"p": {"a": {"n": 1}, "b": {"n": 2}}}
    assert tq.get_client().kv_retrieve_meta(["a"], "p").field_names == ["x"]

    class Worker:
        @transferqueue_utils.tqbridge()
        def double(self, data):
            return TensorDict({"y": 2 * data["x"]}, batch_size=2)

    done = Worker().double(KVBatchMeta(keys=["a", "b"], partition_id="p", tags=[{}, {}], fields=["x"]))
    data = tq.kv_batch_get(keys=done.keys, partition_id="p")
    assert [int(row) for row in data["y"].unbind()] == [2, 4]
    tq.kv_clear(keys=["a"], partition_id="p")
    assert [*tq.kv_list()["p"]] == ["b"]


def test_calls_of_trainer_and_training_workers(flaky):
    module.join()
    module.join()
    use_all()
    assert [len(request.types) for request in flaky] == [6, 1, 1, 1]


def test_without_it_a_failed_request_ends_the_call(flaky):
    with pytest.raises(RuntimeError, match="no answer"):
        use_all()


def test_all_requests_of_the_client_are_known():
    """A new one of TransferQueue must be repeated, or not, by decision: these change more than they may twice.
    ``async_clear_samples`` is repeated with its caller (``kv_clear``), which looks its keys up again."""
    named = {name for name in dir(AsyncTransferQueueClient) if name.startswith("async_")}
    unused = {
        *("async_get_meta", "async_clear_partition", "async_get_partition_list", "async_reset_consumption"),
        "async_clear_samples",
        *("async_get_consumption_status", "async_get_production_status", "async_load_controller_checkpoint"),
        *("async_check_consumption_status", "async_check_production_status", "async_load_storage_checkpoint"),
    }
    assert named - unused == set(module._REQUESTS)


@pytest.mark.parametrize("partition", ["p", "q"])
async def test_a_repeated_deletion_spares_the_next_owner_of_the_place(queue, monkeypatch, partition):
    """The queue deletes a sample, its answer is lost, and a new sample gets the place before the next try."""
    module.join()
    client, deleted = tq.get_client(), []
    delete = client._clear_meta_in_controller

    async def first_answer_lost(metadata):
        await delete(metadata)
        deleted.extend(metadata.global_indexes)
        if len(deleted) == 1:
            await tq.async_kv_batch_put(keys=["new"], partition_id=partition, fields=rows(x=[[1], [2]])[1:])
            raise RuntimeError("no answer")

    monkeypatch.setattr(client, "_clear_meta_in_controller", first_answer_lost)
    monkeypatch.setattr(waiting, "RETRIES_S", (0.001,))
    await tq.async_kv_batch_put(keys=["old", "other"], partition_id="p", fields=rows(x=[[3], [4]]))
    await tq.async_kv_clear(keys=["old"], partition_id="p")
    assert (await client.async_kv_retrieve_meta(["new"], partition)).global_indexes == deleted
    assert int((await tq.async_kv_batch_get(keys=["new"], partition_id=partition))["x"][0]) == 2
    assert "old" not in (await tq.async_kv_list())["p"]


async def test_missing_data_are_no_transient_error(flaky, caplog):
    module.join()
    await tq.async_kv_batch_put(keys=["a", "b"], partition_id="p", fields=rows(x=[[1], [2]]))
    caplog.clear()
    with pytest.raises(ValueError, match="not found"):
        await tq.async_kv_batch_get(keys=["c"], partition_id="p")
    assert "trying again" not in caplog.text
    assert await _fetch(["a", "c"], "p", ["x"]) == {"a": (torch.tensor([1]),)}


@pytest.mark.parametrize("validate", [True, False])
async def test_prompts_of_verls_agent_loop_do_not_stay_pending(flaky, validate):
    """Neither if their status cannot be stored at once: the trainer would wait for ever."""
    module.join()
    worker = object.__new__(workers._AgentLoopWorker)
    rollout = SimpleNamespace(n=2, val_kwargs=SimpleNamespace(n=2))
    worker.config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
    ran = []

    async def run(*_, session_id, **__):
        ran.append(session_id)

    worker._run_agent_loop = run
    await worker._run_prompt({"uid": "a"}, {}, {"validate": validate})
    assert ran == [0, 1]
    assert await tq.async_kv_list() == {"val" if validate else "train": {"a": {"status": "finished"}}}
