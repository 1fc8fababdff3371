"""Detection of recurrent layers in configs of transformers and in published config files."""

import pytest

from verl_rhyme.config import ConfigError
from verl_rhyme.drafting.recurrent import check_layer, recurrent, undrafted

FAMILIES = {
    **dict.fromkeys(["qwen3_next", "olmo_hybrid", "minimax"], "linear_attention"),
    **dict.fromkeys(["granitemoehybrid", "nemotron_h", "zamba2", "mamba"], "mamba"),
    **{name: name for name in ("qwen3_5", "qwen3_5_moe", "falcon_h1", "falcon_mamba", "bamba", "jamba", "mamba2")},
    **{name: name for name in ("rwkv", "xlstm")},
    "recurrent_gemma": "recurrent",
    **dict.fromkeys(
        ["llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_vl", "gpt_oss", "gemma3", "olmo3", "minimax_m2"], ""
    ),
}


def of(model_type, **changes):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type](**changes).to_dict()


@pytest.mark.parametrize(("model_type", "sign"), FAMILIES.items())
def test_families_of_transformers(model_type, sign):
    assert sign in recurrent(of(model_type)) if sign else not recurrent(of(model_type))


@pytest.mark.parametrize(
    ("config", "sign"),
    [
        # Published files have no list of layers; transformers derives it from these keys.
        ({"model_type": "new", "full_attention_interval": 4, "linear_num_key_heads": 16}, "linear_num_key_heads"),
        ({"model_type": "lfm2", "conv_L_cache": 3, "full_attn_idxs": [2, 5]}, "lfm2"),
        ({"model_type": "new", "conv_L_cache": 3}, "conv_L_cache"),
        ({"model_type": "new", "linear_attn_config": {"kda_layers": [1, 2, 3]}}, "linear_attn_config"),
        ({"architectures": ["KimiLinearForCausalLM"]}, "KimiLinear"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*"}, "nemotron_h"),
        ({"model_type": "new", "text_config": {"layer_types": ["full_attention", "linear_attention"]}}, "linear_att"),
        ({"model_type": "new", "llm_config": {"mamba_num_heads": 8}}, "mamba_num_heads"),
        ({"model_type": "minimax_text_01", "attn_type_list": [0, 0, 1]}, "attn_type_list"),
        ({"model_type": "minimax_m2", "attn_type_list": [1, 1, 1]}, ""),
        ({"model_type": "granitemoehybrid", "layer_types": ["attention"] * 3, "mamba_n_heads": 8}, ""),
        ({"model_type": "nemotron", "architectures": ["NemotronForCausalLM"]}, ""),
        ({"model_type": "llama", "vision_config": {"layer_types": ["conv"]}, "quantization_config": {"ssm_x": 1}}, ""),
        ({"model_type": "llama", "mamba_d_state": None}, ""),
        ({}, ""),
    ],
)
def test_published_files(config, sign):
    shown = recurrent(config)
    assert sign in shown if sign else shown == ""


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_delta_nets_of_qwen_are_drafted_for(model_type):
    config = of(model_type)
    assert undrafted(config) == ""
    assert recurrent(config)
    assert undrafted({**config, "architectures": ["NewHybridForCausalLM"]})


def test_loaded_layers_are_checked():
    check_layer("a.b", "QwenGatedDeltaNetAttention", "none")
    with pytest.raises(ConfigError, match=r"layer a\.b is a MambaMixer2.*drafting\.enable=false"):
        check_layer("a.b", "MambaMixer2", "none")
    with pytest.raises(ConfigError, match="enable_prefix_caching=false"):
        check_layer("a.b", "QwenGatedDeltaNetAttention", "align")
    with pytest.raises(ConfigError, match="has pipeline_parallel_size=2"):
        check_layer("a.b", "QwenGatedDeltaNetAttention", "none", "pipeline_parallel_size=2")
