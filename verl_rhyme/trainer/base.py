"""Base of the trainers: history, event log and metrics for any of verl's V1 trainers."""

from __future__ import annotations

import functools
import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
from omegaconf import DictConfig, OmegaConf, open_dict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import PPOTrainerColocateAsync, PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path
from verl.utils.tracking import FileLogger

from verl_rhyme.actor.actor import streamed
from verl_rhyme.agent_loop.client import rhymed
from verl_rhyme.config import config_tree
from verl_rhyme.config.run_name import run_name
from verl_rhyme.history import history_folder
from verl_rhyme.history_writer.history_service import HistoryService, tokenizer_namespace
from verl_rhyme.observability.events import EventLog
from verl_rhyme.observability.log_handler import add_log_handler
from verl_rhyme.observability.metrics import fillable_slots
from verl_rhyme.planning import profile
from verl_rhyme.planning.profile import Profile
from verl_rhyme.processes import queue
from verl_rhyme.processes.deaths import WatchedCheckpointManager
from verl_rhyme.processes.waiting import waiting_for
from verl_rhyme.router import router_file
from verl_rhyme.scheduling.retries import RolloutError
from verl_rhyme.trainer.draft_counts import DraftCounts
from verl_rhyme.trainer.observers import Observer, Step
from verl_rhyme.trainer.recorder import Recorder
from verl_rhyme.weights.carrier import carrier

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 20
#: Maximum seconds between two polls of verl's replay buffer; verl's default is 2.
_POLL_INTERVAL_S = 0.25


def continue_metrics(config: Any) -> None:
    """Make verl's file logger continue the metrics of a run that resumes (``patches/verl_continue_metrics.py``)."""
    mode, folder = (OmegaConf.select(config, f"trainer.{key}") for key in ("resume_mode", "default_local_dir"))
    FileLogger.resumed = mode == "resume_path" or (mode == "auto" and find_latest_ckpt_path(folder) is not None)


class StageTimes(dict):
    """verl's ``timing_raw``, with the stages in order as ``(name, start, seconds)``."""

    def __init__(self, durations: dict[str, float]) -> None:
        super().__init__(durations)
        self.stages: list[tuple[str, float, float]] = []

    def __setitem__(self, name: str, seconds: float) -> None:
        spent = seconds - self.get(name, 0.0)  # verl adds up repeated stages
        self.stages.append((name, time.time() - spent, spent))
        super().__setitem__(name, seconds)


def _hook(method: Callable) -> Callable:
    """Call the method of the next base class instead if rhyme is disabled."""

    @functools.wraps(method)
    def guarded(self: RhymeTrainerMixin, *args: Any, **kwargs: Any) -> Any:
        if self._rhyme is None:
            return getattr(super(RhymeTrainerMixin, self), method.__name__)(*args, **kwargs)
        return method(self, *args, **kwargs)

    return guarded


