"""verl: checks before Ray starts, trainers, replay buffer and queue, the actor's update, weights."""

from __future__ import annotations

from tests.contract.seam_check import Shapes

_TRAINER = "verl.trainer.ppo.v1.trainer_base"
_SEPARATE = "verl.trainer.ppo.v1.trainer_separate_async"
_REPLAY = "verl.trainer.ppo.v1.replay_buffer"
_CHECKPOINT = "verl.checkpoint_engine.base"
_WORKERS = "verl.workers.engine_workers"
_ENGINE = "verl.workers.engine"

SEAMS: Shapes = {
    "checks before Ray starts": {
        "verl.utils.config": {"validate_config": "(config, ...)"},
        "verl.trainer.main_ppo": {
            "main.__wrapped__": ("validate_config(config=config", "run_ppo(config, task_runner_class=TaskRunnerV1)")
        },
    },
    "trainers": {
        "verl.workers.config:RolloutConfig": {"custom": ()},
        _TRAINER: {
            "TRAINER_REGISTRY": (),
            "get_trainer_cls": "return TRAINER_REGISTRY[name]",
        },
        f"{_TRAINER}:PPOTrainer": {
            "__init__": "(self, config)",
            "_setup": ("(self)", "self._init_tokenizer()", "self._load_checkpoint()"),
            "_validate": '"__rollout_n__", [self.config.actor_rollout_ref.rollout.val_kwargs.n] * batch_size',
            "_rollout_server_managers": "(self)",
            "_build_replay_buffer": "(self)",
            "fit": (
                "(self, agent_loop_manager)",
                "self.timing_raw = {}",
                "self.on_step_begin()",
                "batch = self.step(metrics, self.timing_raw)",
                "self.on_step_end()",
                "self._compute_metrics(batch, metrics, self.timing_raw, global_steps=self.global_steps",
                "tq.kv_clear(keys=batch.keys",
            ),
            "step": "(self, metrics, timing_raw)",
            "_compute_metrics": "(self, batch, metrics, timing_raw, global_steps, epoch)",
        },
        f"{_REPLAY}:ReplayBuffer": {
            "__init__": "self.poll_interval = poll_interval",
            "_wait_for_next_poll": ("(self, partition_id, last_debug_time)", "time.sleep(self.poll_interval)"),
        },
    },
    "history": {
        f"{_TRAINER}:PPOTrainer": {
            "_init_tokenizer": "self.tokenizer =",
            "_save_checkpoint": ("(self)", 'f"global_step_{self.global_steps}"', "latest_checkpointed_iteration"),
            "_load_checkpoint": ("(self)", "global_step_folder = self.config.trainer.resume_from_path"),
        },
    },
    "identity, counts and times of requests": {
        f"{_TRAINER}:PPOTrainer": {"get_llm_client": "(self)"},
    },
    "pipeline": {
        f"{_TRAINER}:PPOTrainer": {
            "_step_once": (
                "(self, metrics, timing_raw, sample_batch_size)",
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
            "_balance_batch": (
                "(self, batch, metrics, logging_prefix, keep_minibatch)",
                'role, worker_group = "actor", self.actor_rollout_wg',
                "upsample_batch_to_divisible_size(",
            ),
            "_next_train_batch": "(self, num_prompts)",
            "_reissue_inflight_prompts": "(self, ...)",
            "_resolve_filter_groups_metric": "(self)",
        },
        f"{_WORKERS}:TrainingWorker": {
            "train_mini_batch": (
                "(data, ...)",
                "mini_batch_size_per_gpu = mini_batch_size // self.engine.get_data_parallel_size()",
            )
        },
        f"{_REPLAY}:ReplayBuffer": {
            "_dapo_filtered_keys": ("(self, partition_id)", "finished_uids = self.finished_keys[partition_id]")
        },
        "transfer_queue": {
            "kv_batch_put": "(keys, partition_id, fields, tags, ...)",
            "async_kv_batch_put": "(keys, partition_id, fields, tags, ...)",
            "async_kv_batch_get": "(keys, partition_id, select_fields, ...)",
            "async_kv_clear": "(keys, partition_id, ...)",
            "async_kv_list": "partition_id: str | None = None",
        },
        f"{_CHECKPOINT}:CheckpointEngineManager": {
            "abort_replicas": "(reject_request, ...)",
            "resume_generation_replicas": "(self)",
            "sleep_replicas": "(self)",
        },
        f"{_SEPARATE}:PPOTrainerSeparateAsync": {
            "__init__": (
                'self._enable_hybrid_replicas = bool(config.actor_rollout_ref.get("hybrid_engine", True))',
                "self.hybrid_rollout_config: HybridRolloutSwitchConfig = omega_conf_to_dataclass(",
            ),
            "_setup": (
                "self.standalone_server_manager: LLMServerManager = LLMServerManager.create(",
                "self.standalone_checkpoint_manager = CheckpointEngineManager(",
            ),
        },
    },
    "event log and recorder": {
        f"{_TRAINER}:PPOTrainer": {
            "_compute_old_log_prob": "(self, batch, metrics)",
            "on_step_end": "(self)",
            "_init_dataloader": "self.steps_per_epoch =",
        },
        "verl.utils.profiler.performance": {"_timer": "timing_raw[name] += timer.last"},
        "verl.trainer.ppo.ray_trainer": {
            "compute_spec_decode_metrics": "(spec_drafts, spec_accepts, spec_verifies, non_padding_mask)"
        },
        f"{_REPLAY}:ReplayBuffer": {
            "sample": "(self, global_steps, partition_id, batch_size)",
            "_clear_groups": (
                "(self, partition_id, uids)",
                'for key in self.partitions[partition_id] if key.split("_")[0] in uids',
                "tq.kv_clear(",
            ),
        },
        f"{_REPLAY}:ReplayBufferAsync": {"sample": "(self, global_steps, partition_id, batch_size)"},
        "transfer_queue": {"kv_batch_get": "(keys, partition_id, select_fields, ...)"},
    },
    "replacement of dead replicas": {
        "verl.single_controller.ray.base:RayResourcePool": {
            "get_placement_groups": (
                "f\"{self.name_prefix}verl_group_{'_'.join([str(count) for count in self._store])}:\"",
                "name=pg_name_prefix + str(idx)",
                "ray.get([pg.ready() for pg in pgs]) self.pgs =",
            )
        },
        f"{_CHECKPOINT}:CheckpointEngineManager": {
            "__init__": ("(self, config, actor_wg, replicas)", "self.replicas = replicas"),
            "update_weights": "(global_steps, ...)",
        },
    },
    "update in parts": {
        f"{_TRAINER}:PPOTrainer": {
            "_init_resource_pool_mgr": ("(self)", "self.role_worker_mapping[role] = ray.remote(ActorRolloutRefWorker)"),
            "_update_actor": (
                "(self, batch, metrics)",
                "self.actor_rollout_wg.update_actor(batch)",
                'output.pop("actor/mfu")',
            ),
            "_compute_reward_colocate": "(batch, metrics, ...)",
            "_compute_ref_log_prob": "(self, batch, metrics)",
            "_compute_advantage": "(self, batch, metrics)",
        },
        "verl.trainer.ppo.padding_utils": {"upsample_batch_to_divisible_size": "(batch, batch_multiple, eos_token_id)"},
        f"{_WORKERS}:ActorRolloutRefWorker": {
            "compute_log_prob": "(self, data)",
            "compute_ref_log_prob": "(self, data)",
            "update_actor": "(self, data)",
        },
        "verl.utils.transferqueue_utils": {
            "async_kv_batch_meta2batch_meta": ("fields = meta.fields", "batch_meta.select_fields(fields)")
        },
        "transfer_queue.client:TransferQueueClient": {"kv_retrieve_meta": "(keys, partition_id, ...)"},
        f"{_ENGINE}.megatron.transformer_impl:MegatronEngine": {
            "_build_tf_config": ("self.tf_config = tf_config", "self.engine_config.dynamic_context_parallel"),
            "forward_backward_batch": "num_batches_divided_by = self.tf_config.microbatch_group_size_per_vp_stage",
        },
        f"{_WORKERS}:TrainingWorker": {
            "train_batch": (
                "use_remove_padding=",
                "max_token_len_per_gpu=",
                "micro_batch_size_per_gpu=",
                "use_fused_kernels=",
            ),
            "_postprocess_output": "(output, global_token_num, delta_time, forward_only, images_seqlens, ...)",
        },
        f"{_ENGINE}.base:BaseEngine": {
            "train_batch": ("self.optimizer_zero_grad()", "self.forward_backward_batch(", "self.optimizer_step()")
        },
        f"{_ENGINE}.base:BaseEngineCtx": {"__init__": '"zero_grad_on_exit", True'},
        f"{_ENGINE}.fsdp.transformer_impl:FSDPEngine": {
            "forward_backward_batch": "tu.assign_non_tensor(data, batch_num_tokens=batch_num_tokens.item())",
            "is_param_offload_enabled.fget": "return self._is_offload_param",
        },
        "verl.workers.utils.losses": {
            "ppo_loss": 'config.global_batch_info["batch_num_tokens"] = data["batch_num_tokens"]'
        },
    },
    "CPU platform": {
        "verl.plugin.platform.platform_manager:PlatformRegistry": {"register": "(platform)"},
        f"{_ENGINE}.base:EngineRegistry": {"register": "(model_type, backend, device, vendor)"},
        f"{_ENGINE}.fsdp.transformer_impl": {"FSDPEngineWithLMHead": (), "FSDPEngineWithValueHead": ()},
    },
    "relay of weights": {
        f"{_CHECKPOINT}:CheckpointEngineRegistry": {"register": "(backend)"},
        "verl.workers.rollout.utils": {"ensure_async_iterator": ()},
        "verl.utils.device": {"get_device_id": (), "get_device_name": ()},
        f"{_CHECKPOINT}:CheckpointEngineWorker": {
            "update_weights": "(self, global_steps)",
            "execute_checkpoint_engine": "(self, method, *args, **kwargs)",
        },
        "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer": {
            "release_kv_cache": (),
            "resume_kv_cache": (),
            "resume_engine_generation": (),
            "open_submission_gate": (),
        },
    },
}
