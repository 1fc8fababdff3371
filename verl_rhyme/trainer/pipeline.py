"""The pipeline trainer: rollout by the coordinator's scheduler, on verl's V1 trainer (SortedRL, arXiv:2603.23414,
section 3).

A training step is :meth:`RhymePipelineTrainer.step` and :meth:`RhymePipelineTrainer.on_step_end`. Meanwhile
:mod:`verl_rhyme.scheduling` decides about samples, and :mod:`verl_rhyme.coordinator.coordinator` carries it out;
:mod:`verl_rhyme.agent_loop.session` continues interrupted ones.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import transfer_queue as tq
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorData
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import PPOTrainerColocateAsync, PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.replay_buffer import DAPO_FILTERED_REWARD_COUNTS_KEY, ReplayBuffer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.debug import marked_timer
from verl.utils.seqlen_balancing import log_seqlen_unbalance

from verl_rhyme.agent_loop.client import rhymed
from verl_rhyme.agent_loop.session import PROMPTS
from verl_rhyme.agent_loop.stored_attempts import TRAIN
from verl_rhyme.checks.rules import of_config
from verl_rhyme.config import OVERSUBSCRIPTION, ConfigError, training_order
from verl_rhyme.coordinator.ranker_service import unusable
from verl_rhyme.history.keys import KEY_COLUMNS, data_key, template_label
from verl_rhyme.observability import metrics as names
from verl_rhyme.planning.cost import TYPICAL
from verl_rhyme.processes.messages import Handover, LoadedPrompt, Reply, RunSettings
from verl_rhyme.processes.stored_samples import StoredSamples
from verl_rhyme.scheduling.attempts import sample_of
from verl_rhyme.scheduling.retries import RolloutError
from verl_rhyme.scheduling.training_order import arrange, by_length, sortedness
from verl_rhyme.trainer.base import RhymeTrainerMixin
from verl_rhyme.trainer.driver import Driver
from verl_rhyme.trainer.elastic import ElasticReplicas
from verl_rhyme.trainer.observers import Observer, Step
from verl_rhyme.trainer.ranking import Ranking
from verl_rhyme.trainer.stages import Stages
from verl_rhyme.trainer.topology import Colocated, Separate, Topology, check_while_waiting

logger = logging.getLogger(__name__)

#: Fields that verl's ``_compute_advantage`` writes, of which training reads those that all rows of a batch have.
_OF_ADVANTAGES = ("advantages", "returns", "token_level_rewards", "rollout_is_weights")


class _PromptsInFlight(Observer):
    """Keeps the coordinator's state in checkpoints; :attr:`state` is that of the one from which the run resumed."""

    state: dict[str, Any] | None = None

    def on_train_begin(self, driver: Driver) -> None:
        self._driver = driver

    def save(self, folder: str) -> None:
        Path(folder, "prompts_in_flight.json").write_text(json.dumps(self._driver.state()))

    def load(self, folder: str) -> None:
        path = Path(folder, "prompts_in_flight.json")
        if path.is_file():
            self.state = json.loads(path.read_text())
        else:
            logger.warning("%s does not exist: the checkpoint's prompts in flight, if it had some, are lost", path)


