"""Texts and the model's own drafter in the real engine: an EAGLE head of random weights, and the model as its own."""

import json

import numpy as np
import pytest
from exact_distribution import LENGTH, PROMPT, VOCABULARY, history_of
from test_exactness import SAMPLES, sample

pytestmark = pytest.mark.xdist_group("model_drafter")

#: Prompts come in chunks, requests wait for others' blocks and are preempted, and their prefixes are cached.
TIGHT = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 40,
    "num_gpu_blocks_override": 24,
    "block_size": 16,
    "enable_prefix_caching": True,
}


@pytest.fixture(scope="module")
def eagle(small_model, tmp_path_factory):
    """Folder of a head with random weights for the small model."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    given = json.loads((small_model / "config.json").read_text())
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    config = LlamaConfig(
        **{name: given[name] for name in names}, num_hidden_layers=1, architectures=["LlamaForCausalLM"]
    )
    torch.manual_seed(3)
    layer = LlamaDecoderLayer(config, 0)
    weights = {f"layers.0.{name}": value for name, value in layer.state_dict().items() if "input_layernorm" not in name}
    weights["fc.weight"] = torch.randn(config.hidden_size, 2 * config.hidden_size) / 8
    folder = tmp_path_factory.mktemp("eagle-head")
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module", params=["eagle", "itself", "itself, tight"])
def engine(request, build_engine, write_history, tmp_path_factory, small_model):
    folder = tmp_path_factory.mktemp("history") / "node"
    write_history(folder, [])
    model = request.getfixturevalue("eagle") if request.param == "eagle" else small_model
    drafting = {"floor": 1e-4, "weigh_cost": False, "model": str(model)}
    made = build_engine(folder, drafting=drafting, **(TIGHT if "tight" in request.param else {}))
    made.history_folder, made.name = folder, request.param
    return made


def test_greedy_text_and_the_drafters_tokens_are_the_models(engine, write_history, stock, monkeypatch):
    from vllm import SamplingParams

    proposer = engine.llm_engine.model_executor.driver_worker.worker.model_runner.rhyme_proposer
    propose, chains_after = proposer.propose, {}

    def seen(sampled, lengths, tokens, chains):
        for row in np.flatnonzero([len(new) for new in sampled]):
            chains_after[tuple(tokens[row, : lengths[row]].tolist())] = chains[row].tolist()
        return propose(sampled, lengths, tokens, chains)

    monkeypatch.setattr(proposer, "propose", seen)

    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, VOCABULARY, size).tolist() for size in rng.integers(1, 70, 32)]
    greedy = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, detokenize=False)
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    expected = [o.outputs[0].token_ids for o in stock.generate(requests, greedy, use_tqdm=False)]
    responses = [list(t[:20]) if i % 2 else list(t[:10]) + [0, 1, 2] * 4 for i, t in enumerate(expected)]
    write_history(engine.history_folder, list(zip(prompts, responses, strict=True)))
    drafted = [o.outputs[0].token_ids for o in engine.generate(requests, greedy, use_tqdm=False)]
    assert drafted == expected
    assert proposer.totals()["errors"] == 0
    whole = [tuple(prompt + list(text)) for prompt, text in zip(prompts, expected, strict=True)]
    hits = [
        chain == list(text[length : length + 3])
        for text in whole
        for length in range(len(text) - 47, len(text) - 3)
        if (chain := chains_after.get(text[:length])) is not None
    ]
    assert len(hits) > 100
    assert all(hits) if engine.name != "eagle" else sum(hits) < len(hits) / 4


def test_output_distribution_is_the_targets(engine, write_history, distribution_of, p_value):
    write_history(engine.history_folder, history_of("adversarial", distribution_of))
    assert p_value(sample(engine, {}, SAMPLES), distribution_of(PROMPT, LENGTH)) > 1e-4
