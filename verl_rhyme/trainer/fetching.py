"""Fields that the stages of a part fetch from TransferQueue: all once, then only new ones (``actor/held_rows.py``)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import Role

from verl_rhyme.actor.held_rows import JOIN, KEEP

#: Field that a stage requests if it needs nothing new: there is no empty answer.
SMALL = "uid"
#: Field that stages overwrite (``rollout_correction``).
REWRITTEN = "response_mask"


class Fetching:
    """Selects the fields of one part after another; ``holds``: the workers keep rows (``StreamedActor``)."""

    def __init__(self, trainer: Any, holds: bool) -> None:
        self._trainer, self.holds = trainer, holds
        self._part = 0
        self._had: frozenset[str] | None = None

    def begin_part(self) -> None:
        self._part += 1
        self._had = None

    @contextlib.contextmanager
    def stage(self, batch: KVBatchMeta, new: bool = False) -> Iterator[None]:
        """Wrap one stage of the part on the actor's workers; ``new``: it needs results of earlier stages. The part has
        the same order in all stages."""
        if not self.holds:
            yield
            return
        fields = frozenset(tq.get_client().kv_retrieve_meta(batch.keys, batch.partition_id).field_names)
        if self._had is None:
            self._had, mark, batch.fields = fields, KEEP, None
            batch.extra_info[KEEP] = {"part": self._part, "fields": sorted(fields)}
        else:
            mark = JOIN
            batch.extra_info[JOIN] = self._part
            batch.fields = sorted({SMALL} | ((fields - self._had) | {REWRITTEN} if new else set()))
        try:
            yield
        finally:
            del batch.extra_info[mark]
            batch.fields = None

    def reference_stage(self, batch: KVBatchMeta) -> contextlib.AbstractContextManager[None]:
        """Wrap the reference's stage: it reuses the actor's rows if both share processes and data parallel ranks."""
        return self.stage(batch) if self._shares_rows() else contextlib.nullcontext()

    def _shares_rows(self) -> bool:
        trainer = self._trainer
        if trainer.ref_in_actor:
            return True
        actor, reference = trainer.actor_rollout_wg, trainer.ref_policy_wg
        pools = [trainer.mapping.get(role) for role in (Role.Actor, Role.RefPolicy)]
        if reference is not actor and pools[0] != pools[1]:
            return False
        return data_parallel_ranks(actor, "actor") == data_parallel_ranks(reference, "ref")


def data_parallel_ranks(workers: Any, mesh: str) -> list[int]:
    if mesh not in workers._dispatch_info:
        workers._dispatch_info[mesh] = workers._query_dispatch_info(mesh)
    return list(workers._dispatch_info[mesh])