class RhymePipelineTrainer(RhymeTrainerMixin):
    """Mixin of the pipeline; put it before the trainer of verl with the wanted placement."""

    _reply: Reply

    # ---- a step ----

    def step(self, metrics: dict, timing_raw: dict) -> KVBatchMeta:
        with marked_timer("gen", timing_raw, color="red"):  # includes the stages of parts
            batch = self._collect(metrics)
        if self.reward_loop_manager.reward_loop_worker_handles is None:
            with marked_timer("reward", timing_raw, color="yellow"):
                batch = self._compute_reward_colocate(batch, metrics=metrics)
        for observer in self.observers:
            observer.on_batch(batch, self.global_steps, self._epoch())
        batch = self._stages.finish(batch, metrics)
        if self._stages.updates:
            return batch  # the parts' gradients are accumulated, and the optimizer has stepped
        batch = self._balance_batch(batch, metrics=metrics)
        if self.use_critic:
            with marked_timer("values", timing_raw, color="cyan"):
                batch = self._compute_values(batch, metrics=metrics)
        with marked_timer("adv", timing_raw, color="brown"):
            batch = self._compute_advantage(batch, metrics=metrics)
        if self.use_critic:
            with marked_timer("update_critic", timing_raw, color="pink"):
                batch = self._update_critic(batch, metrics=metrics)
        if self.config.trainer.critic_warmup <= self.global_steps:
            with marked_timer("update_actor", timing_raw, color="red"):
                batch = self._update_actor(batch, metrics=metrics)
        return batch

    def _compute_reward_colocate(self, batch: KVBatchMeta, metrics: dict | None = None) -> KVBatchMeta:
        batch = super()._compute_reward_colocate(batch, metrics)
        if batch.partition_id == TRAIN:  # agent loop workers check the rewards that they compute
            lengths = np.array([tag["response_len"] for tag in batch.tags])
            rewards = StoredSamples(TRAIN, batch.keys, lengths).rewards()
            if len(wrong := np.flatnonzero(~np.isfinite(rewards))):
                uid, number = sample_of(batch.keys[wrong[0]].rpartition("_")[0])
                raise RolloutError(
                    f"the reward model returned {rewards[wrong[0]]} for sample {number} of prompt {uid}, and "
                    f"{len(wrong)} of {len(rewards)} rewards are not finite: check the reward model "
                    "(reward.reward_model). Then start the same command: it resumes from the last checkpoint."
                )
        return batch

    def on_step_end(self) -> None:
        if not self.rules.one_by_one:  # there each start names the version it needs
            self._driver.pause()
        if self.rules.separate:
            self.topology.replace_dead(self.global_steps, waits=not self.rules.one_by_one)
        super().on_step_end()  # verl's trainer syncs the weights, and the engines resume
        self._publish(self.global_steps)

    def _collect(self, metrics: dict) -> KVBatchMeta:
        """Collect the update batch, sorted by length; its parts pass their stages as their groups finish."""
        self._reply = reply = self._driver.next_batch(self.topology, self._stages.run_part if self._streams else None)
        self.load_prompts()
        self.topology.free_devices()
        if self.curr_step_profile and not self.rules.separate:  # with separate engines verl stops it later
            self._stop_rollout_profiling()
        if reply.filtered:
            metrics[names.FILTERED_GROUPS] = groups = sum(reply.filtered.values())
            metrics[names.FILTERED_SCORE] = sum(score * n for score, n in reply.filtered.items()) / groups
            metrics[DAPO_FILTERED_REWARD_COUNTS_KEY] = reply.filtered
        if reply.failed:
            metrics[names.FAILED_PROMPTS] = reply.failed
        return KVBatchMeta(partition_id=TRAIN, keys=reply.keys, tags=reply.tags)

    def _take_over(self, handover: Handover) -> None:
        for observer in self.observers:
            observer.on_untrained(handover, self.global_steps, self._epoch())

    def load_prompts(self) -> None:
        """Pass the prompts that are wanted now, if rollout continues while the actor trains."""
        if self.rules.separate:
            self._driver.load_prompts()

    def _publish(self, version: int) -> None:
        self._driver.publish(version, batches_left=self.total_training_steps - version)

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        # Not the mixin's, which records, nor separate_async's, which copies the weights: here they are unchanged.
        return PPOTrainer._compute_old_log_prob(self, batch, metrics)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """Compute advantages without verl's padding, whose rows have no tokens and one prompt: a single one would end
        ``grpo_passk``, several would be NaN in ``opo``, and ``gpg`` counts them."""
        rows = list(zip(batch.keys, batch.tags, strict=True))
        padding = [key for key, tag in rows if tag.get("is_padding", False)]
        if not padding:
            return super()._compute_advantage(batch, metrics)
        keys, tags = zip(*((key, tag) for key, tag in rows if not tag.get("is_padding", False)), strict=True)
        real = KVBatchMeta(partition_id=batch.partition_id, keys=list(keys), tags=list(tags))
        done = super()._compute_advantage(real, metrics)
        zeros = {name: np.zeros((len(padding), 1), np.float32) for name in _OF_ADVANTAGES}
        fields = TensorDict(zeros, batch_size=len(padding))
        tq.kv_batch_put(keys=padding, partition_id=batch.partition_id, fields=fields)
        return KVBatchMeta(partition_id=batch.partition_id, keys=batch.keys, tags=batch.tags, fields=done.fields)

    def _step_that_ended(self, timing_raw: dict) -> Step:
        return replace(
            super()._step_that_ended(timing_raw),
            last=self.global_steps >= self.total_training_steps,
            replicas=len(self._serving().get_replicas()),
            wait_s=self._driver.wait_s,
            reply=self._reply,
        )

    @property
    def _rollout_stage(self) -> str:
        return "step" if self.rules.starts_through_training else "gen"

    # ---- set-up ----

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        rules = of_config(config, self._rhyme)
        assert rules is not None, "the pipeline needs max_staleness"
        self.rules = rules
        self.topology: Topology = Separate(self) if rules.separate else Colocated(self)
        self._filters = self._resolve_filter_groups_metric()
        self._rng = np.random.default_rng(int(config.data.get("seed") or 0))
        self._streams = rules.separate and self._rhyme.streaming.part is not None
        self._stages = Stages(self, streams=self._streams)

    def _build_replay_buffer(self) -> ReplayBuffer:
        buffer = super()._build_replay_buffer()  # for validation only
        check_while_waiting(self, buffer, self._check_validation)  # in training the driver waits and checks
        return buffer

    def _check_validation(self, version: int) -> None:
        self.topology.replace_dead(version)
        self.agent_loop_manager.resend_validation()

    def _setup(self) -> None:
        super()._setup()
        self._stages.check_workers()

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        self._in_flight = _PromptsInFlight()
        self.observers.append(self._in_flight)
        ranker = self._rhyme.lengths.ranker
        if ranker is not None:  # it starts while models load
            if problem := unusable(ranker, len(self.tokenizer)):
                raise ConfigError(problem)
            self.observers.append(
                Ranking(ranker, self.tokenizer, self.config.data.get("apply_chat_template_kwargs") or {})
            )

    def get_llm_client(self) -> Any:
        return rhymed(self._serving().get_client(), interruptible=True)

    def _reissue_inflight_prompts(self, partition_id: str = TRAIN) -> int:
        return 0  # the coordinator restores them from the checkpoint

    def on_train_begin(self) -> None:
        setting = self._setting()
        self.observers.append(self._elastic())
        self.topology.prepare(self.rules)
        self._driver = Driver(setting, self._fetch_prompts, self.agent_loop_manager.replace_workers, self._take_over)
        version, workers = self.global_steps - 1, self.agent_loop_manager.agent_loop_workers
        self._driver.open(workers, self._in_flight.state, version, self.total_training_steps - version)
        for observer in self.observers:
            observer.on_train_begin(self._driver)
        self._publish(version)

    def _setting(self) -> RunSettings:
        slots = self._request_slots()
        limit = max(1, math.ceil(OVERSUBSCRIPTION * slots))
        tokens = self._cache_tokens().values()
        placement = self._rhyme.placement
        cost = TYPICAL if (known := self._replica_profile()) is None else known.cost
        return RunSettings(
            rules=self.rules,
            filters=self._filters,
            limit=limit,
            min_starts=max(1, (limit - slots) // 2),  # half of the requests that queue at the engines
            slots=self.fillable_slots,
            lost_after=self._rhyme.scheduling.lost_after,
            outage_s=self._rhyme.scheduling.outage_timeout,
            room=int(OVERSUBSCRIPTION * sum(tokens)) if all(tokens) else None,  # also for queued samples
            router=self._router(),
            placement=None if placement.policy is None else (placement.policy, dict(placement.options)),
            cost=replace(cost, slots=self.config.actor_rollout_ref.rollout.max_num_seqs),
            response_limit=self.config.data.max_response_length,
            part_samples=max(1, int((self._rhyme.streaming.part or 1) * self.rules.batch_samples)),
        )

    def _elastic(self) -> ElasticReplicas:
        elastic = self._rhyme.streaming.elastic
        if elastic.min_replicas is None:
            return ElasticReplicas()
        assert isinstance(self.topology, Separate)  # combinations.py refuses it elsewhere
        engine = omega_conf_to_dataclass(self.config.actor_rollout_ref.rollout.checkpoint_engine)
        return ElasticReplicas(elastic, self._serving(), engine, self.topology.spares)

    def _samples_in_flight(self) -> int:
        return self.rules.samples_in_flight

    def _launched(self) -> list[Any]:
        return super()._launched() + self.topology.idle_replicas()

    def on_validate_begin(self) -> None:
        self.topology.sync_weights()
        super().on_validate_begin()

    def on_validate_end(self) -> None:
        super().on_validate_end()
        self.agent_loop_manager.forget_validation()

    # ---- prompts ----

    def _fetch_prompts(self, count: int) -> list[LoadedPrompt]:
        chunk = self.config.data.get("gen_batch_size", None) or self.config.data.train_batch_size
        batch = self._next_train_batch(-(-count // chunk) * chunk)
        uids = [str(uid) for uid in batch["uid"]]
        columns = [key for key, column in batch.items() if not isinstance(column, NonTensorData)]
        tq.kv_batch_put(keys=uids, partition_id=PROMPTS, fields=batch.select(*columns), tags=[{}] * len(uids))
        default = [self.config.actor_rollout_ref.rollout.n] * len(uids)
        samples = batch["__rollout_n__"] if "__rollout_n__" in columns else default
        keys = self._prompt_keys(batch, columns)
        if "raw_prompt" in columns:
            messages = dict(zip(keys, batch["raw_prompt"], strict=True))
            for observer in self.observers:
                observer.on_prompts(messages)
        return [LoadedPrompt(uid, int(count), key) for uid, count, key in zip(uids, samples, keys, strict=True)]

    def _prompt_keys(self, batch: Any, columns: list[str]) -> list[str]:
        """Return the prompt keys, as the agent loop workers compute them (:func:`data_key`)."""
        options = self.config.data.get("apply_chat_template_kwargs")
        template = template_label(self.tokenizer, self.processor, options)
        known = {name: tu.get(batch, name) for name in KEY_COLUMNS if name in columns}
        alike = {name: tu.get(batch, name) for name in KEY_COLUMNS if name in batch and name not in columns}
        rows = ({**alike, **{name: column[i] for name, column in known.items()}} for i in range(len(batch)))
        return [data_key(row, template) for row in rows]

    # ---- order of a batch ----

    def _balance_batch(
        self, batch: Any, metrics: dict, logging_prefix: str = "global_seqlen", keep_minibatch: bool = False
    ) -> Any:
        ranks = self.actor_ranks  # balanced by length; verl's balancing would mix all lengths. Stages has padded it
        tokens = np.array([tag["seq_len"] for tag in batch.tags])
        mini_batch = self.config.actor_rollout_ref.actor.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n
        if len(tokens) % mini_batch or mini_batch % ranks:
            mini_batch = len(tokens)  # that is one
        trained = spread_padding(batch.tags, self._sortedness(), self._rng)
        lengths = [tag["response_len"] for i in trained if not (tag := batch.tags[i]).get("is_padding", False)]
        metrics[names.BATCH_ORDER] = sortedness(lengths)
        means = tokens[trained].reshape(-1, mini_batch).mean(axis=1)
        metrics[names.MINI_BATCH_SPREAD] = float(means.max() / means.min()) if means.min() > 0 else 1.0
        indices = arrange(trained, tokens, ranks, mini_batch)
        partitions = indices.reshape(ranks, -1).tolist()
        metrics.update(log_seqlen_unbalance(seqlen_list=tokens.tolist(), partitions=partitions, prefix=logging_prefix))
        batch.reorder(indices.tolist())
        return batch

    @property
    def actor_ranks(self) -> int:
        """Data parallel ranks of the actor."""
        workers = self.actor_rollout_wg
        if "actor" not in workers._dispatch_info:
            workers._dispatch_info["actor"] = workers._query_dispatch_info("actor")
        return max(workers._dispatch_info["actor"]) + 1

    def _sortedness(self) -> float:
        actor = self.config.actor_rollout_ref.actor
        mini_batches = self.config.data.train_batch_size // actor.ppo_mini_batch_size
        factor = actor.get("loss_scale_factor")
        return training_order(self._rhyme.scheduling.order, mini_batches, str(actor.loss_agg_mode), factor)

    def fit(self, agent_loop_manager: Any) -> None:
        try:
            super().fit(agent_loop_manager)
        finally:
            if hasattr(self, "_driver"):
                self._driver.close()


def spread_padding(tags: Sequence[dict[str, Any]], order: float, rng: np.random.Generator) -> np.ndarray:
    """Return the order of training, int64[N], by length (``order`` 1) or shuffled (0), with verl's untrained padding at
    even distances. ``tags`` are TransferQueue's; ``rng`` also orders equal lengths."""
    padding = np.array([tag.get("is_padding", False) for tag in tags], dtype=bool)
    real, fill = np.flatnonzero(~padding), np.flatnonzero(padding)
    lengths = np.array([tags[index]["response_len"] for index in real])
    trained = real[by_length(lengths, rng, shuffled=not order)]
    return np.insert(trained, (np.arange(len(fill)) * len(trained) // max(1, len(fill))), fill)


class RhymePipelineColocated(RhymePipelineTrainer, PPOTrainerColocateAsync):
    """Pipeline for ``trainer.v1.trainer_mode=sync`` or ``colocate_async`` with a ``max_staleness``."""

    def __init__(self, config: Any) -> None:
        # verl's sync trainer saves no samples in flight (``PPOTrainer._save_checkpoint``)
        config.trainer.v1.trainer_mode = "colocate_async"
        super().__init__(config)


class _Separate(PPOTrainerSeparateAsync):
    """verl's trainer without its rule of one weight sync per mini-batch: here a sync follows each training step."""

    def __init__(self, config: Any) -> None:
        mini_batches = config.data.train_batch_size // config.actor_rollout_ref.actor.ppo_mini_batch_size
        config.trainer.v1.separate_async.parameter_sync_step = mini_batches  # verl demands it
        super().__init__(config)
        self.parameter_sync_step = 1


class RhymePipelineSeparate(RhymePipelineTrainer, _Separate):
    """Pipeline for ``trainer.v1.trainer_mode=separate_async`` with a ``max_staleness``."""
