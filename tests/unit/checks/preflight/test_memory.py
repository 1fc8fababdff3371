"""The memory estimate: published parameter counts, the arithmetic of sharding, vLLM's share."""

from dataclasses import replace

import pytest

from tests.unit.checks.preflight.world import MODEL
from verl_rhyme.checks.preflight import memory
from verl_rhyme.checks.preflight.memory import Rollout, Training
from verl_rhyme.planning.architecture import PUBLISHED, Architecture

QWEN_32B = Architecture.read(PUBLISHED["Qwen/Qwen2.5-32B"])
LLAMA_8B = Architecture.read(PUBLISHED["meta-llama/Llama-3.1-8B-Instruct"])
QWEN3_8B = Architecture.read(PUBLISHED["Qwen/Qwen3-8B"])
QWEN3_5_9B = Architecture.read(PUBLISHED["Qwen/Qwen3.5-9B"])
QWEN3_30B = Architecture.read(PUBLISHED["Qwen/Qwen3-30B-A3B"])
QWEN_HALF_B = Architecture.read(MODEL)
MEGATRON = Training("megatron", world=16, tp=2, tokens=8192, log_prob_tokens=8192)
FSDP = Training("fsdp", world=8, shards=8, tokens=8192, log_prob_tokens=8192)


def test_parameter_counts_are_the_published_ones():
    published = {QWEN_32B: 32_763_876_352, LLAMA_8B: 8_030_261_248, QWEN3_8B: 8_190_735_360, QWEN_HALF_B: 494_032_768}
    for model, count in published.items():
        assert model.parameters == model.rank_parameters() == count


def test_ranks_split_matrices_copy_norms_and_hold_at_least_one_key_head():
    norms = (2 * QWEN_32B.layers + 1) * QWEN_32B.hidden
    assert 2 * QWEN_32B.rank_parameters(2) - QWEN_32B.rank_parameters(1) == norms
    keys, norms = 2 * QWEN_32B.head_dim * (QWEN_32B.hidden + 1), 2 * QWEN_32B.hidden
    assert QWEN_32B.layer(16) == (QWEN_32B.layer(8) - norms - keys) // 2 + keys + norms
    assert QWEN_32B.rank_parameters(1, 4) == 16 * QWEN_32B.layer() + QWEN_32B.hidden + QWEN_32B.embedding, "a stage"


