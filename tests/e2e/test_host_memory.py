"""Blocks in host memory in the real engine: its texts are those of an engine that computes all keys anew."""

import numpy as np
import pytest
from exact_distribution import VOCABULARY
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

from tests.contract.host_copies import HostCopies
from verl_rhyme.processes.request import RequestMeta
from verl_rhyme.sampling.noise import key_of

pytestmark = pytest.mark.xdist_group("host_memory")

SAMPLES, LENGTH, BLOCK = 16, 40, 16
OPTIONS = {"max_model_len": 256, "block_size": BLOCK, "max_num_seqs": 8, "max_num_batched_tokens": 64}


@pytest.fixture
def alone():
    """An engine with a connector is the only one of its process that runs."""
    yield
    ensure_kv_transfer_shutdown()


@pytest.mark.parametrize("coupled", [False, True])
def test_texts_of_several_turns_are_those_without_it(build_engine, write_history, tmp_path, coupled, alone):
    """Greedy against vLLM's own engine, and with coupled noise against ours; each with drafts, right and wrong."""
    engine, turns = build_engine(draws=coupled, **OPTIONS), []
    chance = np.random.default_rng(3)
    prompts = [chance.integers(0, VOCABULARY, 40).tolist() for _ in range(SAMPLES)]
    for turn in range(3):
        texts = generate(engine, prompts, coupled, turn)
        turns.append((prompts, texts))
        tools = chance.integers(0, VOCABULARY, (SAMPLES, 10)).tolist()
        prompts = [[*prompt, *text, *tool] for prompt, text, tool in zip(prompts, texts, tools, strict=True)]
    write_history(tmp_path / "history", [])
    engine = build_engine(
        tmp_path / "history",
        drafting={"floor": 0.01, "weigh_cost": False},
        num_gpu_blocks_override=40,
        enable_prefix_caching=True,
        disable_log_stats=False,
        kv_offloading_size=0.05,
        kv_transfer_config={
            "kv_connector_extra_config": {"spec_name": HostCopies.__name__, "spec_module_path": HostCopies.__module__}
        },
        **OPTIONS,
    )
    for turn, (prompts, expected) in enumerate(turns):
        half = [text if i % 2 else text[:20] + [0, 1, 2] * 6 for i, text in enumerate(expected)]
        write_history(tmp_path / "history", list(zip(prompts, half, strict=True)))
        assert generate(engine, prompts, coupled, turn) == expected
    totals = engine.collective_rpc("draft_totals")[0]
    assert totals["errors"] == 0
    assert totals["accepted"] > 100
    loaded = sum(m.value for m in engine.get_metrics() if m.name == "vllm:external_prefix_cache_hits")
    assert loaded > 0, "the test must see loads"


def generate(engine, prompts, coupled, turn):
    from vllm import SamplingParams

    settings = {"temperature": float(coupled), "max_tokens": LENGTH, "ignore_eos": True, "detokenize": False}
    each = [
        SamplingParams(**RequestMeta(noise=f"{key_of('host', turn, i):016x}").put(settings) if coupled else settings)
        for i in range(len(prompts))
    ]
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], each, use_tqdm=False)
    return [list(o.outputs[0].token_ids) for o in outputs]
