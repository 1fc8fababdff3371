"""vLLM: drafting, sampling, requests."""

from __future__ import annotations

from tests.contract.seam_check import Shapes

_RUNNER = "vllm.v1.worker.gpu_model_runner"
_SAMPLE = "vllm.v1.sample"
_BATCH = "vllm.v1.worker.gpu_input_batch"
_ENGINE = "vllm.v1.engine"

SEAMS: Shapes = {
    "drafting": {
        "vllm.v1.spec_decode.custom_class_proposer": {
            "create_custom_proposer": ("(vllm_config)", "user_class(vllm_config)")
        },
        f"{_RUNNER}:GPUModelRunner": {
            "propose_draft_token_ids": (
                "(self, scheduler_output, sampled_token_ids, sampling_metadata, hidden_states, "
                "sample_hidden_states, aux_hidden_states, spec_decode_metadata, common_attn_metadata, slot_mappings)",
                'elif spec_config.method == "custom_class":',
                "self.drafter).propose(sampled_token_ids, self.input_batch.num_tokens_no_spec, "
                "self.input_batch.token_ids_cpu, slot_mappings=slot_mappings,)",
            ),
            "__init__": (
                "self.drafter = create_custom_proposer(",
                "self.requests: dict[str, CachedRequestState] = {}",
                "self.effective_drafter_max_model_len = self.max_model_len",
                "self.rejection_sampler = RejectionSampler(",
                "self.use_async_spec_decode =",
            ),
            "_input_fits_in_drafter": ("(self, common_attn_metadata)", "<= self.effective_drafter_max_model_len"),
        },
        f"{_BATCH}:InputBatch": {
            "__init__": (
                "self.spec_token_ids:",
                "self.num_prompt_tokens =",
                "self.num_tokens_no_spec =",
                "self.token_ids_cpu =",
            ),
            "req_ids": (),
        },
        "vllm.v1.worker.cpu_model_runner:CPUModelRunner": {"load_model": "self.drafter.load_model(self.model)"},
    },
    "our server and its engine": {
        "vllm.config.speculative:SpeculativeConfig": {"__post_init__": 'self.method == "custom_class"'},
        "vllm.v1.worker.worker_base:WorkerWrapperBase": {
            "init_worker": "worker_class.__bases__ = worker_class.__bases__ + (worker_extension_cls,)"
        },
    },
    "our sampler": {
        f"{_SAMPLE}.sampler:Sampler": {
            "__init__": (
                "(self, logprobs_mode, use_fp64_gumbel)",
                "self.logprobs_mode = logprobs_mode",
                "self.use_fp64_gumbel = use_fp64_gumbel",
            ),
            "forward": "(self, logits, sampling_metadata, predict_bonus_token, logprobs_mode_override)",
            "gather_logprobs": (
                "indices = torch.cat((token_ids, topk_indices), dim=1)",
                "token_ranks = batched_count_greater_than(logprobs, token_logprobs)",
            ),
        },
        f"{_SAMPLE}.ops.topk_topp_sampler": {"apply_top_k_top_p": "(logits, k, p)"},
        f"{_SAMPLE}.logits_processor.builtin:MinPLogitsProcessor": {
            "apply": ("if not self.min_p_count:", "adjusted_min_p = max_probabilities.mul_(self.min_p)")
        },
        f"{_SAMPLE}.logits_processor.builtin:LogitBiasLogitsProcessor": {
            "__init__": "self.biases: dict[int, dict[int, float]] = {}"
        },
        f"{_SAMPLE}.logits_processor.builtin:MinTokensLogitsProcessor": {
            "apply_with_spec_decode": (
                "(logits, num_draft_tokens, ...)",
                "n_mask = int(min(max(remaining, 0), num_draft_arr[req_idx]))",
            )
        },
        f"{_SAMPLE}.logits_processor": {
            "build_logitsprocs": "LogitsProcessors([MinTokensLogitsProcessor(vllm_config, device, is_pin_memory)])"
        },
        f"{_SAMPLE}.logits_processor.state:LogitsProcessors": {
            "__init__": ("self.argmax_invariant:", "self.non_argmax_invariant:"),
            "all": (),
        },
        f"{_ENGINE}.input_processor:InputProcessor": {
            "_validate_params": "params.verify(self.model_config, self.speculative_config,",
            "assign_request_id": 'request.request_id = f"{request.external_req_id}-{random_uuid():.8}"',
        },
        f"{_SAMPLE}.rejection_sampler:RejectionSampler": {
            "__init__": ("(self, sampler, spec_config, device)", "self.synthetic_mode ="),
            "forward": "(self, metadata, draft_probs, logits, sampling_metadata)",
            "apply_logits_processors": (
                "(self, logits, sampling_metadata, metadata)",
                "output_token_ids = self._combine_outputs_with_spec_tokens(",
                "repeat_indices_cpu = original_indices.repeat_interleave(num_draft_tokens)",
                "logits, bad_words_token_ids, output_token_ids, metadata.num_draft_tokens",
                "logits = processor.apply_with_spec_decode(logits, metadata.num_draft_tokens)",
            ),
            "_combine_outputs_with_spec_tokens": (
                "if len(spec) == 0: continue",
                "for i in range(len(spec) - 1): result.append([*result[-1], spec[i]])",
            ),
            "parse_output": (
                "output_token_ids_np != PLACEHOLDER_TOKEN_ID",
                "filtered_tensors = logprobs_tensors.filter(valid_mask.flatten())",
            ),
        },
        "vllm.v1.spec_decode.metadata": {"SpecDecodeMetadata": "(draft_token_ids, num_draft_tokens, ...)"},
        f"{_RUNNER}:GPUModelRunner": {
            "_calc_spec_decode_metadata": "bonus_logits_indices = cu_num_sampled_tokens - 1",
            "_sample": (
                "(self, logits, spec_decode_metadata)",
                "return self.sampler(logits=logits, sampling_metadata=sampling_metadata,)",
                "self.rejection_sampler(spec_decode_metadata, draft_probs, logits, sampling_metadata,)",
            ),
            "_bookkeeping_sync": (
                "sampled_ids = [-1] if req_idx not in invalid_req_indices_set else None",
                "self.input_batch.num_tokens_no_spec[req_idx] = end_idx",
            ),
        },
        f"{_BATCH}:InputBatch": {
            "add_request": (
                "self.num_tokens_no_spec[req_index] = request.num_tokens",
                "self.temperature_cpu[req_index] = 0.0",
            )
        },
    },
    "identity, counts and times of requests": {
        _BATCH: {"CachedRequestState": "(prompt_token_ids, sampling_params, ...)"},
        "vllm.sampling_params": {"SamplingParams": "(extra_args, max_tokens, ...)"},
        f"{_ENGINE}.async_llm:AsyncLLM": {
            "collective_rpc": ("(method, args, ...)", "return await self.engine_core.collective_rpc_async("),
            "generate": "(prompt, sampling_params, request_id, ...)",
        },
        "vllm.v1.metrics.stats": {"RequestStateStats": "(scheduled_ts, first_token_ts, ...)"},
    },
    "engines that died or hang": {
        f"{_ENGINE}.async_llm:AsyncLLM": {
            "check_health": "(self)",
            "is_sleeping": ("(self)", "self.engine_core.is_sleeping_async()"),
        },
        f"{_ENGINE}.exceptions": {"EngineDeadError": ()},
        f"{_ENGINE}.output_processor:OutputProcessor": {"propagate_error": ("(self, e)", "state.queue.put(e)")},
    },
    "pipeline": {
        f"{_ENGINE}.output_processor:OutputProcessor": {"__init__": "self.external_req_ids:"},
    },
    "stop strings of a continued response": {
        f"{_ENGINE}.output_processor:OutputProcessor": {
            "add_request": (
                "(self, request, prompt, parent_req, request_index, queue)",
                "self.request_states[request_id] = req_state",
            )
        },
        f"{_ENGINE}.detokenizer:BaseIncrementalDetokenizer": {
            "update": (
                "(self, new_token_ids, stop_terminated)",
                "self.token_ids.append(new_token_id)",
                "output_text=self.output_text,",
                "stop=self.stop,",
            ),
            "get_next_output_text": "last_offset = self._last_output_text_offset",
        },
        f"{_ENGINE}.detokenizer:SlowIncrementalDetokenizer": {
            "output_token_ids.fget": "return self.token_ids[self.prompt_len :]",
            "num_output_tokens": "return len(self.token_ids) - self.prompt_len",
        },
    },
}
