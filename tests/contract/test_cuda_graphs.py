"""Why drafting asks for piecewise graphs: what vLLM does to capture sizes for the sake of full ones."""

import pytest
from vllm.config import CompilationConfig, CUDAGraphMode

from verl_rhyme.workers.vllm.cuda_graphs import settings


def test_full_graphs_round_sizes_to_the_longest_draft():
    config = CompilationConfig(cudagraph_capture_sizes=[1, 2, 4, 8, 16, 64], max_cudagraph_capture_size=64)
    config.adjust_cudagraph_sizes_for_spec_decode(33, tensor_parallel_size=1)
    assert config.cudagraph_capture_sizes == [33], "vLLM pads no longer: full graphs may suit drafting now"


@pytest.mark.parametrize(("mode", "rounds"), [("FULL_AND_PIECEWISE", True), ("PIECEWISE", False)])
def test_only_modes_with_full_decoding_do(mode, rounds):
    assert (CUDAGraphMode[mode].decode_mode() == CUDAGraphMode.FULL) == rounds


def test_vllm_takes_our_settings():
    config = CompilationConfig(**settings(None, False, 256, 8192))
    assert config.cudagraph_mode == CUDAGraphMode.PIECEWISE
    assert config.cudagraph_capture_sizes[-1] == 1024
