"""Every place of verl and vLLM that verl-rhyme leans on, and the shape it must have.

``verl-rhyme doctor`` and ``tests/contract/test_seams.py`` check each entry against what is installed.  To add one,
append a :class:`Seam` to :data:`SEAMS`: where it is, what of ours stands on it, and the part of its shape that we use.
"""

from __future__ import annotations

from verl_rhyme.seam_check import RAY_CLASS, Seam

_TRAINER = "verl.trainer.ppo.v1.trainer_base"
_REPLAY = "verl.trainer.ppo.v1.replay_buffer"
_AGENT = "verl.trainer.ppo.v1.agent_loop_tq"
_CLIENT = "verl.workers.rollout.llm_server"
_SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server"
_CHECKPOINT = "verl.checkpoint_engine.base"
_RUNNER = "vllm.v1.worker.gpu_model_runner"

_GENERATE = (
    "(self, request_id, *, prompt_ids, sampling_params, image_data, video_data, audio_data, mm_processor_kwargs, "
    "**kwargs)"
)

SEAMS: tuple[Seam, ...] = (
    # ---- verl: start of every process ----
    Seam("verl.utils.config:validate_config", "the check before Ray starts", accepts=("config",)),
    Seam(
        "verl.trainer.main_ppo:main.__wrapped__",
        "the check before Ray starts",
        contains=("validate_config(config=config", "run_ppo(config, task_runner_class=TaskRunnerV1)"),
    ),
    Seam("verl.workers.config:RolloutConfig", "where our configuration travels", has=("custom",)),
    # ---- verl: trainer ----
    Seam(f"{_TRAINER}:TRAINER_REGISTRY", "our trainers under verl's names", has=("update",)),
    Seam(f"{_TRAINER}:register_trainer", "trainer modes of our own", signature="(name)"),
    Seam(f"{_TRAINER}:get_trainer_cls", "our trainers under verl's names", contains=("return TRAINER_REGISTRY[name]",)),
    Seam(f"{_TRAINER}:PPOTrainer.__init__", "trainer base", signature="(self, config)"),
    Seam(
        f"{_TRAINER}:PPOTrainer._setup",
        "order of set-up: tokenizer first, checkpoint last",
        signature="(self)",
        contains=("self._init_tokenizer()", "self._load_checkpoint()"),
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
        "rewards are known when old log-probs are computed",
        signature="(self, metrics, timing_raw, sample_batch_size)",
        contains=(
            "self.on_sample_begin()",
            "self.replay_buffer.sample(",
            "self.on_sample_end()",
            "self._compute_old_log_prob(batch, metrics=metrics)",
        ),
    ),
    Seam(
        f"{_TRAINER}:PPOTrainer._compute_old_log_prob",
        "recorder: first stage after the rewards",
        signature="(self, batch, metrics)",
    ),
    Seam(f"{_TRAINER}:PPOTrainer.on_step_begin", "trainer modes", signature="(self)"),
    Seam(f"{_TRAINER}:PPOTrainer.on_step_end", "recorder: end of a step", signature="(self)"),
    Seam(f"{_TRAINER}:PPOTrainer.on_sample_begin", "trainer modes", signature="(self)"),
    Seam(f"{_TRAINER}:PPOTrainer.on_sample_end", "trainer modes", signature="(self)"),
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
    # ---- verl: replay buffer and queue ----
    Seam(f"{_REPLAY}:ReplayBuffer.__init__", "poll interval", contains=("self.poll_interval = poll_interval",)),
    Seam(f"{_REPLAY}:ReplayBuffer._wait_for_next_poll", "poll interval", contains=("time.sleep(self.poll_interval)",)),
    Seam(
        f"{_REPLAY}:ReplayBuffer.sample",
        "event log of validation requests",
        signature="(self, global_steps, partition_id, batch_size)",
    ),
    Seam(
        f"{_REPLAY}:ReplayBufferAsync.sample",
        "event log of validation requests",
        signature="(self, global_steps, partition_id, batch_size)",
    ),
    Seam("transfer_queue:kv_batch_get", "recorder", accepts=("keys", "partition_id", "select_fields")),
    # ---- verl: the sorted pipeline ----
    Seam(f"{_TRAINER}:PPOTrainer.prepare_step", "rhyme_sorted: what starts a step", signature="(self)"),
    Seam(
        f"{_TRAINER}:PPOTrainer._balance_batch",
        "rhyme_sorted: mini-batches in order of length",
        signature="(self, batch, metrics, logging_prefix, keep_minibatch)",
        contains=('role, worker_group = "actor", self.actor_rollout_wg', "upsample_batch_to_divisible_size("),
    ),
    Seam(
        f"{_TRAINER}:PPOTrainer._next_train_batch",
        "rhyme_sorted: prompts one by one",
        signature="(self, num_prompts)",
    ),
    Seam(f"{_TRAINER}:PPOTrainer._reissue_inflight_prompts", "rhyme_sorted: starts them itself", accepts=("self",)),
    Seam(f"{_TRAINER}:PPOTrainer._resolve_filter_groups_metric", "rhyme_sorted: DAPO's filter", signature="(self)"),
    Seam(
        "verl.workers.engine_workers:TrainingWorker.train_mini_batch",
        "rhyme_sorted: the k-th mini-batch is the k-th piece of each rank's part",
        contains=("mini_batch_size_per_gpu = mini_batch_size // self.engine.get_data_parallel_size()",),
    ),
    Seam(
        f"{_REPLAY}:ReplayBuffer._sync_metadata_from_transfer_queue",
        "rhyme_sorted: tags of all partitions",
        contains=("data = tq.kv_list()", "partition[key].update(tag)"),
    ),
    Seam(
        f"{_REPLAY}:ReplayBuffer._dapo_filtered_keys",
        "rhyme_sorted: DAPO's filter",
        signature="(self, partition_id)",
        contains=("finished_uids = self.finished_keys[partition_id]",),
    ),
    Seam(
        f"{_REPLAY}:ReplayBuffer._evict_terminal_groups",
        "rhyme_sorted: DAPO's filter",
        signature="(self, global_steps, partition_id, eviction_reasons)",
    ),
    Seam("transfer_queue:kv_batch_put", "rhyme_sorted", accepts=("keys", "partition_id", "fields", "tags")),
    Seam("transfer_queue:async_kv_batch_put", "rhyme_sorted", accepts=("keys", "partition_id", "fields", "tags")),
    Seam("transfer_queue:kv_clear", "rhyme_sorted", accepts=("keys", "partition_id")),
    Seam(
        f"{_CHECKPOINT}:CheckpointEngineManager.abort_replicas",
        "rhyme_sorted: cutting samples short",
        accepts=("reject_request",),
    ),
    Seam(f"{_CHECKPOINT}:CheckpointEngineManager.resume_generation_replicas", "rhyme_sorted", signature="(self)"),
    Seam(
        f"{_SERVER}:vLLMHttpServer.abort_all_requests",
        "rhyme_sorted: cutting samples short without waiting for the queue",
        contains=("while self._admitting > 0:", "await self.engine.pause_generation("),
    ),
    Seam(
        "vllm.v1.engine.output_processor:OutputProcessor.__init__",
        "rhyme_sorted: whether the engine knows a request",
        contains=("self.external_req_ids:",),
    ),
    # ---- verl: platform, engines, weight transfer ----
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
    Seam(f"{_CHECKPOINT}:CheckpointEngineRegistry.register", "weights through shared memory", signature="(backend)"),
    Seam(
        f"{_CHECKPOINT}:CheckpointEngine",
        "weights through shared memory",
        implemented_by="verl_rhyme.workers.shm_checkpoint_engine:ShmCheckpointEngine",
    ),
    Seam("verl.workers.rollout.utils:ensure_async_iterator", "weights through shared memory"),
    # ---- verl: rollout servers and clients ----
    Seam("verl.workers.rollout.replica:RolloutReplicaRegistry.register", "our replica", signature="(name, loader)"),
    Seam(
        "verl.workers.rollout.replica:TokenOutput",
        "counts of each request",
        accepts=("token_ids", "stop_reason", "extra_fields"),
    ),
    Seam(
        f"{_SERVER}:vLLMReplica.__init__",
        "our server",
        contains=("self.server_class = ray.remote(vLLMHttpServer)",),
    ),
    Seam(
        f"{_SERVER}:vLLMHttpServer.generate",
        "identity and counts of each request",
        signature="(self, prompt_ids, sampling_params, request_id, image_data, video_data, audio_data, "
        "mm_processor_kwargs, priority, kv_transfer_params)",
        contains=(
            "SamplingParams(max_tokens=max_tokens, **sampling_params)",
            "self.engine.generate(",
            "if not admitted: admitted = True self._admitting -= 1",  # a first output that says nothing
            "if not final_res.outputs: return TokenOutput( token_ids=[],",
        ),
    ),
    Seam(f"{_SERVER}:vLLMHttpServer._post_init", "our server", signature="(self, cuda_visible_devices)"),
    Seam(
        f"{_SERVER}:vLLMHttpServer._preprocess_engine_kwargs",
        "speculative_config of our proposer",
        signature="(self, engine_kwargs)",
    ),
    Seam(
        f"{_SERVER}:vLLMHttpServer._get_worker_extension_cls",
        "our worker extension",
        signature="(self)",
        contains=('"verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension"',),
    ),
    Seam(
        f"{_SERVER}:vLLMHttpServer.launch_server",
        "our engine settings come last",
        contains=("self._preprocess_engine_kwargs(engine_kwargs)", "self._get_worker_extension_cls()"),
    ),
    Seam(
        f"{_SERVER}:vLLMHttpServer.run_server",
        "connecting the proposer before the first request",
        signature="(self, args)",
        contains=('method="monkey_patch_model"', "self.engine = engine_client"),
    ),
    Seam(f"{_SERVER}:vLLMHttpServer.__init__", "policy version of a request", contains=("self.global_steps = None",)),
    Seam(f"{_SERVER}:vLLMHttpServer.set_global_steps", "policy version of a request", signature="(self, global_steps)"),
    Seam(
        "verl.workers.rollout.vllm_rollout.utils:vLLMColocateWorkerExtension",
        "our worker extension",
        has=("monkey_patch_model", "update_weights_from_ipc"),
    ),
    Seam(f"{_CLIENT}:LLMServerClient.generate", "identity of each request", signature=_GENERATE),
    Seam(
        f"{_CLIENT}:FullyAsyncLLMServerClient.generate",
        "one record for each attempt of a resumed request",
        signature=_GENERATE,
        contains=("while True:", "await super().generate("),
    ),
    Seam(
        f"{_CLIENT}:LLMServerManager.get_client",
        "the asynchronous modes' client",
        signature="(self, client_cls, **kwargs)",
    ),
    Seam(f"{_CLIENT}:LLMServerManager.get_replicas", "request slots", signature="(self)"),
    Seam(
        f"{_AGENT}:AgentLoopManagerTQ.__init__",
        "our agent loop worker",
        contains=("self.agent_loop_workers_class = AgentLoopWorkerTQ",),
    ),
    Seam(
        f"{_AGENT}:AgentLoopWorkerTQ{RAY_CLASS}._run_agent_loop",
        "sample number of each request",
        signature="(self, sampling_params, trajectory, *, agent_name, trace, **kwargs)",
    ),
    Seam(
        f"{_AGENT}:AgentLoopWorkerTQ{RAY_CLASS}._run_prompt",
        "sample number of each request; rhyme_sorted runs its own",
        signature="(self, prompt, sampling_params, trajectory, trace)",
        contains=("session_id", '"__rollout_n__"', '"__do_sample__"'),
    ),
    Seam(
        f"{_AGENT}:AgentLoopWorkerTQ{RAY_CLASS}._agent_loop_postprocess",
        "trajectories as verl stores them",
        signature="(self, output, validate, **kwargs)",
        contains=('keys.append(f"{uid}_{session_id}_{i}")', '"max_global_steps":', "field = output.as_dict()"),
    ),
    # ---- vLLM ----
    Seam(
        "vllm.v1.spec_decode.custom_class_proposer:create_custom_proposer",
        "how our proposer is built",
        signature="(vllm_config)",
        contains=("user_class(vllm_config)",),
    ),
    Seam(
        "vllm.config.speculative:SpeculativeConfig.__post_init__",
        "speculative_config of our proposer",
        contains=('self.method == "custom_class"',),
    ),
    Seam(
        f"{_RUNNER}:GPUModelRunner.propose_draft_token_ids",
        "what our proposer is given",
        contains=(
            'elif spec_config.method == "custom_class":',
            "self.drafter).propose(sampled_token_ids, self.input_batch.num_tokens_no_spec, "
            "self.input_batch.token_ids_cpu, slot_mappings=slot_mappings,)",
        ),
    ),
    Seam(
        f"{_RUNNER}:GPUModelRunner.__init__",
        "our proposer finds the rows' requests",
        contains=(
            "self.drafter = create_custom_proposer(",
            "self.requests: dict[str, CachedRequestState] = {}",
            "self.effective_drafter_max_model_len = self.max_model_len",
            "self.rejection_sampler = RejectionSampler(",  # coupled sampling
            "self.use_async_spec_decode =",
        ),
    ),
    Seam(
        f"{_RUNNER}:GPUModelRunner._input_fits_in_drafter",
        "drafting near max_model_len",
        signature="(self, common_attn_metadata)",
        contains=("<= self.effective_drafter_max_model_len",),
    ),
    Seam(
        "vllm.v1.worker.gpu_input_batch:InputBatch",
        "our proposer finds the rows' requests",
        has=("req_ids",),
        contains=(
            "self.spec_token_ids:",
            "self.num_prompt_tokens =",
            "self.num_tokens_no_spec =",
            "self.token_ids_cpu =",
        ),
    ),
    # ---- vLLM: coupled sampling ----
    Seam(
        "vllm.v1.sample.sampler:Sampler.__init__",
        "coupled sampling: where tokens are drawn",
        accepts=("logprobs_mode",),
        contains=("self.topk_topp_sampler = TopKTopPSampler(", "self.logprobs_mode = logprobs_mode"),
    ),
    Seam(
        "vllm.v1.sample.sampler:Sampler.sample",
        "coupled sampling: temperature before, greedy rows after",
        contains=(
            "logits = self.apply_temperature(",
            "random_sampled, processed_logprobs = self.topk_topp_sampler(logits, sampling_metadata.generators, "
            "sampling_metadata.top_k, sampling_metadata.top_p,)",
            "sampling_metadata.temperature < _SAMPLING_EPS, greedy_sampled, random_sampled,",
        ),
    ),
    Seam(
        "vllm.v1.sample.sampler:Sampler.forward",
        "coupled sampling: the bonus token",
        accepts=("logits", "sampling_metadata", "predict_bonus_token", "logprobs_mode_override"),
    ),
    Seam(
        "vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler.forward_native",
        "coupled sampling: same masks, same processed log-probabilities",
        signature="(self, logits, generators, k, p)",
        contains=(
            "logits = apply_top_k_top_p(logits, k, p)",
            'if self.logprobs_mode == "processed_logits": logits_to_return = logits',
            "logits_to_return = logits.log_softmax(dim=-1, dtype=torch.float32)",
        ),
    ),
    Seam(
        "vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p",
        "coupled sampling: same masks",
        signature="(logits, k, p)",
    ),
    Seam(
        "vllm.v1.sample.rejection_sampler:RejectionSampler.__init__",
        "coupled sampling: verification",
        signature="(self, sampler, spec_config, device)",
        contains=("self.is_processed_logprobs_mode =", "self.synthetic_mode ="),
    ),
    Seam(
        "vllm.v1.sample.rejection_sampler:RejectionSampler.forward",
        "coupled sampling: verification is this, but for the draw",
        signature="(self, metadata, draft_probs, logits, sampling_metadata)",
        contains=(
            "bonus_sampler_output = self.sampler(logits=bonus_logits, sampling_metadata=replace(sampling_metadata, "
            "max_num_logprobs=-1,), predict_bonus_token=True,",
            "raw_target_logits = logits[target_logits_indices]",
            "target_logits = self.apply_logits_processors(target_logits, sampling_metadata, metadata)",
            "target_logits = apply_sampling_constraints(target_logits, metadata.cu_num_draft_tokens, "
            "sampling_metadata,)",
            "logprobs_tensors = self._get_logprobs_tensors(sampling_metadata.max_num_logprobs, metadata, logits, "
            "target_logits if self.is_processed_logprobs_mode else raw_target_logits, "
            "bonus_sampler_output.logprobs_tensors.logprobs, output_token_ids,)",
        ),
    ),
    Seam(
        "vllm.v1.sample.rejection_sampler:RejectionSampler.parse_output",
        "coupled sampling: what is left of a rejected row",
        contains=("output_token_ids_np != PLACEHOLDER_TOKEN_ID",),
    ),
    Seam(
        "vllm.v1.sample.rejection_sampler:apply_sampling_constraints",
        "coupled sampling: the drafted positions' temperature and masks",
        signature="(logits, cu_num_draft_tokens, sampling_metadata)",
    ),
    Seam(
        "vllm.v1.spec_decode.metadata:SpecDecodeMetadata",
        "coupled sampling: which logits are whose",
        accepts=(
            "draft_token_ids",
            "num_draft_tokens",
            "cu_num_draft_tokens",
            "target_logits_indices",
            "bonus_logits_indices",
        ),
    ),
    Seam(
        f"{_RUNNER}:GPUModelRunner._sample",
        "coupled sampling: every token goes through one of the two",
        signature="(self, logits, spec_decode_metadata)",
        contains=(
            "return self.sampler(logits=logits, sampling_metadata=sampling_metadata,)",
            "self.rejection_sampler(spec_decode_metadata, draft_probs, logits, sampling_metadata,)",
        ),
    ),
    Seam(
        f"{_RUNNER}:GPUModelRunner._bookkeeping_sync",
        "coupled sampling: the position of the next token",
        contains=(
            "sampled_ids = [-1] if req_idx not in invalid_req_indices_set else None",
            "self.input_batch.num_tokens_no_spec[req_idx] = end_idx",
        ),
    ),
    Seam(
        "vllm.v1.worker.gpu_input_batch:InputBatch.add_request",
        "coupled sampling: the position of the next token, greedy rows",
        contains=(
            "self.num_tokens_no_spec[req_index] = request.num_tokens",
            "self.temperature_cpu[req_index] = 0.0",
        ),
    ),
    Seam(
        "vllm.v1.engine.input_processor:InputProcessor.assign_request_id",
        "coupled sampling: fresh noise for requests without a key",
        contains=('request.request_id = f"{request.external_req_id}-{random_uuid():.8}"',),
    ),
    # ---- vLLM: requests ----
    Seam(
        "vllm.v1.worker.gpu_input_batch:CachedRequestState",
        "prompt key, token budget",
        accepts=("prompt_token_ids", "sampling_params"),
    ),
    Seam(
        "vllm.v1.worker.cpu_model_runner:CPUModelRunner.load_model",
        "our proposer on a CPU",
        contains=("self.drafter.load_model(self.model)",),
    ),
    Seam("vllm.sampling_params:SamplingParams", "identity of each request", accepts=("extra_args", "max_tokens")),
    Seam(
        "vllm.v1.engine.async_llm:AsyncLLM.collective_rpc",
        "counts of each request",
        accepts=("method", "args"),
        contains=("return await self.engine_core.collective_rpc_async(",),
    ),
    Seam(
        "vllm.v1.engine.async_llm:AsyncLLM.generate",
        "times of each request",
        accepts=("prompt", "sampling_params", "request_id"),
    ),
    Seam(
        "vllm.v1.metrics.stats:RequestStateStats",
        "times of each request",
        accepts=("scheduled_ts", "first_token_ts"),
    ),
    Seam(
        "vllm.v1.worker.worker_base:WorkerWrapperBase.init_worker",
        "our worker extension",
        contains=("worker_class.__bases__ = worker_class.__bases__ + (worker_extension_cls,)",),
    ),
)
