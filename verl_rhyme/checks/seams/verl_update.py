"""verl: the actor's update, which streaming splits into parts."""

from __future__ import annotations

from verl_rhyme.checks.seam_check import Seam

_TRAINER = "verl.trainer.ppo.v1.trainer_base:PPOTrainer"
_WORKERS = "verl.workers.engine_workers"
_ENGINE = "verl.workers.engine.base"

SEAMS: tuple[Seam, ...] = (
    Seam(
        f"{_TRAINER}._init_resource_pool_mgr",
        "our actor worker instead of verl's",
        signature="(self)",
        contains=("self.role_worker_mapping[role] = ray.remote(ActorRolloutRefWorker)",),
    ),
    Seam(
        f"{_TRAINER}._update_actor",
        "data sent with a part of an update",
        signature="(self, batch, metrics)",
        contains=("self.actor_rollout_wg.update_actor(batch)", 'output.pop("actor/mfu")'),
    ),
    Seam(f"{_TRAINER}._compute_reward_colocate", "reward of a part", accepts=("batch", "metrics")),
    Seam(f"{_TRAINER}._compute_ref_log_prob", "reference log-probs of a part", signature="(self, batch, metrics)"),
    Seam(f"{_TRAINER}._compute_advantage", "advantages of a part", signature="(self, batch, metrics)"),
    Seam(
        "verl.trainer.ppo.padding_utils:upsample_batch_to_divisible_size",
        "parts that are divisible by the ranks",
        signature="(batch, batch_multiple, eos_token_id)",
    ),
    Seam(f"{_WORKERS}:ActorRolloutRefWorker.compute_log_prob", "rows held by the worker", signature="(self, data)"),
    Seam(f"{_WORKERS}:ActorRolloutRefWorker.compute_ref_log_prob", "rows held by the worker", signature="(self, data)"),
    Seam(
        "verl.utils.transferqueue_utils:async_kv_batch_meta2batch_meta",
        "a stage fetches the requested fields",
        contains=("fields = meta.fields", "batch_meta.select_fields(fields)"),
    ),
    Seam(
        "transfer_queue.client:TransferQueueClient.kv_retrieve_meta", "fields of rows", accepts=("keys", "partition_id")
    ),
    Seam(f"{_WORKERS}:ActorRolloutRefWorker.update_actor", "an update in parts", signature="(self, data)"),
    Seam(
        "verl.workers.engine.megatron.transformer_impl:MegatronEngine._build_tf_config",
        "Megatron settings that prevent accumulation over parts",
        contains=("self.tf_config = tf_config", "self.engine_config.dynamic_context_parallel"),
    ),
    Seam(
        "verl.workers.engine.megatron.transformer_impl:MegatronEngine.forward_backward_batch",
        "micro-batch groups of an interleaved pipeline",
        contains=("num_batches_divided_by = self.tf_config.microbatch_group_size_per_vp_stage",),
    ),
    Seam(
        f"{_WORKERS}:TrainingWorker.train_batch",
        "settings sent with the data of an update",
        contains=("use_remove_padding=", "max_token_len_per_gpu=", "micro_batch_size_per_gpu=", "use_fused_kernels="),
    ),
    Seam(
        f"{_WORKERS}:TrainingWorker._postprocess_output",
        "metrics of an update in parts",
        accepts=("output", "global_token_num", "delta_time", "forward_only", "images_seqlens"),
    ),
    Seam(
        f"{_ENGINE}:BaseEngine.train_batch",
        "stages of an optimizer step",
        contains=("self.optimizer_zero_grad()", "self.forward_backward_batch(", "self.optimizer_step()"),
    ),
    Seam(f"{_ENGINE}:BaseEngineCtx.__init__", "gradients stay between parts", contains=('"zero_grad_on_exit", True',)),
    Seam(
        "verl.workers.engine.fsdp.transformer_impl:FSDPEngine.forward_backward_batch",
        "token count of the loss average",
        contains=("tu.assign_non_tensor(data, batch_num_tokens=batch_num_tokens.item())",),
    ),
    Seam(
        "verl.workers.engine.fsdp.transformer_impl:FSDPEngine.is_param_offload_enabled.fget",
        "gradients stay on the device between parts",
        contains=("return self._is_offload_param",),
    ),
    Seam(
        "verl.workers.utils.losses:ppo_loss",
        "token count of the loss average",
        contains=('config.global_batch_info["batch_num_tokens"] = data["batch_num_tokens"]',),
    ),
)