def test_states_take_six_bytes_and_twelve_over_the_ranks_with_megatron_and_sixteen_over_the_shards_with_fsdp():
    count = QWEN_32B.rank_parameters(2)
    assert sum(memory.states(QWEN_32B, MEGATRON).values()) == 6 * count + -(-12 * count // 8)
    whole = replace(MEGATRON, distributed_optimizer=False)
    assert sum(memory.states(QWEN_32B, whole).values()) == 18 * count
    assert memory.states(QWEN_32B, replace(MEGATRON, cp=2)) == memory.states(QWEN_32B, MEGATRON)
    assert sum(memory.states(LLAMA_8B, FSDP).values()) == 16 * LLAMA_8B.parameters // 8


def test_expert_parallelism_splits_experts_and_their_states_over_ranks_of_their_own():
    """verl's command for 30B-A3B: 16 GPUs, TP 2, EP 8, experts whole; 29.0 of 30.5 billion parameters are experts'."""
    routed = 48 * 128 * 3 * 2048 * 768
    split = replace(MEGATRON, ep=8, expert_tp=1)
    count, whole = QWEN3_30B.rank_parameters(2, expert_ranks=8), QWEN3_30B.rank_parameters(2)
    assert whole - count == routed // 2 - routed // 8
    states = memory.states(QWEN3_30B, split)
    assert states["optimizer"] == pytest.approx(12 * ((count - routed // 8) / 8 + routed / 8 / 2))
    assert sum(states.values()) < sum(memory.states(QWEN3_30B, replace(split, ep=1, expert_tp=2)).values()) / 2
    rollout = Rollout(tp=4, utilization=0.8, max_model_len=8192, longest=8192)
    assert memory.serve(QWEN3_30B, rollout, 80 << 30).weights == pytest.approx(30.5e9 * 2 / 4, rel=0.01)
    assert memory.serve(QWEN3_30B, replace(rollout, dp=2), 80 << 30).weights < 30.5e9 * 2 / 7
    tokens = memory.layer_activations(QWEN3_30B, replace(split, tp=1), 100) // 200
    assert tokens == 4 * 2048 + 2 * 4096 + 2 * 512 + 3 * 8 * 768 + 2 * 8 * 2048 + 4096 + 512


def test_activations_follow_korthikanti_without_dropout_and_with_swiglu():
    one = replace(MEGATRON, tp=1)
    h, f, k = QWEN_32B.hidden, QWEN_32B.ffn, QWEN_32B.key
    assert memory.layer_activations(QWEN_32B, one, 100) == 100 * 2 * (4 * h + 2 * h + 2 * k + 3 * f)
    assert memory.layer_activations(QWEN_32B, MEGATRON, 100) == memory.layer_activations(QWEN_32B, one, 100) // 2
    unsplit = memory.layer_activations(QWEN_32B, replace(MEGATRON, sequence_parallel=False), 100)
    assert unsplit - memory.layer_activations(QWEN_32B, MEGATRON, 100) == 100 * 2 * 2 * h


@pytest.mark.parametrize("training", [MEGATRON, FSDP])
def test_less_memory_for_recomputation_fewer_tokens_and_fused_kernels(training):
    phase = memory.update(QWEN_32B, training)
    full, kept = phase.total, phase.components["activations"]
    if training is MEGATRON:  # the first stage keeps all micro-batches in flight
        assert memory.update(QWEN_32B, replace(training, pp=4)).components["activations"] == kept
    assert memory.update(QWEN_32B, replace(training, recompute=True)).components["activations"] < kept / 10
    assert memory.update(QWEN_32B, replace(training, tokens=4096)).total < full
    assert memory.update(QWEN_32B, replace(training, entropy=True)).total > full
    assert memory.loss_bytes(QWEN_32B, replace(training, fused_kernels=True), 8192) < memory.loss_bytes(
        QWEN_32B, training, 8192
    )


def test_offloading_moves_bytes_from_the_gpu_to_the_host():
    states = memory.states(LLAMA_8B, FSDP)
    offloaded = replace(FSDP, parameter_offload=True, optimizer_offload=True)
    assert memory.resident(LLAMA_8B, FSDP) == states["parameters"] + states["optimizer"]
    assert memory.offloaded(LLAMA_8B, FSDP) == 0
    assert memory.resident(LLAMA_8B, offloaded) == 0
    assert memory.offloaded(LLAMA_8B, offloaded) == memory.resident(LLAMA_8B, FSDP)
    assert memory.update(LLAMA_8B, offloaded) == memory.update(LLAMA_8B, FSDP), "training loads all of it"
    always = replace(FSDP, always_offloaded=True)
    assert memory.resident(LLAMA_8B, always) == memory.optimizer_step(LLAMA_8B, always).total == 0
    assert memory.offloaded(LLAMA_8B, always) == sum(states.values())


def test_what_exists_only_at_times():
    assert memory.update(LLAMA_8B, replace(FSDP, accumulate=False)).components["gradients"] == 0
    assert memory.update(LLAMA_8B, replace(MEGATRON, accumulate=False)).components["gradients"] > 0, "a buffer"
    assert memory.log_prob(LLAMA_8B, replace(FSDP, log_prob_tokens=None)) is None
    chunked = memory.log_prob(LLAMA_8B, replace(FSDP, chunked_entropy=True))
    assert chunked.total < memory.log_prob(LLAMA_8B, FSDP).total


def test_the_kv_cache_takes_the_rest_of_vllms_share():
    rollout = Rollout(tp=4, utilization=0.8, max_model_len=32768, longest=22528)
    serving = memory.serve(QWEN_32B, rollout, 80 << 30)
    assert serving.share == serving.weights + serving.activations + serving.cache
    assert serving.weights == 2 * QWEN_32B.rank_parameters(4)
    assert serving.tokens == serving.cache // serving.bytes_per_token
    assert serving.sequences == pytest.approx(serving.tokens / 22528)
    assert memory.serve(QWEN_32B, Rollout(pp=2, cache_bytes=1), 80 << 30).bytes_per_token == 65_536
    assert memory.serve(QWEN_32B, replace(rollout, tp=1), 80 << 30).tokens < serving.tokens / 10
    assert memory.serve(QWEN_32B, replace(rollout, utilization=0.1), 80 << 30).tokens == 0


def test_states_take_room_from_a_requests_cache():
    """24 gated delta nets, each with 2 MiB of a state and 3 + 4 tokens of 8192 values for the convolution."""
    rollout = Rollout(utilization=0.7, max_model_len=10240, longest=10240, draft_tokens=4)
    serving = memory.serve(QWEN3_5_9B, rollout, 80 << 30)
    assert serving.state_bytes == 24 * 5 * (4 * 32 * 128 * 128 + 2 * 8192 * 7)
    assert serving.bytes_per_token == 8 * 2 * 2 * 4 * 256
    assert serving.sequences == pytest.approx(serving.cache / (10240 * 32768 + serving.state_bytes))
    plain = memory.serve(QWEN3_5_9B, replace(rollout, draft_tokens=0), 80 << 30)
    assert plain.sequences == plain.undrafted == serving.undrafted > serving.sequences
    assert memory.serve(QWEN3_5_9B, replace(rollout, tp=2), 80 << 30).state_bytes == serving.state_bytes // 2


@pytest.mark.parametrize(
    ("tokens", "requests", "drafts"),
    [(2048, 64, 4), (2048, 128, 3), (2048, 184, 2), (2048, 256, 1), (10240, 64, 4), (10240, 128, 1)],
)
def test_drafts_are_as_long_as_the_run_leaves_room_for(tokens, requests, drafts):
    """A GPU of 80 GB holds 349 requests of 2,048 tokens without drafts, and 242, 185, 149 and 125 with 1 to 4 tokens;
    of 10,240 tokens, 107 and 94, 84, 76 and 69.
    """
    rollout = Rollout(utilization=0.7, max_num_seqs=128, longest=tokens, requests=requests, draft_tokens=4)
    serving = memory.serve(QWEN3_5_9B, rollout, 80 << 30)
    assert serving.draft_tokens == drafts
    assert serving.sequences >= requests or serving.draft_tokens == 1
    assert memory.serve(LLAMA_8B, replace(rollout, draft_tokens=32), 80 << 30).draft_tokens == 32
