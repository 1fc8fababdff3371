"""A tiny gated delta net, the one recurrent family that vLLM's CPU build runs: no drafts, and all else works.

Mamba and short convolutions need Triton kernels, which that build has none of.
"""

from types import SimpleNamespace

import pytest

from benchmarks.gpu_check import models
from verl_rhyme.config import ConfigError
from verl_rhyme.engine.server import RhymeHttpServer

pytestmark = pytest.mark.xdist_group("recurrent")

OPTIONS = {"dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32", "num_gpu_blocks_override": 64}
PROMPTS = [[1, 2, 3, 4, 5], [7, 0, 3, 11] * 5]
LENGTH = 16


@pytest.fixture(scope="module")
def delta_net(tmp_path_factory):
    from vllm.distributed import parallel_state

    # vLLM makes a group of experts, which this model has, together with the others only: its engines make them anew.
    parallel_state.destroy_model_parallel()
    return models.delta_net(tmp_path_factory.mktemp("delta_net"), entries=12)


def test_an_engine_refuses_to_draft_whatever_the_config_says(build_engine, delta_net, tmp_path):
    with pytest.raises(ConfigError, match=r"linear_attn is a \w+GatedDeltaNet\w*.*drafting\.enable=false"):
        build_engine(tmp_path / "history", model=delta_net, **OPTIONS)


def test_our_draws_are_the_models_own(build_engine, delta_net):
    import torch

    if not torch.cpu._is_amx_tile_supported():
        pytest.skip(
            "vLLM's CPU kernels of gated delta nets were tried with AMX only; elsewhere they may end the process"
        )
    from transformers import AutoModelForCausalLM
    from vllm import SamplingParams

    engine = build_engine(model=delta_net, draws=True, **OPTIONS)
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, detokenize=False)
    answers = engine.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    model = AutoModelForCausalLM.from_pretrained(delta_net, dtype=torch.float32)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        said = torch.tensor(answer.outputs[0].token_ids)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + said.tolist()])).logits[0, len(prompt) - 1 : -1]
        behind = logits.max(-1).values - logits.gather(-1, said[:, None])[:, 0]
        # The engine's bf16 moves logits, of deviation 6, by tenths; a wrong state by units.
        assert behind.max() < 1


@pytest.mark.asyncio
async def test_the_cache_is_not_counted_as_if_states_took_no_room(build_engine, delta_net):
    engine = build_engine(model=delta_net, **OPTIONS)
    cache = engine.llm_engine.vllm_config.cache_config
    server = SimpleNamespace(engine=engine.llm_engine)
    # Of every four blocks of a request of the longest kind, its states take three.
    assert await RhymeHttpServer.cache_tokens(server) == cache.num_gpu_blocks * cache.block_size // 4
