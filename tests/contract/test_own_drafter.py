"""What ``drafting.model`` is by its config.json is what vLLM makes of it."""

import copy
import json
import typing

import pytest
from transformers import PretrainedConfig
from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig
from vllm.config.speculative import MTPModelTypes

from verl_rhyme.config.checks import Unusable
from verl_rhyme.drafting.own_drafter import examine, mtp_layers
from verl_rhyme.engine.model_drafter import speculation

SIZES = {
    **{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 4096},
}
POLICY = SIZES | {"architectures": ["LlamaForCausalLM"]}


@pytest.fixture
def folder(tmp_path):
    def write(name, **fields):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(json.dumps(POLICY | fields))
        return str(tmp_path / name)

    return write


@pytest.fixture
def vllms(folder):
    """``vllms(speculative_config)``: vLLM's own, for a small policy."""
    target = ModelConfig(model=folder("policy"), skip_tokenizer_init=True, max_model_len=4096)

    def made(given):
        given = {key: value for key, value in given.items() if key != "draft_load_config"}
        return SpeculativeConfig(target_model_config=target, target_parallel_config=ParallelConfig(), **given)

    return made


@pytest.mark.slow  # vLLM inspects each architecture in a process, once a machine
@pytest.mark.parametrize(
    ("name", "fields", "method", "architecture"),
    [
        ("small", {}, "draft_model", "LlamaForCausalLM"),
        ("head", {"num_hidden_layers": 1}, "eagle", "EagleLlamaForCausalLM"),
        ("head", {"num_hidden_layers": 1, "draft_vocab_size": 32}, "eagle3", "Eagle3LlamaForCausalLM"),
        ("eagle-x/eagle3-y", {"num_hidden_layers": 1}, "eagle3", "Eagle3LlamaForCausalLM"),
    ],
)
def test_vllm_loads_the_drafter_that_the_config_shows(folder, vllms, name, fields, method, architecture):
    path = folder(name, **fields)
    made = vllms(speculation(path, 5, POLICY))
    assert (made.method, made.draft_model_config.architectures) == (method, [architecture])
    named = vllms({"model": path, "num_speculative_tokens": 5}).method
    assert (named == method) == (method == "draft_model"), "by the path alone vLLM errs"


@pytest.mark.slow
def test_vllm_takes_a_small_model_in_such_a_folder_for_a_head(folder, vllms):
    path = folder("eagle-runs/small")
    assert vllms({"model": path, "num_speculative_tokens": 5}).method == "eagle"
    with pytest.raises(Unusable, match="rename"):
        speculation(path, 5, POLICY)


@pytest.mark.slow
def test_vllm_knows_as_many_positions(folder, vllms):
    for positions, kind in ((1024, "default"), (1024, "linear"), (3000, "yarn"), (2048, "llama3")):
        rope = {"rope_type": kind, "factor": 2.0, "original_max_position_embeddings": 1024, "rope_theta": 1e4}
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
        path = folder(kind, num_hidden_layers=1, max_position_embeddings=positions, rope_parameters=rope)
        made = vllms(speculation(path, 5, POLICY))
        assert made.draft_model_config.max_model_len == examine(path, POLICY).positions == 2048


#: Families with MTP layers in vLLM, and the published architecture where vLLM recognises the family by it.
FAMILIES = {
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "deepseek_v4", "pangu_ultra_moe", "nemotron_h")),
    **dict.fromkeys(("ernie4_5_moe", "exaone_moe", "hy_v3", "longcat_flash", "qwen3_5", "qwen3_5_moe", "qwen3_next")),
    "mimo": "MiMoForCausalLM",
    "mimo_v2": "MiMoV2ForCausalLM",
    "mimo_v2_flash": "MiMoV2FlashForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "step3p5": "Step3p5ForCausalLM",
    "minimax_m3_vl": "MiniMaxM3SparseForConditionalGeneration",
}
#: Keys of the number of these layers other than ``num_nextn_predict_layers``.
KEYS = {**dict.fromkeys(("qwen3_5", "qwen3_5_moe"), "mtp_num_hidden_layers"), "minimax_m3_vl": "num_mtp_modules"}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layers", [None, 1, 3])
def test_vllm_counts_as_many_mtp_layers(family, layers):
    key = KEYS.get(family, "num_nextn_predict_layers")
    fields = {"model_type": family, "architectures": [FAMILIES[family] or "X"]} | ({key: layers} if layers else {})
    config = PretrainedConfig(**copy.deepcopy(fields))
    config.model_type = family
    if family.startswith(("step3p5", "minimax")):  # multimodal
        config.text_config = PretrainedConfig(**({key: layers} if layers else {}))
        fields["text_config"] = {key: fields.pop(key, None)}
    made = SpeculativeConfig.hf_config_override(config)
    assert made.model_type in typing.get_args(MTPModelTypes) or layers is None
    assert mtp_layers(fields) == (getattr(made, "n_predict", None) or 0)
