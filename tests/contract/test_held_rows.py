"""Stages of a part with real TransferQueue, without Ray: what they are given, and what they fetch for it."""

from types import SimpleNamespace

import pytest
import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.engine_workers import ActorRolloutRefWorker

from verl_rhyme.actor import actor as actor_module
from verl_rhyme.actor.actor import streamed
from verl_rhyme.actor.held_rows import JOIN, KEEP, HeldRows
from verl_rhyme.agent_loop.stored_attempts import TRAIN
from verl_rhyme.trainer.fetching import Fetching

P, R = 100, 800
KEYS = ["a_0_0_0", "a_1_0_0"]


def stored():
    """Rows as verl's agent loops store them, told apart by their first token."""
    rows = []
    for number in range(len(KEYS)):
        ids = torch.arange(number, number + P + R)
        rows.append(
            {
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
        )
    return list_of_dict_to_tensordict(rows)


def made(rows=2, **columns):
    """The same in all rows, as stages write it."""
    nested = {name: torch.nested.as_nested_tensor([row] * rows, layout=torch.jagged) for name, row in columns.items()}
    return TensorDict(nested, batch_size=rows)


class Theirs(ActorRolloutRefWorker):
    """What it is given, and what it answers as verl's does: log-probabilities of whole sequences."""

    def query_collect_info(self, mesh):
        return True

    def _see(self, data):
        self.given.append({name: data.get(name) for name in data.keys()})  # noqa: SIM118

    def compute_log_prob(self, data):
        self._see(data)
        return made(log_probs=torch.ones(P + R), entropy=torch.ones(P + R))

    def compute_ref_log_prob(self, data):
        self._see(data)
        return made(log_probs=torch.ones(P + R))

    def update_actor(self, data):
        self._see(data)


class Watched(HeldRows):
    """Rows of a process, with the fields that each stage fetched."""

    def __init__(self):
        super().__init__()
        self.fetched = []

    def join(self, data):
        self.fetched.append(set(data.keys()) - {KEEP, JOIN})
        return super().join(data)


@pytest.mark.parametrize("holds", [True, False])
def test_a_part_is_fetched_once(queue, holds, monkeypatch):
    monkeypatch.setattr(actor_module, "ROWS", held := Watched())
    tq.kv_batch_put(keys=KEYS, partition_id=TRAIN, fields=stored(), tags=[{}, {}])
    actor, reference = (object.__new__(streamed(Theirs)) for _ in range(2))  # of one process, as verl makes them
    actor.given = reference.given = given = []
    workers = SimpleNamespace(_dispatch_info={"actor": [0], "ref": [0]})
    trainer = SimpleNamespace(actor_rollout_wg=workers, ref_policy_wg=workers, ref_in_actor=False, mapping={})
    fetching = Fetching(trainer, holds)
    fetching.begin_part()
    batch = KVBatchMeta(partition_id=TRAIN, keys=KEYS, tags=[{}, {}])
    with fetching.stage(batch):
        assert len(actor.compute_log_prob(batch)) == len(KEYS)
    old = made(old_log_probs=torch.zeros(R), entropy=torch.zeros(R))
    batch = tq.kv_batch_put(keys=KEYS, partition_id=TRAIN, fields=old)
    with fetching.reference_stage(batch):
        assert len(reference.compute_ref_log_prob(batch)) == len(KEYS)
    ones, masked = torch.ones(R), torch.zeros(R, dtype=torch.int64)
    late = made(ref_log_prob=ones, advantages=ones, returns=ones, response_mask=masked)
    batch = tq.kv_batch_put(keys=KEYS, partition_id=TRAIN, fields=late)
    with fetching.stage(batch, new=True):
        actor.update_actor(batch)

    rows = set(stored().keys())
    for stage in given:
        assert set(stage) >= rows
        assert [row[0].item() for row in stage["input_ids"].unbind()] == [0, 1]
        assert len(stage["multi_modal_inputs"]) == len(KEYS)
    assert set(given[-1]) >= {"old_log_probs", "ref_log_prob", "advantages", "log_probs"}
    masks = [stage["response_mask"].values().sum().item() for stage in given]
    assert masks == [2 * R, 2 * R, 0], "the mask was written anew"
    again = [fields & rows for fields in held.fetched[1:]]
    assert again == ([{"uid"}, {"uid", "response_mask"}] if holds else [rows, rows])
    if holds:
        actor.drop_update()
        with pytest.raises(RuntimeError, match="part None are kept"), fetching.stage(batch):
            actor.compute_log_prob(batch)
