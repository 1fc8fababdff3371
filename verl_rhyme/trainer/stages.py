"""The stages of an update batch, for parts of it as their groups finish, or for all of it.

What is a stage for the whole batch in verl's step (old log-probabilities, reference, advantages, gradients) is here one
for each part, while the rest is generated (StreamRL, arXiv:2504.15930, section 4.1). A part is work done early, and no
more than that: if the batch turns out to be another, what was added up is dropped, and the batch goes through whole.
Where nothing is streamed, a batch is one part.

Where an update has several mini-batches, or several epochs, gradients wait until all is there, and so they do for
estimators that compare trajectories of the whole batch (:func:`why_updates_wait`); what comes before them streams.
"""

from __future__ import annotations

import contextlib
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
from verl_rhyme.observability import metrics as names
from verl_rhyme.processes.messages import Part
from verl_rhyme.scheduling.training_order import arrange
from verl_rhyme.trainer.fetching import Fetching

logger = logging.getLogger(__name__)

#: ``algorithm.adv_estimator`` that compare no trajectories but those of one prompt.
GROUP_ESTIMATORS = (
    "grpo",
    "grpo_vectorized",
    "grpo_passk",
    "rloo",
    "rloo_vectorized",
    "opo",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
)
#: ``policy_loss.loss_mode`` that are sums over tokens, divided as ``loss_agg_mode`` says. Others: ``sapo`` and
#: ``geo_mean`` divide by sequences, whatever it says; ``clip_cov`` and ``kl_cov`` rank the tokens of a micro-batch.
STREAMED_LOSSES = ("vanilla", "dppo_tv", "dppo_kl", "gspo", "gpg", "dro", "cispo")


def why_updates_wait(config: Any) -> str | None:
    """What of verl's config keeps gradients until the whole batch is there; ``None``: they are streamed."""
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    loss = actor.policy_loss.get("loss_mode", "vanilla")
    correction = algorithm.get("rollout_correction") or {}
    adaptive = algorithm.use_kl_in_reward and algorithm.kl_ctrl.type == "adaptive"
    for waits, why in (
        (algorithm.adv_estimator not in GROUP_ESTIMATORS, f"algorithm.adv_estimator={algorithm.adv_estimator}"),
        (adaptive, "algorithm.kl_ctrl.type=adaptive"),
        (bool(correction.get("rollout_is_batch_normalize")), "rollout_correction.rollout_is_batch_normalize=true"),
        (actor.ppo_mini_batch_size != config.data.train_batch_size, "several mini-batches in an update"),
        (actor.ppo_epochs != 1, f"actor.ppo_epochs={actor.ppo_epochs}"),
        (bool(actor.shuffle), "actor.shuffle=true"),
        (config.trainer.critic_warmup > 0, f"trainer.critic_warmup={config.trainer.critic_warmup}"),
        (bool(config.critic.enable), "critic.enable=true"),  # its update is one of whole batches
        # verl divides by the width of a micro-batch then
        (
            actor.loss_agg_mode == "seq-mean-token-sum-norm" and actor.loss_scale_factor is None,
            "actor.loss_agg_mode=seq-mean-token-sum-norm without actor.loss_scale_factor",
        ),
        (loss not in STREAMED_LOSSES, f"actor.policy_loss.loss_mode={loss}"),
        (bool((config.get("distillation") or {}).get("enabled")), "distillation"),
    ):
        if waits:
            return why
    return None


