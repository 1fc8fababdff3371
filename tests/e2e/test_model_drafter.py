"""Texts and the model's own drafter in the real engine: EAGLE and MTP of random weights, and the model as its own."""

import json
from pathlib import Path

import numpy as np
import pytest
from exact_distribution import LENGTH, PROMPT, VOCABULARY, history_of
from test_exactness import SAMPLES, sample
from test_held_weights import EXTENSION, socket_names  # noqa: F401  # a fixture
from test_held_weights import Engine as Synced
from test_recurrent import OPTIONS

from benchmarks.gpu_check import models
from tests.conftest import ONLY_SLOW

pytestmark = pytest.mark.xdist_group("model_drafter")

#: Drafts that no clock decides on.
ALWAYS = {"floor": 1e-4, "weigh_cost": False}
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
    return head_of(small_model, tmp_path_factory.mktemp("eagle-head"))


def head_of(model, folder):
    """Write an EAGLE head with random weights for a model; return its folder."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    given = json.loads((model / "config.json").read_text())
    given = given.get("text_config", given)
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    config = LlamaConfig(
        **{name: given[name] for name in names}, num_hidden_layers=1, architectures=["LlamaForCausalLM"]
    )
    torch.manual_seed(3)
    layer = LlamaDecoderLayer(config, 0)
    weights = {f"layers.0.{name}": value for name, value in layer.state_dict().items() if "input_layernorm" not in name}
    weights["fc.weight"] = torch.randn(config.hidden_size, 2 * config.hidden_size) / 8
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module", params=["eagle", "itself", "itself, tight"])
def engine(request, build_engine, write_history, tmp_path_factory, small_model):
    folder = tmp_path_factory.mktemp("history") / "node"
    write_history(folder, [])
    model = request.getfixturevalue("eagle") if request.param == "eagle" else small_model
    drafting = ALWAYS | {"model": str(model)}
    made = build_engine(folder, drafting=drafting, **(TIGHT if "tight" in request.param else {}))
    made.history_folder, made.name = folder, request.param
    return made


def chains_of(engine, monkeypatch):
    """Return a dictionary that the engine fills: the tokens of the model's drafter after a text."""
    proposer = engine.llm_engine.model_executor.driver_worker.worker.model_runner.rhyme_proposer
    take_in, chains_after = proposer.take_in, {}

    def seen(step):
        if step.chains is not None and step.chains.size:
            for row, length, chain in zip(step.rows, step.lengths, step.chains.tolist(), strict=True):
                chains_after[tuple(step.tokens[row, :length].tolist())] = chain
        return take_in(step)

    monkeypatch.setattr(proposer, "take_in", seen)
    return chains_after


def test_greedy_text_and_the_drafters_tokens_are_the_models(engine, write_history, stock, monkeypatch):
    from vllm import SamplingParams

    chains_after = chains_of(engine, monkeypatch)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, VOCABULARY, size).tolist() for size in rng.integers(1, 70, 32)]
    greedy = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, detokenize=False)
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    expected = [o.outputs[0].token_ids for o in stock.generate(requests, greedy, use_tqdm=False)]
    responses = [list(t[:20]) if i % 2 else list(t[:10]) + [0, 1, 2] * 4 for i, t in enumerate(expected)]
    write_history(engine.history_folder, list(zip(prompts, responses, strict=True)))
    drafted = [o.outputs[0].token_ids for o in engine.generate(requests, greedy, use_tqdm=False)]
    assert drafted == expected
    assert engine.collective_rpc("draft_totals")[0]["errors"] == 0
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


def test_a_wake_clears_the_drafters_cache(engine):
    """Steps without a proposal leave holes in it, which later ones read."""
    runner = engine.llm_engine.model_executor.driver_worker.worker.model_runner
    layers = runner.compilation_config.static_forward_context
    caches = [layers[name].kv_cache for name in runner.drafter._draft_attn_layer_names]
    engine.reset_prefix_cache()
    for cache in caches:
        cache.fill_(float("nan"))
    runner.post_kv_cache_wake_up()
    assert caches
    assert not any(cache.any() for cache in caches)


