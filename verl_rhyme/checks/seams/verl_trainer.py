"""verl: start-up, trainer, replay buffer and queue, engines and weights."""

from __future__ import annotations

from verl_rhyme.checks.seam_check import Seam

_TRAINER = "verl.trainer.ppo.v1.trainer_base"
_REPLAY = "verl.trainer.ppo.v1.replay_buffer"
_CHECKPOINT = "verl.checkpoint_engine.base"

SEAMS: tuple[Seam, ...] = (
    # ---- start of every process ----
    Seam("verl.utils.config:validate_config", "the check before Ray starts", accepts=("config",)),
    Seam(
        "verl.trainer.main_ppo:main.__wrapped__",
        "the check before Ray starts",
        contains=("validate_config(config=config", "run_ppo(config, task_runner_class=TaskRunnerV1)"),
    ),
    Seam("verl.workers.config:RolloutConfig", "carries our configuration", has=("custom",)),
    # ---- trainer ----
    Seam(f"{_TRAINER}:TRAINER_REGISTRY", "our trainers under verl's names", has=("update",)),
    Seam(f"{_TRAINER}:register_trainer", "our trainer modes", signature="(name)"),
    Seam(f"{_TRAINER}:get_trainer_cls", "our trainers under verl's names", contains=("return TRAINER_REGISTRY[name]",)),
    Seam(f"{_TRAINER}:PPOTrainer.__init__", "trainer base", signature="(self, config)"),
    Seam(
        f"{_TRAINER}:PPOTrainer._setup",
        "order of set-up: tokenizer first, checkpoint last",
        signature="(self)",
        contains=("self._init_tokenizer()", "self._load_checkpoint()"),
    ),
    Seam(
        f"{_TRAINER}:PPOTrainer._validate",
        "recipes: evaluation sets contain the number of samples per problem",
        contains=('"__rollout_n__", [self.config.actor_rollout_ref.rollout.val_kwargs.n] * batch_size',),
    ),
    Seam(f"{_TRAINER}:PPOTrainer._init_tokenizer", "history service", contains=("self.tokenizer =",)),
    Seam(f"{_TRAINER}:PPOTrainer.get_llm_client", "prompt keys on requests", signature="(self)"),
    Seam(f"{_TRAINER}:PPOTrainer._rollout_server_managers", "request slots", signature="(self)"),
    Seam(f"{_TRAINER}:PPOTrainer._build_replay_buffer", "poll interval", signature="(self)"),
    Seam(
        f"{_TRAINER}:PPOTrainer.fit",
        "the order of a step's stages",
        signature="(self, agent_loop_manager)",
        contains=(
            "self.timing_raw = {}",
            "self.on_step_begin()",
            "batch = self.step(metrics, self.timing_raw)",
            "self.on_step_end()",
            "self._compute_metrics(batch, metrics, self.timing_raw, global_steps=self.global_steps",
            "tq.kv_clear(keys=batch.keys",
        ),
    ),
    Seam(f"{_TRAINER}:PPOTrainer.step", "one step of any mode", signature="(self, metrics, timing_raw)"),
    Seam(
        f"{_TRAINER}:PPOTrainer._step_once",
        "rewards are known when old log-probs are computed; the pipeline's step has the same stages",
        signature="(self, metrics, timing_raw, sample_batch_size)",
        contains=(
            "if self.reward_loop_manager.reward_loop_worker_handles is None:",
            "batch = self._compute_reward_colocate(batch, metrics=metrics)",
            "batch = self._compute_old_log_prob(batch, metrics=metrics)",
            "batch = self._compute_ref_log_prob(batch, metrics=metrics)",
            "batch = self._compute_values(batch, metrics=metrics)",
            "batch = self._compute_advantage(batch, metrics=metrics)",
            "batch = self._update_critic(batch, metrics=metrics)",
            "if self.config.trainer.critic_warmup <= self.global_steps:",
            "batch = self._update_actor(batch, metrics=metrics)",
        ),
    ),
    Seam(
        f"{_TRAINER}:PPOTrainer._compute_old_log_prob",
        "recorder: first stage after the rewards",
        signature="(self, batch, metrics)",
    ),
    Seam(f"{_TRAINER}:PPOTrainer.on_step_begin", "trainer modes", signature="(self)"),
    Seam(f"{_TRAINER}:PPOTrainer.on_step_end", "recorder: end of a step", signature="(self)"),
    Seam(
        f"{_TRAINER}:PPOTrainer._compute_metrics",
        "our metrics in verl's log",
        signature="(self, batch, metrics, timing_raw, global_steps, epoch)",
    ),
    Seam(
        f"{_TRAINER}:PPOTrainer._save_checkpoint",
        "history in checkpoints",
        signature="(self)",
        contains=('f"global_step_{self.global_steps}"', "latest_checkpointed_iteration"),
    ),
    Seam(
        f"{_TRAINER}:PPOTrainer._load_checkpoint",
        "history from checkpoints",
        signature="(self)",
        contains=("global_step_folder = self.config.trainer.resume_from_path",),
    ),
    Seam(f"{_TRAINER}:PPOTrainer._init_dataloader", "epoch of a step", contains=("self.steps_per_epoch =",)),
    Seam(
        "verl.utils.profiler.performance:_timer",
        "stages of a step in the event log",
        contains=("timing_raw[name] += timer.last",),
    ),
    Seam(
        "verl.trainer.ppo.ray_trainer:compute_spec_decode_metrics",
        "rollout/spec_accept_rate and _length",
        signature="(spec_drafts, spec_accepts, spec_verifies, non_padding_mask)",
    ),
    # ---- replay buffer and queue ----
    Seam(f"{_REPLAY}:ReplayBuffer.__init__", "poll interval", contains=("self.poll_interval = poll_interval",)),
    Seam(
        f"{_REPLAY}:ReplayBuffer._wait_for_next_poll",
        "poll interval; replicas are checked while the trainer waits",
        signature="(self, partition_id, last_debug_time)",
        contains=("time.sleep(self.poll_interval)",),
    ),
    Seam(
        "verl.trainer.ppo.v1.trainer_separate_async:HybridEngineMode",
        "replicas are replaced while no engine uses the actor's devices",
        contains=('ROLLOUT = "rollout"',),
    ),
    Seam(
        "verl.single_controller.ray.base:RayResourcePool.get_placement_groups",
        "failed replicas release their placement groups; replicas that span nodes start one by one",
        contains=(
            "f\"{self.name_prefix}verl_group_{'_'.join([str(count) for count in self._store])}:\"",
            "name=pg_name_prefix + str(idx)",
            "ray.get([pg.ready() for pg in pgs]) self.pgs =",
        ),
    ),
    Seam(
        f"{_REPLAY}:ReplayBuffer.sample",
        "event log of validation requests",
        signature="(self, global_steps, partition_id, batch_size)",
    ),
    Seam(
        f"{_REPLAY}:ReplayBuffer._clear_groups",
        "groups that are filtered, stale or surplus are recorded before their removal",
        signature="(self, partition_id, uids)",
        contains=('for key in self.partitions[partition_id] if key.split("_")[0] in uids', "tq.kv_clear("),
    ),
    Seam(
        f"{_REPLAY}:ReplayBufferAsync.sample",
        "event log of validation requests",
        signature="(self, global_steps, partition_id, batch_size)",
    ),
    Seam("transfer_queue:kv_batch_get", "recorder", accepts=("keys", "partition_id", "select_fields")),
    # ---- the pipeline ----
    Seam(
        f"{_TRAINER}:PPOTrainer._balance_batch",
        "pipeline: mini-batches in order of length",
        signature="(self, batch, metrics, logging_prefix, keep_minibatch)",
        contains=('role, worker_group = "actor", self.actor_rollout_wg', "upsample_batch_to_divisible_size("),
    ),
    Seam(
        f"{_TRAINER}:PPOTrainer._next_train_batch",
        "pipeline: prompts one by one",
        signature="(self, num_prompts)",
    ),
    Seam(f"{_TRAINER}:PPOTrainer._reissue_inflight_prompts", "pipeline: prompts in flight", accepts=("self",)),
    Seam(f"{_TRAINER}:PPOTrainer._resolve_filter_groups_metric", "pipeline: DAPO's filter", signature="(self)"),
    Seam(
        "verl.workers.engine_workers:TrainingWorker.train_mini_batch",
        "pipeline: the k-th mini-batch is the k-th slice of each rank's batch",
        accepts=("data",),
        contains=("mini_batch_size_per_gpu = mini_batch_size // self.engine.get_data_parallel_size()",),
    ),
    Seam(
        f"{_REPLAY}:ReplayBuffer._dapo_filtered_keys",
        "pipeline: DAPO's filter",
        signature="(self, partition_id)",
        contains=("finished_uids = self.finished_keys[partition_id]",),
    ),
    Seam("transfer_queue:kv_batch_put", "pipeline: prompts", accepts=("keys", "partition_id", "fields", "tags")),
    Seam(
        "transfer_queue:async_kv_batch_put",
        "pipeline: samples of earlier attempts",
        accepts=("keys", "partition_id", "fields", "tags"),
    ),
    Seam(
        "transfer_queue:async_kv_batch_get",
        "pipeline: prompts, and samples of earlier attempts",
        accepts=("keys", "partition_id", "select_fields"),
    ),
    Seam(
        "transfer_queue:async_kv_list",
        "pipeline: tags of all partitions",
        contains=("partition_id: str | None = None",),
    ),
    Seam("transfer_queue:async_kv_clear", "pipeline: removal of unused samples", accepts=("keys", "partition_id")),
    Seam(
        f"{_CHECKPOINT}:CheckpointEngineManager.abort_replicas",
        "pipeline: aborting samples",
        accepts=("reject_request",),
    ),
    Seam(
        f"{_CHECKPOINT}:CheckpointEngineManager.resume_generation_replicas",
        "pipeline: engines continue with the same policy",
        signature="(self)",
    ),
    Seam(
        f"{_CHECKPOINT}:CheckpointEngineManager.sleep_replicas",
        "pipeline: colocated engines free their memory for the actor",
        signature="(self)",
    ),
    Seam(
        "verl.trainer.ppo.v1.trainer_separate_async:PPOTrainerSeparateAsync.__init__",
        "pipeline: attributes that it sets, except for its rule of weight syncs",
        contains=(
            'self._enable_hybrid_replicas = bool(config.actor_rollout_ref.get("hybrid_engine", True))',
            "self.hybrid_rollout_config: HybridRolloutSwitchConfig = omega_conf_to_dataclass(",
        ),
    ),
    Seam(
        "verl.trainer.ppo.v1.trainer_separate_async:PPOTrainerSeparateAsync._setup",
        "pipeline: separate engines",
        contains=(
            "self.standalone_server_manager: LLMServerManager = LLMServerManager.create(",
            "self.standalone_checkpoint_manager = CheckpointEngineManager(",
        ),
    ),
    Seam(
        f"{_CHECKPOINT}:CheckpointEngineManager.__init__",
        "pipeline: weights for a replacement replica",
        signature="(self, config, actor_wg, replicas)",
        contains=("self.replicas = replicas",),
    ),
    Seam(
        f"{_CHECKPOINT}:CheckpointEngineManager.update_weights",
        "weights for a replacement replica; a replica that dies during the weight sync",
        accepts=("global_steps",),
    ),
    # ---- platform, engines, weight transfer ----
    Seam("verl.plugin.platform.platform_manager:PlatformRegistry.register", "CPU platform", signature="(platform)"),
    Seam(
        "verl.plugin.platform.platform_base:PlatformBase",
        "CPU platform",
        implemented_by="verl_rhyme.platforms.cpu:PlatformCPU",
    ),
    Seam(
        "verl.workers.engine.base:EngineRegistry.register",
        "FSDP on a CPU",
        signature="(model_type, backend, device, vendor)",
    ),
    Seam(
        "verl.workers.engine.fsdp.transformer_impl",
        "FSDP on a CPU",
        has=("FSDPEngineWithLMHead", "FSDPEngineWithValueHead"),
    ),
    Seam(f"{_CHECKPOINT}:CheckpointEngineRegistry.register", "relay of weights", signature="(backend)"),
    Seam(
        f"{_CHECKPOINT}:CheckpointEngine",
        "relay of weights",
        implemented_by="verl_rhyme.weights.engine:RelayCheckpointEngine",
    ),
    Seam("verl.workers.rollout.utils:ensure_async_iterator", "relay of weights"),
    Seam("verl.utils.device", "relay of weights: devices of the engines", has=("get_device_id", "get_device_name")),
    Seam(f"{_CHECKPOINT}:CheckpointEngineWorker.update_weights", "relay of weights", signature="(self, global_steps)"),
    Seam(
        f"{_CHECKPOINT}:CheckpointEngineWorker.execute_checkpoint_engine",
        "relay of weights",
        signature="(self, method, *args, **kwargs)",
    ),
    Seam(
        "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer",
        "relay of weights: steps of a replica before and after a weight sync",
        has=("release_kv_cache", "resume_kv_cache", "resume_engine_generation", "open_submission_gate"),
    ),
)
