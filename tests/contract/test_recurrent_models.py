"""Every model of vLLM with recurrent layers is recognised, so that none is drafted for."""

import math
import re
from pathlib import Path

import pytest
from vllm.model_executor.models import registry

from verl_rhyme.drafting.recurrent import recurrent
from verl_rhyme.planning.architecture import Architecture


def marked(names=("IsHybrid", "HasInnerState", "IsAttentionFree")):
    """Architectures of vLLM's registry whose class has one of these interfaces, read from the source: importing all
    of them takes minutes."""
    bases = {}
    for file in Path(registry.__file__).parent.rglob("*.py"):
        for name, listed in re.findall(r"^class (\w+)\(([^)]*)\)", file.read_text(), re.MULTILINE):
            bases.setdefault(name, set()).update(re.findall(r"\w+", listed))

    def inherits(name, above=()):
        return name not in above and any(
            base in names or inherits(base, (*above, name)) for base in bases.get(name, ())
        )

    return {architecture for architecture, (_, name) in registry._VLLM_MODELS.items() if inherits(name)}


def test_every_recurrent_architecture_of_vllm_is_recognised_by_name_and_no_other():
    pooling = {"PrithviGeoSpatialMAE", "Terratorch"}  # without attention, and without tokens
    named = {name for name in registry._VLLM_MODELS if recurrent({"architectures": [name]})}
    drafts = {name for name in named if name.endswith(("MTP", "MTPModel"))}  # of such models, for themselves
    assert named - drafts == marked() - pooling


def test_sizes_of_a_hybrid_are_transformers_and_its_states_vllms():
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator

    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8}
    config = Qwen3_5TextConfig(
        **heads,
        linear_value_head_dim=10,
        vocab_size=32,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    shape = Architecture.read(config.to_dict())
    assert shape.parameters == pytest.approx(Qwen3_5ForCausalLM(config).num_parameters(), rel=0.01)
    for drafts, tp in ((0, 1), (4, 1), (3, 2)):
        window, state = MambaStateShapeCalculator.gated_delta_net_state_shape(tp, 2, 6, 8, 10, 4, drafts)
        one = 2 * math.prod(window) + 4 * math.prod(state)
        assert shape.delta_nets.state_bytes(drafts, tp) == 6 * (1 + drafts) * one
