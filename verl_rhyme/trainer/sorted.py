"""``trainer.v1.trainer_mode=rhyme_sorted``: SortedRL's pipeline on verl's V1 trainer (arXiv:2603.23414, section 3).

A step: start what is pending, take the update batch as soon as it is finished, abort the rest, sleep, train, sync, and
on. What happens to samples is decided by :mod:`verl_rhyme.scheduling`; how an interrupted one goes on, by
:mod:`verl_rhyme.workers.session`.
"""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import transfer_queue as tq
from tensordict.tensorclass import NonTensorData
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.utils import tensordict_utils as tu
from verl.utils.debug import marked_timer
from verl.utils.seqlen_balancing import log_seqlen_unbalance

from verl_rhyme.config import CONFIG_PATH, ConfigError, SortingConfig
from verl_rhyme.observability import metrics as names
from verl_rhyme.scheduling.order import arrange, mixed_ranks, sortedness
from verl_rhyme.scheduling.rules import named
from verl_rhyme.trainer.base import RhymeTrainerMixin
from verl_rhyme.trainer.sorted_buffer import SortedReplayBuffer
from verl_rhyme.workers.client import rhymed
from verl_rhyme.workers.session import PROMPTS, STARTS, Start

logger = logging.getLogger(__name__)

#: In a checkpoint folder, beside verl's ``transfer_queue``.
STATE_FILE = "rhyme_sorted.json"

#: Advantage estimators that look at one trajectory at a time; all others compare the samples of a prompt.
_SINGLE = ("gae", "reinforce_plus_plus")


