"""Runs the stages of an update batch, for each part as its groups finish, or for the whole batch.

A stage of verl's step (old log-probs, reference, advantages, gradients) runs here once for each part, while the rest of
the batch is generated (StreamRL, arXiv:2504.15930, section 4.1). Parts only do work early: if the batch turns out
differently, their gradients are dropped, and the whole batch runs through. Without streaming, a batch is one part. With
several mini-batches or epochs per training step, or estimators that compare trajectories of the whole batch
(:mod:`verl_rhyme.checks.streaming`), gradients wait for the whole batch; the stages before are still streamed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.v1.utils import MetricsAggregator
from verl.utils.debug import marked_timer
from verl.utils.metric.utils import reduce_metrics
from verl.utils.py_functional import rename_dict

from verl_rhyme.actor.actor import PART
from verl_rhyme.actor.streamed_update import BY_TOKENS
from verl_rhyme.agent_loop.stored_attempts import TRAIN
from verl_rhyme.checks.streaming import find_unsupported_option
from verl_rhyme.observability import metrics as names
from verl_rhyme.processes.messages import Part
from verl_rhyme.scheduling.training_order import arrange

logger = logging.getLogger(__name__)

_UPDATES_WAIT = "gradients wait for the whole batch (%s); the stages before them are streamed"


class Stages:
    """Runs the stages of update batches of a trainer: part by part with ``streams``, else each batch whole."""

    def __init__(self, trainer: Any, streams: bool) -> None:
        self._trainer, self._streams = trainer, streams
        why = find_unsupported_option(trainer.config) if streams else None
        if why is not None:
            logger.warning(_UPDATES_WAIT, why)
        self.updates = streams and why is None  # else the trainer goes on with the whole batch's advantages
        self._begin()

    def check_workers(self) -> None:
        """Check the engine's restrictions, once it exists and before the first part."""
        if self.updates:
            why = next(filter(None, self._trainer.actor_rollout_wg.find_unsupported_feature()), None)
            if why is not None:
                self._stop_updates(why)

    def _stop_updates(self, why: str) -> None:
        self._trainer.actor_rollout_wg.drop_update()
        self.updates = False
        logger.warning(_UPDATES_WAIT, why)

    def _begin(self) -> None:
        self._done: set[str] = set()
        self._batches: list[KVBatchMeta] = []
        self._padding: list[str] = []  # keys of verl's padding in them
        self._metrics = MetricsAggregator()

    def run_part(self, part: Part) -> None:
        """Run a part of the next batch; trajectories that have run are skipped."""
        self._run(*part)

    def finish(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """Run the remaining trajectories of the collected batch, take the training step, and add the metrics. Return
        the trained batch, with verl's padding."""
        early, size = len(self._done), len(batch.keys)
        # Only rows that have run the stages may pad the mini-batches: those of parts, or of a last one.
        lacks_padding = self._done >= set(batch.keys) and self._missing_padding(size) > 0
        if lacks_padding or not self._done <= set(batch.keys):
            logger.warning("the update batch differs from its parts; all its stages run again")
            if self.updates:
                self._trainer.actor_rollout_wg.drop_update()
            _clear(self._padding)
            self._begin()
            early = 0
        self._run(batch.keys, batch.tags, size)
        # Further padding, of parts for their ranks, would be further mini-batches.
        surplus = {*self._padding[len(self._padding) + self._missing_padding(size) :]}
        _clear([*surplus])
        rows = [row for each in self._batches for row in zip(each.keys, each.tags, strict=True)]
        keys, tags = zip(*(row for row in rows if row[0] not in surplus), strict=True)
        whole = KVBatchMeta(partition_id=TRAIN, keys=list(keys), tags=list(tags))
        metrics.update(self._metrics.get_aggregated_metrics())
        if self._streams:
            metrics[names.EARLY_SHARE] = early / max(1, size)
            metrics[names.PARTS] = len(self._batches)
        if self.updates:
            with marked_timer("update_actor", self._trainer.timing_raw, color="red"):
                trained = next(each for each in self._trainer.actor_rollout_wg.finish_update() if each is not None)
            trained = rename_dict(trained, "actor/")
            trained["perf/mfu/actor"] = trained.pop("actor/mfu")
            metrics.update(reduce_metrics(trained))
        self._begin()
        return whole

    def _run(self, keys: Sequence[str], tags: Sequence[dict[str, Any]], size: int | None = None) -> None:
        """Run all stages that need only these trajectories, except trajectories that have run. ``size``: they are the
        last ones of a batch of so many."""
        rows = [(key, tag) for key, tag in zip(keys, tags, strict=True) if key not in self._done]
        if not rows:
            return
        trainer, timing = self._trainer, self._trainer.timing_raw
        actor, rollout = trainer.config.actor_rollout_ref.actor, trainer.config.actor_rollout_ref.rollout
        mini_batch = actor.ppo_mini_batch_size * rollout.n
        if self.updates and len(self._done) + len(rows) > mini_batch:
            self._stop_updates(f"there are more trajectories than the {mini_batch} of a mini-batch")
        metrics: dict[str, Any] = {}
        of_tokens: dict[str, Any] = {}
        keys, tags = (list(column) for column in zip(*rows, strict=True))
        batch = KVBatchMeta(partition_id=TRAIN, keys=keys, tags=tags)
        batch.extra_info["temperature"] = rollout.temperature
        batch = self._pad_and_balance(batch, size)
        with marked_timer("old_log_prob", timing, color="blue"):
            batch = trainer._compute_old_log_prob(batch, metrics=of_tokens)
        trainer.load_prompts()
        if trainer.use_reference_policy:
            with marked_timer("ref", timing, color="olive"):
                batch = trainer._compute_ref_log_prob(batch, metrics=metrics)
            trainer.load_prompts()
        if self.updates:
            with marked_timer("adv", timing, color="brown"):
                batch = trainer._compute_advantage(batch, metrics=metrics)
            with marked_timer("update_actor", timing, color="red"):
                batch.extra_info[PART] = True
                trainer._update_actor(batch, metrics={})
                del batch.extra_info[PART]
        # The entropy is a mean by loss_agg_mode; the other metrics of old log-probs are means over the policy's tokens.
        if actor.loss_agg_mode != BY_TOKENS and names.VERL_ENTROPY in of_tokens:
            metrics[names.VERL_ENTROPY] = of_tokens.pop(names.VERL_ENTROPY)
        self._metrics.add_step_metrics(metrics, sample_count=len(rows))
        if weight := _policy_tokens(keys) if self._streams else 1:  # a part without one has NaN
            self._metrics.add_step_metrics(of_tokens, sample_count=weight)
        self._done |= set(keys)
        self._batches.append(batch)
        self._padding += [key for key, tag in zip(batch.keys, batch.tags, strict=True) if tag.get("is_padding", False)]

    def _missing_padding(self, size: int) -> int:
        """Return the padding that verl's mini-batches still need for a batch of ``size``; below 0: the surplus."""
        if self.updates:
            return 0
        return -size % self._trainer._get_required_batch_multiple(self._trainer.actor_ranks) - len(self._padding)

    def _pad_and_balance(self, batch: KVBatchMeta, size: int | None) -> KVBatchMeta:
        """Pad the batch to a multiple for ranks and micro-batches, the last part with what mini-batches need too;
        spread long and short trajectories over the ranks."""
        trainer = self._trainer
        ranks = trainer.actor_ranks
        config = trainer.config.actor_rollout_ref
        multiple = ranks * _in_turn(config) * math.lcm(*_micro_batches(config, trainer.use_reference_policy))
        rows = len(batch.keys) + max(0, 0 if size is None else self._missing_padding(size))
        batch = upsample_batch_to_divisible_size(batch, -(-rows // multiple) * multiple, trainer.tokenizer.eos_token_id)
        tokens = np.array([tag["seq_len"] for tag in batch.tags])
        batch.reorder(arrange(np.argsort(tokens, kind="stable"), tokens, ranks, len(tokens)).tolist())
        return batch


def _policy_tokens(keys: list[str]) -> int:
    """Return the tokens that the policy generated; verl's ``response_len`` has the answers of tools, too."""
    data = tq.kv_batch_get(keys=keys, partition_id=TRAIN, select_fields=["response_mask"])
    return sum(int(mask.sum()) for mask in data["response_mask"].unbind())


def _clear(keys: list[str]) -> None:
    if keys:
        tq.kv_clear(keys=keys, partition_id=TRAIN)


def _micro_batches(config: Any, reference: bool) -> Iterator[int]:
    """Yield the fixed micro-batch sizes by which verl's engines divide a part."""
    yield 1
    if not config.actor.use_dynamic_bsz:
        yield int(config.actor.ppo_micro_batch_size_per_gpu)
    for of in (config.rollout, config.ref) if reference else (config.rollout,):
        if not of.log_prob_use_dynamic_bsz:
            yield int(of.log_prob_micro_batch_size_per_gpu or 1)  # null: a reference within the actor (LoRA)


def _in_turn(config: Any) -> int:
    """Return the micro-batches that Megatron's interleaved pipeline runs in turns; a call needs a multiple of them."""
    engine = config.actor.get("megatron") or {}
    if (engine.get("virtual_pipeline_model_parallel_size") or 1) == 1:
        return 1
    own = (engine.get("override_transformer_config") or {}).get("microbatch_group_size_per_vp_stage")
    return int(own or engine["pipeline_model_parallel_size"])
