"""Every option of vLLM's engine is looked at: refused, ours, or of no consequence for drafts, schedules and counts.

A new release's new option fails the first test until it is classified: does it change what is sampled, which tokens a
step holds, who schedules, or what of verl's keys rhyme reads?
"""

import dataclasses

from vllm.engine.arg_utils import AsyncEngineArgs

from verl_rhyme.checks import combinations
from verl_rhyme.engine.server import RhymeHttpServer

PREFIX = "actor_rollout_ref.rollout.engine_kwargs.vllm."
#: Of an option file, which is no field.
FILE = {"config"}
#: Merged with the user's where the server starts (``RhymeHttpServer._preprocess_engine_kwargs``).
OURS = {"additional_config", "compilation_config", "disable_log_stats"}
#: The other classes, and what is in them. Grammars and LoRA go with drafts: tests/e2e/test_engine_features.py.
CLASSES = {
    "vLLM refuses them with speculation itself, or asks each attention layer": """
        decode_context_parallel_size prefill_context_parallel_size dcp_comm_backend dcp_kv_cache_interleave_size
        cp_kv_cache_interleave_size kv_sharing_fast_prefill
    """,
    "the rest of a data-parallel replica's": """
        data_parallel_rank data_parallel_start_rank data_parallel_size_local data_parallel_address
        data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb
        data_parallel_multi_port_external_lb data_parallel_backend disable_nccl_for_dp_synchronization
        enable_elastic_ep enable_ep_weight_filter all2all_backend dbo_decode_token_threshold
        dbo_prefill_token_threshold _api_process_count _api_process_rank
    """,
    "which model: engines look at its layers before they draft, whatever config they were given": """
        model model_weights served_model_name tokenizer hf_config_path runner convert skip_tokenizer_init
        enable_prompt_embeds tokenizer_mode trust_remote_code revision code_revision tokenizer_revision hf_token
        hf_overrides config_format model_impl override_attention_dtype pooler_config generation_config
        override_generation_config dtype quantization quantization_config allow_deprecated_quantization
        max_model_len
    """,
    "how it is loaded, computed, cached and observed": """
        enable_return_routed_experts allowed_local_media_path allowed_media_domains download_dir
        safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size load_format
        kv_cache_dtype seed cudagraph_capture_sizes max_cudagraph_capture_size ir_op_priority
        distributed_executor_backend master_addr master_port nnodes node_rank distributed_timeout_seconds
        cpu_distributed_timeout_seconds numa_bind numa_bind_nodes numa_bind_cpus device_ids enable_expert_parallel
        moe_backend linear_backend eplb_config enable_eplb expert_placement_strategy max_parallel_loading_workers
        block_size enable_prefix_caching prefix_caching_hash_algo disable_sliding_window disable_cascade_attn
        offload_backend cpu_offload_gb cpu_offload_params offload_group_size offload_num_in_group
        offload_prefetch_step offload_params gpu_memory_utilization kv_cache_memory_bytes max_num_batched_tokens
        max_num_partial_prefills max_long_partial_prefills long_prefill_token_threshold max_logprobs
        use_fp64_gumbel aggregate_engine_logging enforce_eager disable_custom_all_reduce language_model_only
        limit_mm_per_prompt enable_mm_embeds interleave_mm_strings media_io_kwargs mm_processor_kwargs
        mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb mm_encoder_only
        mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
        mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin io_processor_plugin renderer_num_workers
        skip_mm_profiling video_pruning_rate mm_tensor_ipc enable_lora max_loras max_lora_rank default_mm_loras
        fully_sharded_loras max_cpu_loras lora_dtype lora_target_modules enable_tower_connector_lora
        specialize_active_lora enable_mixed_moe_lora_format ray_workers_use_nsight num_gpu_blocks_override
        model_loader_extra_config ignore_patterns enable_chunked_prefill disable_chunked_mm_input
        scheduler_reserve_full_isl prefill_schedule_interval watermark disable_hybrid_kv_cache_manager
        structured_outputs_config reasoning_parser reasoning_parser_plugin show_hidden_metrics_for_version
        otlp_traces_endpoint collect_detailed_traces kv_cache_metrics kv_cache_metrics_sample cudagraph_metrics
        enable_layerwise_nvtx_tracing enable_mfu_metrics enable_logging_iteration_details jit_monitor_verbose
        enable_mm_processor_stats attention_config mamba_config kernel_config enable_flashinfer_autotune worker_cls
        profiler_config kv_events_config ec_transfer_config reasoning_config enable_sleep_mode
        enable_cumem_allocator attention_backend calculate_kv_scales kv_cache_dtype_skip_layers mamba_cache_dtype
        mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode mamba_backend enable_mamba_cache_stochastic_rounding
        mamba_cache_philox_rounds use_tqdm_on_load pt_load_map_location stream_interval optimization_level
        performance_mode kv_offloading_size kv_offloading_backend tokens_only shutdown_timeout
        weight_transfer_config fail_on_environ_validation gdn_prefill_backend enable_log_requests
    """,
}


def refused():
    """Options that the table looks at."""
    return {
        option.key.removeprefix(PREFIX)
        for row in combinations.TABLE
        for option in row.options
        if option.key.startswith(PREFIX)
    } - FILE


def test_each_option_of_vllm_is_in_one_class():
    classes = [refused(), OURS, *(set(options.split()) for options in CLASSES.values())]
    fields = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    classified = set().union(*classes)
    assert (fields - classified, classified - fields) == (set(), set())
    assert sum(map(len, classes)) == len(classified)


def test_no_other_option_is_taken_for_the_beginning_of_a_refused_one():
    fields = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert not [(a, b) for a in fields - refused() for b in refused() | FILE if b.startswith(a)]


def test_the_extension_is_ours_without_an_option_for_it():
    from verl_rhyme.engine.extension import RhymeWorkerExtension

    extension = RhymeHttpServer._get_worker_extension_cls(None)
    assert extension == f"{RhymeWorkerExtension.__module__}.{RhymeWorkerExtension.__name__}"