@pytest.fixture(scope="module")
def mimo(small_model, tmp_path_factory):
    """Folder of the small model with an MTP layer of random weights, in the shape of MiMo; and those weights."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import Qwen2Config
    from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

    config = Qwen2Config.from_pretrained(small_model)
    torch.manual_seed(5)
    weights = Qwen2DecoderLayer(config, 0).state_dict()
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    weights |= {f"{name}.weight": torch.ones(config.hidden_size) for name in norms}
    weights["input_proj.weight"] = torch.randn(config.hidden_size, 2 * config.hidden_size) / 8
    weights = {f"model.mtp_layers.0.{name}": value for name, value in weights.items()}
    folder = tmp_path_factory.mktemp("mimo")
    save_file(load_file(small_model / "model.safetensors") | weights, folder / "model.safetensors")
    given = json.loads((small_model / "config.json").read_text())
    given |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(given))
    return folder, load_file(folder / "model.safetensors")


def test_mtp_layers_draft_what_the_synced_weights_say(mimo, build_engine, stock, tmp_path, monkeypatch):
    """The policy's weights and those of its MTP layer arrive together; the MTP layer's go to vLLM's drafter."""
    folder, weights = mimo
    worker = {"worker_cls": "workers.WithExtension", "worker_extension_cls": EXTENSION}
    engine = build_engine(tmp_path / "history", model=folder, drafting=ALWAYS | {"model": "mtp"}, **worker)
    synced, texts = Synced(engine), texts_of(stock)

    def chains():
        with monkeypatch.context() as patch:
            made = chains_of(engine, patch)
            assert texts_of(engine) == texts
        return made

    loaded = chains()
    name = "model.mtp_layers.0.input_proj.weight"
    synced.sync(weights | {name: -weights[name]})
    other = chains()
    common = loaded.keys() & other.keys()
    assert len(common) > 12
    assert sum(loaded[text] == other[text] for text in common) < len(common) / 2
    synced.sync(weights)
    again = chains()
    assert len(loaded.keys() & again.keys()) > 12
    assert all(loaded[text] == again[text] for text in loaded.keys() & again.keys())
    assert_drafted(engine)


def test_text_with_an_adapter_is_the_merged_models(small_model, eagle, build_engine, tmp_path):
    """The head reads the hidden states of the policy with its adapter."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM
    from vllm.lora.request import LoRARequest

    policy = AutoModelForCausalLM.from_pretrained(small_model)
    adapted = get_peft_model(policy, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "o_proj", "up_proj"]))
    with torch.no_grad():
        for name, each in adapted.named_parameters():
            if "lora_B" in name:
                each.normal_(std=0.2)
    adapted.save_pretrained(tmp_path / "adapter")
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    engine = build_engine(tmp_path / "history", drafting=ALWAYS | {"model": str(eagle)}, enable_lora=True)
    plain, merged = texts_of(engine), texts_of(build_engine(model=tmp_path / "merged"))
    assert texts_of(engine, lora_request=LoRARequest("adapter", 1, str(tmp_path / "adapter"))) == merged != plain
    assert_drafted(engine)


def test_text_of_gated_delta_nets_is_the_models(build_engine, tmp_path_factory):
    """Recurrent layers take their states after the drafts of both."""
    options = OPTIONS | {"max_num_seqs": 8}
    model = Path(models.delta_net(tmp_path_factory.mktemp("delta_net"), entries=VOCABULARY))
    drafting = ALWAYS | {"model": str(head_of(model, tmp_path_factory.mktemp("eagle-next"))), "max_tokens": 4}
    engine = build_engine(tmp_path_factory.mktemp("history"), model=model, drafting=drafting, **options)
    assert texts_of(engine) == texts_of(build_engine(model=model, **options))
    assert_drafted(engine)


@ONLY_SLOW
def test_text_of_two_ranks_is_the_models(eagle, build_engine, stock, tmp_path):
    """The ranks agree on the model's tokens of each step; else their collective calls wait for each other."""
    drafting = {"model": str(eagle)}
    engine = build_engine(tmp_path / "history", drafting=drafting, tensor_parallel_size=2)
    assert texts_of(engine) == texts_of(stock)
    assert_drafted(engine)


def texts_of(engine, **options):
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, detokenize=False)
    requests = [{"prompt_token_ids": [token, 2, 3] * 5} for token in range(8)]
    return [list(o.outputs[0].token_ids) for o in engine.generate(requests, greedy, use_tqdm=False, **options)]


def assert_drafted(engine):
    totals = engine.collective_rpc("draft_totals")[0]
    assert totals["errors"] == 0
    assert totals["drafted"] > 50
