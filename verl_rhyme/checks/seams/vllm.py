"""vLLM: drafting, sampling, requests."""

from __future__ import annotations

from verl_rhyme.checks.seam_check import Seam

_RUNNER = "vllm.v1.worker.gpu_model_runner"

SEAMS: tuple[Seam, ...] = (
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
        "input of our proposer, and hidden states for our draft head",
        signature="(self, scheduler_output, sampled_token_ids, sampling_metadata, hidden_states, "
        "sample_hidden_states, aux_hidden_states, spec_decode_metadata, common_attn_metadata, slot_mappings)",
        contains=(
            'elif spec_config.method == "custom_class":',
            "self.drafter).propose(sampled_token_ids, self.input_batch.num_tokens_no_spec, "
            "self.input_batch.token_ids_cpu, slot_mappings=slot_mappings,)",
        ),
    ),
    # ---- the draft head ----
    Seam(
        f"{_RUNNER}:GPUModelRunner.execute_model",
        "our draft head: hidden states of the sampled positions",
        contains=("sample_hidden_states = hidden_states[logits_indices]",),
    ),
    Seam(
        "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding.__init__",
        "our draft head: rows of the policy's embedding",
        contains=("self.shard_indices = self._get_indices(", "self.tp_size ="),
    ),
    Seam(
        "vllm.model_executor.layers.logits_processor:LogitsProcessor.__init__",
        "our draft head: scale of the logits",
        contains=("self.scale = scale",),
    ),
    Seam(
        f"{_RUNNER}:GPUModelRunner.__init__",
        "our proposer: requests of the batch's rows",
        contains=(
            "self.drafter = create_custom_proposer(",
            "self.requests: dict[str, CachedRequestState] = {}",
            "self.effective_drafter_max_model_len = self.max_model_len",
            "self.rejection_sampler = RejectionSampler(",  # our sampler
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
        "our proposer: requests of the batch's rows",
        has=("req_ids",),
        contains=(
            "self.spec_token_ids:",
            "self.num_prompt_tokens =",
            "self.num_tokens_no_spec =",
            "self.token_ids_cpu =",
        ),
    ),
    # ---- sampling ----
    Seam(
        "vllm.v1.sample.sampler:Sampler.__init__",
        "our sampler",
        signature="(self, logprobs_mode, use_fp64_gumbel)",
        contains=("self.logprobs_mode = logprobs_mode", "self.use_fp64_gumbel = use_fp64_gumbel"),
    ),
    Seam(
        "vllm.v1.sample.sampler:Sampler.forward",
        "our sampler",
        signature="(self, logits, sampling_metadata, predict_bonus_token, logprobs_mode_override)",
    ),
    Seam(
        "vllm.v1.sample.sampler:Sampler.gather_logprobs",
        "our sampler: log-probabilities of a token",
        contains=(
            "indices = torch.cat((token_ids, topk_indices), dim=1)",
            "token_ranks = batched_count_greater_than(logprobs, token_logprobs)",
        ),
    ),
    Seam(
        "vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p",
        "our sampler: top-k and top-p masks",
        signature="(logits, k, p)",
    ),
    Seam(
        "vllm.v1.sample.logits_processor.builtin:MinPLogitsProcessor.apply",
        "our sampler: min-p at drafted positions",
        contains=("if not self.min_p_count:", "adjusted_min_p = max_probabilities.mul_(self.min_p)"),
    ),
    Seam(
        "vllm.v1.sample.logits_processor.builtin:LogitBiasLogitsProcessor.__init__",
        "our sampler: logit bias at drafted positions",
        contains=("self.biases: dict[int, dict[int, float]] = {}",),
    ),
    Seam(
        "vllm.v1.sample.logits_processor.builtin:MinTokensLogitsProcessor.apply_with_spec_decode",
        "our sampler: min_tokens at drafted positions",
        accepts=("logits", "num_draft_tokens"),
        contains=("n_mask = int(min(max(remaining, 0), num_draft_arr[req_idx]))",),
    ),
    Seam(
        "vllm.v1.sample.logits_processor:build_logitsprocs",
        "our sampler: logits processors that speculation leaves out",
        contains=("return LogitsProcessors([MinTokensLogitsProcessor(vllm_config, device, is_pin_memory)])",),
    ),
    Seam(
        "vllm.v1.sample.logits_processor.state:LogitsProcessors",
        "our sampler: logits processors that speculation leaves out",
        has=("all",),
        contains=("self.argmax_invariant:", "self.non_argmax_invariant:"),
    ),
    Seam(
        "vllm.v1.engine.input_processor:InputProcessor._validate_params",
        "our sampler: min-p and logit bias with speculation",
        contains=("params.verify(self.model_config, self.speculative_config,",),
    ),
    Seam(
        "vllm.v1.sample.rejection_sampler:RejectionSampler.__init__",
        "our sampler: verification",
        signature="(self, sampler, spec_config, device)",
        contains=("self.synthetic_mode =",),
    ),
    Seam(
        "vllm.v1.sample.rejection_sampler:RejectionSampler.forward",
        "our sampler: verification",
        signature="(self, metadata, draft_probs, logits, sampling_metadata)",
    ),
    Seam(
        "vllm.v1.sample.rejection_sampler:RejectionSampler.apply_logits_processors",
        "our sampler: penalties, bad words, allowed tokens at drafted positions",
        signature="(self, logits, sampling_metadata, metadata)",
        contains=(
            "output_token_ids = self._combine_outputs_with_spec_tokens(",
            "repeat_indices_cpu = original_indices.repeat_interleave(num_draft_tokens)",
            "logits, bad_words_token_ids, output_token_ids, metadata.num_draft_tokens",
            "logits = processor.apply_with_spec_decode(logits, metadata.num_draft_tokens)",
        ),
    ),
    Seam(
        "vllm.v1.sample.rejection_sampler:RejectionSampler._combine_outputs_with_spec_tokens",
        "our sampler: the tokens before each drafted position",
        contains=(
            "if len(spec) == 0: continue",
            "for i in range(len(spec) - 1): result.append([*result[-1], spec[i]])",
        ),
    ),
    Seam(
        "vllm.v1.sample.rejection_sampler:RejectionSampler.parse_output",
        "our sampler: tokens kept of a rejected row",
        contains=(
            "output_token_ids_np != PLACEHOLDER_TOKEN_ID",
            "filtered_tensors = logprobs_tensors.filter(valid_mask.flatten())",
        ),
    ),
    Seam(
        "vllm.v1.spec_decode.metadata:SpecDecodeMetadata",
        "our sampler: logits of each request",
        accepts=("draft_token_ids", "num_draft_tokens"),
    ),
    Seam(
        f"{_RUNNER}:GPUModelRunner._calc_spec_decode_metadata",
        "our sampler: a request's drafted positions and the next one are contiguous",
        contains=("bonus_logits_indices = cu_num_sampled_tokens - 1",),
    ),
    Seam(
        f"{_RUNNER}:GPUModelRunner._sample",
        "our sampler: every token passes one of the two samplers",
        signature="(self, logits, spec_decode_metadata)",
        contains=(
            "return self.sampler(logits=logits, sampling_metadata=sampling_metadata,)",
            "self.rejection_sampler(spec_decode_metadata, draft_probs, logits, sampling_metadata,)",
        ),
    ),
    Seam(
        f"{_RUNNER}:GPUModelRunner._bookkeeping_sync",
        "our sampler: the position of the next token",
        contains=(
            "sampled_ids = [-1] if req_idx not in invalid_req_indices_set else None",
            "self.input_batch.num_tokens_no_spec[req_idx] = end_idx",
        ),
    ),
    Seam(
        "vllm.v1.worker.gpu_input_batch:InputBatch.add_request",
        "our sampler: the position of the next token, greedy rows",
        contains=(
            "self.num_tokens_no_spec[req_index] = request.num_tokens",
            "self.temperature_cpu[req_index] = 0.0",
        ),
    ),
    Seam(
        "vllm.v1.engine.input_processor:InputProcessor.assign_request_id",
        "our sampler: fresh noise for requests without a key",
        contains=('request.request_id = f"{request.external_req_id}-{random_uuid():.8}"',),
    ),
    # ---- requests ----
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
    Seam("vllm.v1.engine.async_llm:AsyncLLM.check_health", "whether an engine has died", signature="(self)"),
    Seam(
        "vllm.v1.engine.async_llm:AsyncLLM.is_sleeping",
        "whether an engine hangs: a healthy one answers between two steps",
        signature="(self)",
        contains=("self.engine_core.is_sleeping_async()",),
    ),
    Seam("vllm.v1.engine.exceptions:EngineDeadError", "whether an engine has died"),  # also by its name
    Seam(
        "vllm.v1.engine.output_processor:OutputProcessor.propagate_error",
        "tokens that requests have generated when their engine hangs",
        signature="(self, e)",
        contains=("state.queue.put(e)",),
    ),
    Seam(
        "vllm.v1.engine.output_processor:OutputProcessor.__init__",
        "pipeline: whether the engine knows a request",
        contains=("self.external_req_ids:",),
    ),
    Seam(
        "vllm.v1.engine.output_processor:OutputProcessor.add_request",
        "stop strings of a continued response: its earlier text",
        signature="(self, request, prompt, parent_req, request_index, queue)",
        contains=("self.request_states[request_id] = req_state",),
    ),
    Seam(
        "vllm.v1.engine.detokenizer:BaseIncrementalDetokenizer.update",
        "stop strings of a continued response",
        signature="(self, new_token_ids, stop_terminated)",
        contains=(
            "self.token_ids.append(new_token_id)",
            "output_text=self.output_text,",
            "stop=self.stop,",
        ),
    ),
    Seam(
        "vllm.v1.engine.detokenizer:SlowIncrementalDetokenizer",
        "stop strings of a continued response: tokens of the current request",
        contains=("return self.token_ids[self.prompt_len :]", "return len(self.token_ids) - self.prompt_len"),
    ),
    Seam(
        "vllm.v1.engine.detokenizer:BaseIncrementalDetokenizer.get_next_output_text",
        "stop strings of a continued response: earlier text is not returned again",
        contains=("last_offset = self._last_output_text_offset",),
    ),
)
