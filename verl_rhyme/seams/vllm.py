"""vLLM: drafting, coupled sampling, requests."""

from __future__ import annotations

from verl_rhyme.seam_check import Seam

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
    # ---- coupled sampling ----
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
    Seam(
        "vllm.v1.engine.output_processor:OutputProcessor.__init__",
        "rhyme_sorted: whether the engine knows a request",
        contains=("self.external_req_ids:",),
    ),
)