class Stages:
    """The stages of one update batch after another, each for a part of it.

    Args:
        trainer: The pipeline.
        streams: Parts come while the rest is generated; else a batch comes whole.

    Attributes:
        updates: Gradients are streamed, too; else the trainer takes the batch from the advantages on.
    """

    def __init__(self, trainer: Any, streams: bool) -> None:
        self._trainer, self._streams = trainer, streams
        why = why_updates_wait(trainer.config) if streams else None
        self.updates = streams and why is None
        if why is not None:
            self._report_wait(why)
        self._fetching = Fetching(trainer, holds=self.updates)
        self._begin()

    def ask_workers(self) -> None:
        """What only an engine that is there can tell; before the first part."""
        if self.updates:
            why = next(filter(None, self._trainer.actor_rollout_wg.why_updates_wait()), None)
            if why is not None:
                self._wait(why)

    def _wait(self, why: str) -> None:
        """Gradients are not streamed any more."""
        self._trainer.actor_rollout_wg.drop_update()
        self.updates = False
        self._report_wait(why)

    def _report_wait(self, why: str) -> None:
        logger.warning("gradients wait for the whole batch (%s); what comes before them is streamed", why)

    def _begin(self) -> None:
        self._done: set[str] = set()
        self._batches: list[KVBatchMeta] = []
        self._metrics = MetricsAggregator()

    def part(self, part: Part) -> None:
        """Some of the next batch; what came before is passed over."""
        self._through([(key, tag) for key, tag in zip(*part, strict=True) if key not in self._done])

    def rest(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """The batch is there: what of it was in no part, and the step.

        Args:
            batch: All of it.
            metrics: Gains those of all parts.

        Returns:
            The batch as it was trained, with verl's padding.
        """
        early = len(self._done)
        # What waits is padded with its last part (verl would pad with rows that no stage has seen): there is to be one.
        lacks_last = not self.updates and self._done >= set(batch.keys)
        if lacks_last or not self._done <= set(batch.keys):
            logger.warning("the update batch is another than its parts told; it is begun anew")
            if self.updates:
                self._trainer.actor_rollout_wg.drop_update()
            padding = [k for each in self._batches for k, tag in zip(each.keys, each.tags, strict=True) if _pads(tag)]
            if padding:
                tq.kv_clear(keys=padding, partition_id=TRAIN)
            self._begin()
            early = 0
        self._through(
            [(key, tag) for key, tag in zip(batch.keys, batch.tags, strict=True) if key not in self._done], last=True
        )
        whole = KVBatchMeta(
            partition_id=TRAIN,
            keys=[key for each in self._batches for key in each.keys],
            tags=[tag for each in self._batches for tag in each.tags],
        )
        metrics.update(self._metrics.get_aggregated_metrics())
        if self._streams:
            metrics[names.STREAM_EARLY] = early / max(1, len(batch.keys))
            metrics[names.STREAM_PARTS] = len(self._batches)
        metrics.update(self._fetching.metrics())
        if self.updates:
            with marked_timer("update_actor", self._trainer.timing_raw, color="red"):
                told = next(each for each in self._trainer.actor_rollout_wg.finish_update() if each is not None)
            told = rename_dict(told, "actor/")
            told["perf/mfu/actor"] = told.pop("actor/mfu")
            metrics.update(reduce_metrics(told))
        self._begin()
        return whole

    def _through(self, rows: Sequence[tuple[str, dict[str, Any]]], last: bool = False) -> None:
        """All stages that need no more than these trajectories."""
        if not rows:
            return
        trainer = self._trainer
        actor = trainer.config.actor_rollout_ref.actor
        mini_batch = actor.ppo_mini_batch_size * trainer.config.actor_rollout_ref.rollout.n
        if self.updates and len(self._done) + len(rows) > mini_batch:
            self._wait(f"more trajectories than a mini-batch has, which are {mini_batch}")
        metrics: dict[str, Any] = {}
        of_tokens: dict[str, Any] = {}
        keys, tags = (list(column) for column in zip(*rows, strict=True))
        batch = KVBatchMeta(partition_id=TRAIN, keys=keys, tags=tags)
        batch.extra_info["temperature"] = trainer.config.actor_rollout_ref.rollout.temperature
        timing = trainer.timing_raw
        batch = self._dealt_out(batch, last)
        fetching = self._fetching
        fetching.begin()
        with marked_timer("old_log_prob", timing, color="blue"), self._log_probs(batch):
            batch = trainer._compute_old_log_prob(batch, metrics=of_tokens)
        trainer.supply()
        if trainer.use_reference_policy:
            with marked_timer("ref", timing, color="olive"), fetching.reference(batch):
                batch = trainer._compute_ref_log_prob(batch, metrics=metrics)
            trainer.supply()
        if self.updates:
            with marked_timer("adv", timing, color="brown"):
                batch = trainer._compute_advantage(batch, metrics=metrics)
            with marked_timer("update_actor", timing, color="red"), fetching.stage(batch, new=True):
                batch.extra_info[PART] = True
                trainer._update_actor(batch, metrics={})
                del batch.extra_info[PART]
        # Of old log-probabilities' metrics one is a mean as loss_agg_mode has it, the others are means over tokens.
        if actor.loss_agg_mode != BY_TOKENS and names.VERL_ENTROPY in of_tokens:
            metrics[names.VERL_ENTROPY] = of_tokens.pop(names.VERL_ENTROPY)
        self._metrics.add_step_metrics(metrics, sample_count=len(rows))
        self._metrics.add_step_metrics(of_tokens, sample_count=sum(tag["response_len"] for tag in tags))
        self._done |= set(keys)
        self._batches.append(batch)

    def _log_probs(self, batch: KVBatchMeta) -> contextlib.AbstractContextManager[None]:
        """Where they are the rollout's, no worker computes them."""
        correction = self._trainer.config.algorithm.get("rollout_correction") or {}
        return contextlib.nullcontext() if correction.get("bypass_mode") else self._fetching.stage(batch)

    def _dealt_out(self, batch: KVBatchMeta, last: bool) -> KVBatchMeta:
        """Padded so that ranks and micro-batches have as many, and with the last part the mini-batches; long and short
        ones dealt out alike."""
        trainer = self._trainer
        ranks = trainer.actor_ranks
        config = trainer.config.actor_rollout_ref
        multiple = ranks * _in_turn(config) * math.lcm(*_micro_batches(config, trainer.use_reference_policy))
        if last and not self.updates:
            before = sum(len(each.keys) for each in self._batches)
            whole = math.lcm(multiple, trainer._get_required_batch_multiple(ranks))
            multiple = -(-(before + len(batch.keys)) // whole) * whole - before
        batch = upsample_batch_to_divisible_size(batch, multiple, trainer.tokenizer.eos_token_id)
        tokens = np.array([tag["seq_len"] for tag in batch.tags])
        batch.reorder(arrange(np.argsort(tokens, kind="stable"), tokens, ranks, len(tokens)).tolist())
        return batch


def _micro_batches(config: Any, reference: bool) -> Iterator[int]:
    """Sizes that verl's engines divide a part by, where they do not go by tokens."""
    yield 1
    if not config.actor.use_dynamic_bsz:
        yield int(config.actor.ppo_micro_batch_size_per_gpu)
    for of in (config.rollout, config.ref) if reference else (config.rollout,):
        if not of.log_prob_use_dynamic_bsz:
            yield int(of.log_prob_micro_batch_size_per_gpu or 1)  # null: a reference within the actor (LoRA)


def _in_turn(config: Any) -> int:
    """Micro-batches that Megatron's interleaved pipeline takes in turns: a call has a multiple of them."""
    engine = config.actor.get("megatron") or {}
    if (engine.get("virtual_pipeline_model_parallel_size") or 1) == 1:
        return 1
    own = (engine.get("override_transformer_config") or {}).get("microbatch_group_size_per_vp_stage")
    return int(own or engine["pipeline_model_parallel_size"])


def _pads(tag: dict[str, Any]) -> bool:
    return bool(tag.get("is_padding", False))
