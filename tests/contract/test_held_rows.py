"""Stages of a part by verl's workers and real TransferQueue: what they are given, and what they fetch for it."""

from types import SimpleNamespace

import pytest
import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.engine_workers import ActorRolloutRefWorker

from verl_rhyme.observability import metrics as names
from verl_rhyme.trainer.fetching import Fetching
from verl_rhyme.workers.actor import streamed
from verl_rhyme.workers.stored_attempts import TRAIN

P, R = 100, 800
KEYS = ["a_0_0_0", "a_1_0_0"]


def stored():
    """Rows as verl's agent loops store them."""
    ids = torch.arange(P + R)
    fields = {
        "prompts": ids[:P],
        "responses": ids[P:],
        "input_ids": ids,
        "position_ids": ids,
        "response_mask": torch.ones(R, dtype=torch.int64),
        "loss_mask": torch.ones(R, dtype=torch.int64),
        "rm_scores": torch.zeros(R),
        "rollout_log_probs": torch.zeros(R),
        "uid": "a",
        "multi_modal_inputs": {},
        "extra_fields": {"turns": 1},
    }
    return list_of_dict_to_tensordict([dict(fields), dict(fields)])


def made(**columns):
    """The same in both rows, as stages write it."""
    rows = {name: torch.nested.as_nested_tensor([row] * 2, layout=torch.jagged) for name, row in columns.items()}
    return TensorDict(rows, batch_size=2)


class Theirs(ActorRolloutRefWorker):
    """What it is given, and what it answers as verl's does: log-probabilities of whole sequences."""

    def query_collect_info(self, mesh):
        return True

    def compute_log_prob(self, data):
        self.given.append({key: data.get(key) for key in data.keys()})  # noqa: SIM118
        return made(log_probs=torch.ones(P + R), entropy=torch.ones(P + R))

    compute_ref_log_prob = compute_log_prob

    def update_actor(self, data):
        self.given.append({key: data.get(key) for key in data.keys()})  # noqa: SIM118


@pytest.mark.slow
@pytest.mark.parametrize("holds", [True, False])
def test_a_part_is_fetched_once(holds):
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    try:
        tq.init()
        tq.kv_batch_put(keys=KEYS, partition_id=TRAIN, fields=stored(), tags=[{}, {}])
        worker = object.__new__(streamed(Theirs))
        worker.given = []
        workers = SimpleNamespace(
            fetched_bytes=lambda: [worker.fetched_bytes()], _dispatch_info={"actor": [0], "ref": [0]}
        )
        trainer = SimpleNamespace(actor_rollout_wg=workers, ref_policy_wg=workers, ref_in_actor=False, mapping={})
        fetching = Fetching(trainer, holds)
        fetching.begin()
        batch = KVBatchMeta(partition_id=TRAIN, keys=KEYS, tags=[{}, {}])
        with fetching.stage(batch):
            worker.compute_log_prob(batch)
        batch = tq.kv_batch_put(
            keys=KEYS, partition_id=TRAIN, fields=made(old_log_probs=torch.zeros(R), entropy=torch.zeros(R))
        )
        with fetching.reference(batch):
            worker.compute_ref_log_prob(batch)
        ones, masked = torch.ones(R), torch.zeros(R, dtype=torch.int64)
        late = made(ref_log_prob=ones, advantages=ones, returns=ones, response_mask=masked)
        batch = tq.kv_batch_put(keys=KEYS, partition_id=TRAIN, fields=late)
        with fetching.stage(batch, new=True):
            worker.update_actor(batch)

        first, reference, update = worker.given
        assert set(first) >= set(stored().keys())
        assert set(reference) >= set(first)
        assert set(update) >= {*first, "old_log_probs", "ref_log_prob", "advantages", "log_probs"}
        for given in worker.given:
            assert given["input_ids"].values().tolist() == 2 * list(range(P + R))
            assert len(given["multi_modal_inputs"]) == 2
        assert update["response_mask"].values().sum() == 0, "it was written anew"
        if holds:
            counts = fetching.metrics()
            fetched, reused = (counts[name] / 2 for name in (names.STREAM_FETCHED, names.STREAM_REUSED))
            offsets = 8 * 3 / 2 * 30  # of nested tensors, a few bytes a row
            assert 28 * P + 80 * R <= fetched <= 28 * P + 80 * R + offsets
            assert 48 * P + 88 * R <= reused <= 48 * P + 88 * R + offsets
    finally:
        tq.close()
        ray.shutdown()