class RhymeTrainerMixin(PPOTrainer):
    """Mixin for verl's trainers, placed first: ``class Mine(RhymeTrainerMixin, PPOTrainerColocateAsync)``. verl gives
    every trainer mode except its own ``sync`` asynchronous semantics. Without a rhyme tree in the config, or with
    ``enable=false``, every method calls the next base class, so that ``Mine`` equals the class without the mixin."""

    _rhyme: Any  # RhymeConfig; None if rhyme is disabled

    def __init__(self, config: DictConfig) -> None:
        self._rhyme = config_tree.from_verl(config)
        if self._rhyme is None:
            super().__init__(config)
            return
        add_log_handler()
        continue_metrics(config)
        rhyme = self._rhyme
        run_dir = Path(config.trainer.default_local_dir).absolute()
        if rhyme.history.dir is None:
            # One folder for each run on each machine; workers read it from their rollout config.
            name = hashlib.blake2b(str(run_dir).encode(), digest_size=6).hexdigest()
            with open_dict(config):
                tree = config.actor_rollout_ref.rollout.custom.rhyme
                tree.history = {**(tree.get("history") or {}), "dir": str(history_folder.place() / name)}
            rhyme = self._rhyme = config_tree.from_verl(config)
        else:
            history_folder.check(rhyme.history.dir)
        self._event_log = EventLog(rhyme.events.dir or run_dir / "events") if rhyme.events.enable else None
        router_file.use(config, rhyme.placement)
        if isinstance(self, PPOTrainerSeparateAsync):
            _merge_adapters(config.actor_rollout_ref.model)
        super().__init__(config)
        self.replay_buffer.poll_interval = min(self.replay_buffer.poll_interval, _POLL_INTERVAL_S)
        self._watch_validation()
        self._watch_dropped()

    # ---- set-up ----

    @_hook
    def _init_tokenizer(self) -> None:
        super()._init_tokenizer()
        self._history = HistoryService(self._rhyme.history, tokenizer_namespace(self.tokenizer))
        self._recorder = Recorder(
            self._history,
            self._event_log,
            lambda: None if self._rollout_stage == "step" else self._bubble_slots,  # then by the event log alone
            DraftCounts(self._draft_servers),
            logprobs=self.config.actor_rollout_ref.rollout.calculate_log_probs,
            log_responses=self._rhyme.events.responses,
        )
        self.observers: list[Observer] = [self._recorder]

    @_hook
    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in {Role.Actor, Role.ActorRollout, Role.ActorRolloutRef, Role.RefPolicy} & set(
            self.role_worker_mapping
        ):
            theirs = self.role_worker_mapping[role].__ray_actor_class__
            self.role_worker_mapping[role] = ray.remote(streamed(theirs))

    @_hook
    def _setup(self) -> None:
        super()._setup()
        for name in ("checkpoint_manager", "standalone_checkpoint_manager"):  # the latter with separate engines
            if (weights := getattr(self, name, None)) is not None:
                ours = carrier(weights, self._rhyme.weights, self.config.actor_rollout_ref.rollout)
                setattr(self, name, WatchedCheckpointManager(ours, self._rhyme.scheduling.lost_after))
        if (router := self._router()) is not None:
            for address, tokens in self._cache_tokens().items():
                if tokens:
                    router.report_capacity.remote(address, tokens)
        if self._event_log is not None:
            self._describe_run(self._event_log)

    def _describe_run(self, events: EventLog) -> None:
        rollout = self.config.actor_rollout_ref.rollout
        cost = self._replica_profile()
        events.describe(
            run=run_name(self._rhyme),
            engine=f"{self.config.actor_rollout_ref.actor.strategy} + {rollout.name} on {self.config.trainer.device}",
            slots=self._bubble_slots,
            rollout=self._rollout_stage,
            step_cost=None if cost is None else {"source": cost.source, "step": asdict(cost.cost.step)},
        )

    # ---- replicas and their router ----

    def _replica_profile(self) -> Profile | None:
        """Return the cost of a replica's work: measured, else calculated, ``None`` if model or GPU is unknown."""
        if (measured := router_file.measured(self._rhyme.placement)) is not None:
            return measured
        ref = self.config.actor_rollout_ref
        tp = ref.rollout.tensor_model_parallel_size
        return profile.of_run(ref.model.path, ray.cluster_resources(), tp, str(ref.rollout.dtype))

    def _serving(self) -> Any:
        """Return verl's manager of the engines that generate for training."""
        return getattr(self, "standalone_server_manager", None) or self.llm_server_manager

    def _router(self) -> Any:
        """Return the handle of the ``PlacementRouter``; ``None`` with verl's router."""
        return None if self._rhyme.placement.policy is None else self._serving().global_load_balancer

    def _cache_tokens(self) -> dict[str, int]:
        """Return the KV cache capacity in tokens of each replica by address; 0 if the engine does not report it."""
        servers = self._serving()
        with waiting_for("the replicas to report their capacity"):
            tokens = ray.get([replica.servers[0].cache_tokens.remote() for replica in servers.get_replicas()])
        return dict(zip(servers.server_addresses, tokens, strict=True))

    @_hook
    def get_llm_client(self) -> Any:
        return rhymed(super().get_llm_client())

    @functools.cached_property
    def fillable_slots(self) -> int:
        """Q of the bubble ratio for metrics, event log and report (:func:`~metrics.fillable_slots`)."""
        return fillable_slots(self._request_slots(), self._samples_in_flight())

    @property
    def _bubble_slots(self) -> int | None:
        """``fillable_slots``; ``None`` in verl's asynchronous modes, where only records of trained requests arrive."""
        theirs = isinstance(self, PPOTrainerColocateAsync | PPOTrainerSeparateAsync)
        return None if theirs and not self._rhyme.pipeline else self.fillable_slots

    @property
    def _rollout_stage(self) -> str:
        """Name of verl's stage that lasts as long as a step's rollout."""
        return "step" if isinstance(self, PPOTrainerSeparateAsync) else "gen"

    def _samples_in_flight(self) -> int:
        batches = getattr(self.replay_buffer, "max_inflight_gen_batches", 1)  # DAPO's refills replace filtered groups
        return batches * self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n

    def _request_slots(self) -> int:
        return len(self._serving().get_replicas()) * self.config.actor_rollout_ref.rollout.max_num_seqs

    def _launched(self) -> list[Any]:
        """Return all replicas of verl, also those that do not serve."""
        return [replica for manager in self._rollout_server_managers() for replica in manager.get_replicas()]

    def _draft_servers(self) -> dict[int, Any]:
        return {replica.replica_rank: replica.servers[0] for replica in self._launched()}

    # ---- recording, while the step trains ----

    @_hook
    def _compute_old_log_prob(self, batch: Any, metrics: dict) -> Any:
        # The first stage after rewards are known.
        self._recorder.start(batch, step=self.global_steps, part=self._part(), epoch=self._epoch())
        return super()._compute_old_log_prob(batch, metrics)

    @_hook
    def on_step_end(self) -> None:
        super().on_step_end()
        self._recorder.join()  # verl clears the batch from its queue next

    @_hook
    def _compute_metrics(
        self, batch: Any, metrics: dict, timing_raw: dict, global_steps: int, epoch: int, **kwargs: Any
    ) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps=global_steps, epoch=epoch, **kwargs)
        step = self._step_that_ended(timing_raw)
        for observer in self.observers:
            metrics.update(observer.on_step(step))
        if step.reply is not None:
            metrics.update(step.reply.metrics)
        self._recorder.log_step(metrics, self.timing_raw.stages, global_steps, self._epoch())

    def _step_that_ended(self, timing_raw: dict) -> Step:
        return Step(self.global_steps, timing_raw["step"], timing_raw.get(self._rollout_stage, 0.0))

    def _watch_validation(self) -> None:
        """Log validation requests too; verl clears them before any hook."""
        sample = self.replay_buffer.sample

        def watched(*args: Any, partition_id: str, **kwargs: Any) -> Any:
            with waiting_for("validation" if partition_id == "val" else "samples of an update batch"):
                sampled = sample(*args, partition_id=partition_id, **kwargs)
            if partition_id == "val":
                if not sampled[0].keys:
                    raise RolloutError(
                        "no validation sample succeeded: the agent loop workers logged the first failure. Fix what "
                        "raised it, then start the same command: it resumes from the last checkpoint."
                    )
                self._recorder.log_validation(sampled[0], step=self.global_steps, epoch=self._epoch())
            return sampled

        self.replay_buffer.sample = watched

    def _watch_dropped(self) -> None:
        """Record groups that verl's buffer drops (filtered, stale, surplus) before it clears them. The buffer's prompts
        are cleared at once, so that it counts and refills as usual; their trajectories, which it accesses only by
        prompt, are cleared once recorded."""
        buffer, clear = self.replay_buffer, getattr(self.replay_buffer, "_clear_groups", None)
        if clear is None:  # the user's own sampler
            return

        def watched(partition_id: str, uids: set[str]) -> None:
            known = buffer.partitions[partition_id]
            keys = [key for key, tag in known.items() if key.split("_")[0] in uids and tag.get("status") == "success"]
            if partition_id == "train" and keys:
                batch = KVBatchMeta(partition_id=partition_id, keys=keys, tags=[known.pop(key) for key in keys])
                self._recorder.start_untrained(batch, step=self._part(), epoch=self._epoch())
            clear(partition_id, uids)

        buffer._clear_groups = watched

    def _part(self) -> int:
        """Return the number of the mini-batch, of which a step may have several; the history counts by it."""
        return self.global_steps * self.parameter_sync_step + self.local_trigger_step

    def _epoch(self) -> int:
        """Return the epoch, from 0, as verl counts."""
        return max(0, self.global_steps - 1) // self.steps_per_epoch

    @property
    def timing_raw(self) -> Any:
        return self._timing_raw

    @timing_raw.setter
    def timing_raw(self, durations: dict[str, float]) -> None:
        self._timing_raw = durations if self._rhyme is None else StageTimes(durations)

    # ---- checkpoints ----

    @_hook
    def _save_checkpoint(self) -> None:
        # Before verl marks this checkpoint as the latest: after a crash in between, the run resumes from the previous.
        folder = _own_folder(Path(self.config.trainer.default_local_dir, f"global_step_{self.global_steps}"))
        folder.mkdir(parents=True, exist_ok=True)
        for observer in self.observers:
            observer.save(str(folder))
        super()._save_checkpoint()

    @_hook
    def _load_checkpoint(self) -> None:
        self._history.ready()  # fails here, before training, if the folder belongs to another run
        super()._load_checkpoint()
        if self.global_steps > 0:
            trainer = self.config.trainer
            checkpoint = Path(trainer.default_local_dir, f"global_step_{self.global_steps}")
            if trainer.resume_mode == "resume_path":
                checkpoint = Path(trainer.resume_from_path)
            for observer in self.observers:
                observer.load(str(_own_folder(checkpoint)))

    @_hook
    def fit(self, agent_loop_manager: Any) -> None:
        queue.join()
        try:
            super().fit(agent_loop_manager)
        finally:
            observers = [observer.close for observer in self.observers]
            for end in (*observers, self._history.close, self._stop_servers, self._close_weights):
                try:  # an error in closing the history must not keep the engines running
                    end()
                except Exception:
                    logger.warning("an error occurred while the run ended", exc_info=True)

    def _close_weights(self) -> None:
        if (weights := getattr(self, "standalone_checkpoint_manager", None)) is not None:
            weights.close()

    def _stop_servers(self) -> None:
        servers = [server for replica in self._launched() for server in replica.servers]
        ray.wait([s.stop_engine.remote() for s in servers], num_returns=len(servers), timeout=_STOP_TIMEOUT_S)


def _own_folder(checkpoint: Path) -> Path:
    """Return the folder of the observers' files: the actor's, which verl removes with old weights."""
    return (checkpoint / "actor").absolute()


def _merge_adapters(model: DictConfig) -> None:
    """Have verl send LoRA adapters merged into the weights: to separate engines it would not send them at all."""
    lora = model.get("lora") or {}
    if (lora.get("rank", 0) > 0 or model.get("lora_rank", 0) > 0) and not lora.get("merge", False):
        logger.warning("separate engines receive LoRA adapters merged: actor_rollout_ref.model.lora.merge=true")
        with open_dict(model):
            model.lora = {**lora, "merge": True}