class RhymeTrainerSorted(RhymeTrainerMixin):
    """See the module."""

    replay_buffer: SortedReplayBuffer

    # ---- set-up ----

    def _build_replay_buffer(self) -> ReplayBuffer:
        config = self.config
        sorting = SortingConfig() if self._rhyme is None else self._rhyme.sorting
        if sorting.mode is None:
            raise ConfigError(
                f"trainer_mode=rhyme_sorted needs {CONFIG_PATH}.sorting.mode=on_policy or partial, and enable=true "
                "(+rhyme=sorted)"
            )
        single = str(config.algorithm.adv_estimator) in _SINGLE
        unit = sorting.unit or ("trajectory" if single else "group")
        filter_metric = self._resolve_filter_groups_metric()
        if unit == "trajectory" and (not single or filter_metric is not None):
            raise ConfigError(
                f"{CONFIG_PATH}.sorting.unit=trajectory tears groups apart, which algorithm.adv_estimator="
                f"{config.algorithm.adv_estimator} or algorithm.filter_groups compares: use group"
            )
        batch_prompts = config.data.train_batch_size
        rules = named(
            sorting.mode,
            batch_prompts=batch_prompts,
            batch_samples=batch_prompts * config.actor_rollout_ref.rollout.n,
            group_batches=sorting.group_batches,
            unit=unit,
            harvest_tokens=sorting.harvest_tokens,
            max_wait=sorting.max_wait,
            max_staleness=sorting.max_staleness,
            redraft=sorting.redraft and self._rhyme.drafting.enable,
            stop_wait=sorting.stop_wait,
        )
        self._rng = np.random.default_rng(int(config.data.get("seed") or 0))
        return SortedReplayBuffer(
            rules,
            self,
            trainer_mode=self.trainer_mode,
            trainer_config=config.trainer.v1.get(self.trainer_mode, {}),
            max_off_policy_threshold=None,  # the scheduler's rules are stricter
            max_off_policy_strategy="drop",
            sampler_kwargs=config.trainer.v1.sampler.sampler_kwargs,
            refill_fn=lambda count: None,
            filter_groups_metric=filter_metric,
        )

    def get_llm_client(self) -> Any:
        return rhymed(self.llm_server_manager.get_client(), interruptible=True)

    def on_init_end(self) -> None:
        self.checkpoint_manager.update_weights(self.global_steps)

    # ---- what the buffer asks for ----

    def load_prompts(self, count: int) -> list[tuple[str, int]]:
        batch = self._next_train_batch(count)
        uids = [str(uid) for uid in batch["uid"]]
        columns = [key for key, column in batch.items() if not isinstance(column, NonTensorData)]
        tq.kv_batch_put(keys=uids, partition_id=PROMPTS, fields=batch.select(*columns), tags=[{}] * len(uids))
        default = [self.config.actor_rollout_ref.rollout.n] * len(uids)
        samples = batch["__rollout_n__"] if "__rollout_n__" in columns else default
        return [(uid, int(count)) for uid, count in zip(uids, samples, strict=True)]

    def start_samples(self, starts: dict[str, list[Start]]) -> None:
        batch = tq.kv_batch_get(keys=list(starts), partition_id=PROMPTS)
        tu.assign_non_tensor_data(batch, "global_steps", self.global_steps)
        tu.assign_non_tensor_stack(batch, STARTS, list(starts.values()))
        self.agent_loop_manager.generate_sequences(batch)

    def dispatch_limits(self) -> tuple[int, int]:
        slots = self._request_slots()
        most = max(1, math.ceil(self._rhyme.sorting.oversubscription * slots))
        return most, max(1, (most - slots) // 2)  # half of what queues up at the engines

    def stop_engines(self) -> None:
        # Not the gate alone: an attempt that waits there would hold up the step, or be let in under the next policy.
        self.checkpoint_manager.abort_replicas(reject_request=True)

    def resume_engines(self) -> None:
        self.checkpoint_manager.resume_generation_replicas()

    def running_attempts(self) -> set[str] | None:
        return self.agent_loop_manager.attempts()

    def abandon_attempts(self, sessions: list[str]) -> None:
        if sessions:
            self.agent_loop_manager.abandon(sessions)

    # ---- a step ----

    def prepare_step(self) -> dict:
        steps_left = self.total_training_steps - self.global_steps + 1
        self.replay_buffer.begin(version=self.global_steps - 1, batches_left=steps_left)
        return {}

    def on_sample_end(self) -> None:
        self.checkpoint_manager.sleep_replicas()
        if self.curr_step_profile:
            self._stop_rollout_profiling()

    def on_step_end(self) -> None:
        with marked_timer("update_weights", self.timing_raw, color="red"):
            self.checkpoint_manager.update_weights(self.global_steps)
            self.resume_engines()
        super().on_step_end()

    def _balance_batch(
        self, batch: Any, metrics: dict, logging_prefix: str = "global_seqlen", keep_minibatch: bool = False
    ) -> Any:
        """Mini-batches in the order of length, balanced over the ranks; verl's own would mix all lengths."""
        workers = self.actor_rollout_wg
        if "actor" not in workers._dispatch_info:
            workers._dispatch_info["actor"] = workers._query_dispatch_info("actor")
        ranks = max(workers._dispatch_info["actor"]) + 1
        batch = upsample_batch_to_divisible_size(
            batch, self._get_required_batch_multiple(ranks), self.tokenizer.eos_token_id
        )
        tokens = np.array([tag["seq_len"] for tag in batch.tags])
        mini_batch = self.config.actor_rollout_ref.actor.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n
        if len(tokens) % mini_batch or mini_batch % ranks:
            mini_batch = len(tokens)
        order = _spread_padding(batch.tags, self._sortedness(), self._rng)
        metrics.update(_order_metrics([batch.tags[index] for index in order], mini_batch))
        indices = arrange(order, tokens, ranks, mini_batch).tolist()
        batch.reorder(indices)
        share = len(indices) // ranks
        partitions = [indices[rank * share : (rank + 1) * share] for rank in range(ranks)]
        metrics.update(log_seqlen_unbalance(seqlen_list=tokens.tolist(), partitions=partitions, prefix=logging_prefix))
        return batch

    def _sortedness(self) -> float:
        """``sorting.order``, or what does not bias the gradient (docs/sorted.md, "The order and the gradient")."""
        if self._rhyme.sorting.order is not None:
            return self._rhyme.sorting.order
        actor = self.config.actor_rollout_ref.actor
        several = actor.ppo_mini_batch_size < self.config.data.train_batch_size
        return 0.0 if several and actor.loss_agg_mode == "token-mean" else 1.0

    def _compute_metrics(
        self, batch: Any, metrics: dict, timing_raw: dict, global_steps: int, epoch: int, **kwargs: Any
    ) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps=global_steps, epoch=epoch, **kwargs)
        metrics.update(self.replay_buffer.take_metrics(self.fillable_slots))
        self._recorder.log_untrained(self.replay_buffer.take_wasted(), step=global_steps, epoch=self._epoch())

    # ---- checkpoints ----

    def _save_checkpoint(self) -> None:
        folder = Path(self.config.trainer.default_local_dir, f"global_step_{self.global_steps}")
        folder.mkdir(parents=True, exist_ok=True)
        # Before verl names this checkpoint the latest: a crash in between resumes from the one before.
        (folder / STATE_FILE).write_text(json.dumps(self.replay_buffer.state_dict()))
        super()._save_checkpoint()

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if self.global_steps == 0:
            return
        path = self._checkpoint_folder() / STATE_FILE
        if path.is_file():
            self.replay_buffer.load_state_dict(json.loads(path.read_text()))
        else:
            logger.warning("no %s: another trainer mode made this checkpoint; prompts in flight are forgotten", path)
            self.replay_buffer.load_state_dict(self.replay_buffer.state_dict())

    def _reissue_inflight_prompts(self, partition_id: str = "train") -> int:
        return 0  # the first step starts what is pending


def _spread_padding(tags: list[dict], knob: float, rng: np.random.Generator) -> np.ndarray:
    """int64[N], the order of training; verl's padding, which trains nothing, at even distances in it."""
    padding = np.array([tag.get("is_padding", False) for tag in tags], dtype=bool)
    real, fill = np.flatnonzero(~padding), np.flatnonzero(padding)
    lengths = np.array([tags[index]["response_len"] for index in real])
    order = real[mixed_ranks(lengths, knob, rng)]
    return np.insert(order, (np.arange(len(fill)) * len(order) // max(1, len(fill))), fill)


def _order_metrics(tags: list[dict], mini_batch: int) -> dict[str, float]:
    lengths = [tag["response_len"] for tag in tags if not tag.get("is_padding", False)]
    means = np.array([tag["seq_len"] for tag in tags]).reshape(-1, mini_batch).mean(axis=1)
    return {
        names.SORTED_ORDER: sortedness(lengths),
        names.SORTED_MINI_BATCH_SPREAD: float(means.max() / means.min()) if means.min() > 0 else 1.0,
    }
