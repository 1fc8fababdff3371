"""Stages of a part, by a worker group of verl's and real TransferQueue: what they are given, and what they fetch."""

from types import SimpleNamespace

import pytest
import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
)
from verl.trainer.ppo.utils import Role
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.engine_workers import ActorRolloutRefWorker

from verl_rhyme.observability import metrics as names
from verl_rhyme.trainer.fetching import Fetching
from verl_rhyme.workers.actor import streamed
from verl_rhyme.workers.stored_attempts import TRAIN

P, R, RANKS = 100, 800, 2
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


def workers():
    """Actor and reference as verl makes them where engines are apart: two workers in each of the processes."""

    class Theirs(ActorRolloutRefWorker):
        def __init__(self, role):
            Worker.__init__(self)
            self._register_dispatch_collect_info(role, self.rank, is_collect=True)
            self.actor, self.given = None, []

        def _see(self, data):
            columns = {name: data.get(name) for name in data.keys()}  # noqa: SIM118
            first = columns["input_ids"].values()[0].item()
            images = len(columns["multi_modal_inputs"])
            self.given.append((set(columns), first, columns["response_mask"].values().sum().item(), images))

        def compute_log_prob(self, data):
            self._see(data)
            return made(len(data), log_probs=torch.ones(P + R), entropy=torch.ones(P + R))

        compute_ref_log_prob = compute_log_prob

        def update_actor(self, data):
            self._see(data)
            return TensorDict({}, batch_size=[])

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def told(self):
            return self.given

    ours = ray.remote(streamed(Theirs))
    classes = {role: RayClassWithInitArgs(cls=ours, role=role) for role in ("actor", "ref")}
    pool = RayResourcePool(process_on_nodes=[RANKS], use_gpu=False, max_colocate_count=1)
    group = RayWorkerGroup(
        resource_pool=pool, ray_cls_with_init=create_colocated_worker_cls(classes), device_name="cpu"
    )
    return group.spawn(prefix_set=classes.keys())


@pytest.mark.slow
@pytest.mark.parametrize("holds", [True, False])
def test_a_part_is_fetched_once(holds):
    ray.init(num_cpus=12, include_dashboard=False, log_to_driver=False)  # the queue takes some
    try:
        tq.init()
        tq.kv_batch_put(keys=KEYS, partition_id=TRAIN, fields=stored(), tags=[{}, {}])
        made_of = workers()
        actor, reference = made_of["actor"], made_of["ref"]
        trainer = SimpleNamespace(
            actor_rollout_wg=actor,
            ref_policy_wg=reference,
            ref_in_actor=False,
            mapping={Role.Actor: "global_pool", Role.RefPolicy: "global_pool"},
        )
        assert actor.why_updates_wait() == [None] * RANKS
        fetching = Fetching(trainer, holds)
        fetching.begin()
        batch = KVBatchMeta(partition_id=TRAIN, keys=KEYS, tags=[{}, {}])
        with fetching.stage(batch):
            assert len(actor.compute_log_prob(batch)) == len(KEYS)
        old = made(old_log_probs=torch.zeros(R), entropy=torch.zeros(R))
        batch = tq.kv_batch_put(keys=KEYS, partition_id=TRAIN, fields=old)
        with fetching.reference(batch):
            assert len(reference.compute_ref_log_prob(batch)) == len(KEYS)
        ones, masked = torch.ones(R), torch.zeros(R, dtype=torch.int64)
        late = made(ref_log_prob=ones, advantages=ones, returns=ones, response_mask=masked)
        batch = tq.kv_batch_put(keys=KEYS, partition_id=TRAIN, fields=late)
        with fetching.stage(batch, new=True):
            actor.update_actor(batch)

        rows = set(stored().keys())
        for rank, (of_actor, of_reference) in enumerate(zip(actor.told(), reference.told(), strict=True)):
            (first, update), (ref,) = of_actor, of_reference
            for fields, token, _, images in (first, ref, update):
                assert (fields >= rows, token, images) == (True, rank, 1), "each rank has its own rows, whole"
            assert update[0] >= {"old_log_probs", "ref_log_prob", "advantages", "log_probs"}
            assert [mask for _, _, mask, _ in (first, ref, update)] == [R, R, 0], "the mask was written anew"
        if holds:
            counts = fetching.metrics()
            fetched, reused = (counts[name] / len(KEYS) for name in (names.STREAM_FETCHED, names.STREAM_REUSED))
            offsets = 16 * 30  # of nested tensors, two numbers a field
            assert 28 * P + 80 * R <= fetched <= 28 * P + 80 * R + offsets
            assert 48 * P + 88 * R <= reused <= 48 * P + 88 * R + offsets
    finally:
        tq.close()
        ray.shutdown()
