"""Which graphs vLLM makes of our settings, and which step runs in which: vLLM's own dispatcher, no GPU needed."""

from types import SimpleNamespace

from vllm.config import CompilationConfig, CUDAGraphMode
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from verl_rhyme.engine.cuda_graphs import settings
from verl_rhyme.patches.vllm_undrafted_graphs import PATCH

ROWS, LONGEST = 256, 32
ORIGINAL = getattr(
    GPUModelRunner._check_and_update_cudagraph_mode, "__wrapped__", GPUModelRunner._check_and_update_cudagraph_mode
)


def started(update):
    """As much of a model runner as resolves modes and dispatches steps, after ``update`` has resolved them."""
    compilation = CompilationConfig(
        **settings(None, False, ROWS, 8192), mode=3, splitting_ops=list(CompilationConfig._attention_ops)
    )
    compilation.max_cudagraph_capture_size = compilation.cudagraph_capture_sizes[-1]
    config = SimpleNamespace(
        compilation_config=compilation,
        num_speculative_tokens=LONGEST,
        lora_config=None,
        scheduler_config=SimpleNamespace(max_num_seqs=ROWS),
        additional_config={"rhyme": {"drafting": {}}},
    )
    runner = SimpleNamespace(
        vllm_config=config,
        compilation_config=compilation,
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        kv_cache_config=None,
        max_num_reqs=ROWS,
        speculative_config=None,
        uniform_decode_query_len=1 + LONGEST,
        cudagraph_dispatcher=CudagraphDispatcher(config),
    )
    update(runner, [], [])
    return runner


def dispatched(runner, tokens_of_rows):
    """(mode, padded tokens) of a step, as ``_determine_batch_execution_and_padding`` asks for it."""
    longest, total = max(tokens_of_rows), sum(tokens_of_rows)
    uniform = GPUModelRunner._is_uniform_decode(longest, runner.uniform_decode_query_len, total, len(tokens_of_rows))
    mode, step = runner.cudagraph_dispatcher.dispatch(total, uniform_decode=uniform)
    return mode, step.num_tokens


def test_without_the_patch_full_graphs_are_for_the_longest_draft_and_sizes_are_rounded_to_it():
    runner = started(ORIGINAL)
    assert all(size % (1 + LONGEST) == 0 for size in runner.compilation_config.cudagraph_capture_sizes)
    assert dispatched(runner, [1] * 8) == (CUDAGraphMode.PIECEWISE, 33)
    assert dispatched(runner, [2, 1, 32]) == (CUDAGraphMode.PIECEWISE, 66)


def test_with_it_steps_without_drafts_keep_full_graphs_and_ragged_ones_are_piecewise():
    runner = started(PATCH.replace(ORIGINAL))
    for rows in (1, 8, 100, ROWS):
        mode, tokens = dispatched(runner, [1] * rows)
        assert mode == CUDAGraphMode.FULL
        assert rows <= tokens < rows + 16
    assert dispatched(runner, [2, 1, 32]) == (CUDAGraphMode.PIECEWISE, 40)
    assert dispatched(runner, [1 + LONGEST] * 8) == (CUDAGraphMode.PIECEWISE, 272)
    assert dispatched(runner, [4] * ROWS) == (CUDAGraphMode.PIECEWISE, 1024)
    assert runner.compilation_config.cudagraph_capture_sizes[0] == 1
