"""A small mixture of experts, and the experts that its own routers choose, by transformers."""

import shutil
from pathlib import Path

import numpy as np
from exact_distribution import VOCABULARY

LAYERS, EXPERTS, CHOSEN = 3, 8, 2
#: Experts whose logits are nearer than this are alike: the engine's kernels may prefer the other.
_ALIKE = 1e-4
_OF_A_MODEL_TYPE = ("model_type", "architectures", "transformers_version", "dtype")


def save(folder, seed=7):
    """Save a random Qwen3-MoE over 12 tokens whose routers choose clearly."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=64,
            moe_intermediate_size=32,
            num_hidden_layers=LAYERS,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            num_experts=EXPERTS,
            num_experts_per_tok=CHOSEN,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            max_position_embeddings=512,
            tie_word_embeddings=False,
            eos_token_id=None,
            bos_token_id=None,
            pad_token_id=None,
        )
    ).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.arange(VOCABULARY)[None]).logits
        model.lm_head.weight.mul_(4 / logits.std())
        for layer in model.model.layers:
            layer.mlp.gate.weight.mul_(20)
    model.save_pretrained(folder)
    return folder


def upcycle(source, folder):
    """Save a dense Qwen2 as a mixture of equal experts, which answers the same, with random routers."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("config.json", "*.safetensors"))
    dense = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    shape = {name: value for name, value in dense.config.to_dict().items() if name not in _OF_A_MODEL_TYPE}
    torch.manual_seed(0)
    mixture = Qwen2MoeForCausalLM(
        Qwen2MoeConfig(
            **shape,
            num_experts=EXPERTS,
            num_experts_per_tok=CHOSEN,
            moe_intermediate_size=shape["intermediate_size"],
            shared_expert_intermediate_size=32,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        )
    )
    mixture.load_state_dict(dense.state_dict(), strict=False)
    with torch.no_grad():
        for layer, same in zip(mixture.model.layers, dense.model.layers, strict=True):
            layer.mlp.experts.gate_up_proj.copy_(torch.cat([same.mlp.gate_proj.weight, same.mlp.up_proj.weight]))
            layer.mlp.experts.down_proj.copy_(same.mlp.down_proj.weight)
            layer.mlp.gate.weight.normal_(std=0.5)
            layer.mlp.shared_expert.down_proj.weight.zero_()
    mixture.generation_config = dense.generation_config
    mixture.save_pretrained(folder)
    return folder


class Routers:
    """The routers of a model in transformers, or in its folder."""

    def __init__(self, model):
        from transformers import AutoModelForCausalLM

        named = isinstance(model, str | Path)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype="float32") if named else model

    def of(self, text):
        """Return each token's experts, int[tokens, layers, 2], ascending, and how clearly they were chosen."""
        import torch

        with torch.no_grad():
            logits = torch.stack(self.model(torch.tensor([text]), output_router_logits=True).router_logits, 1)
        best = logits.topk(CHOSEN + 1)
        gaps = best.values[..., CHOSEN - 1] - best.values[..., CHOSEN]
        return best.indices[..., :CHOSEN].sort(-1).values.numpy(), gaps.numpy()

    def wrong(self, text, routes, rows=slice(None)):
        """Count the rows x layers of ``routes`` that differ; those of ``text`` but for its last token."""
        expected, gaps = self.of(text)
        routes = np.asarray(routes, dtype=np.int64)
        assert routes.shape == expected[:-1].shape, (routes.shape, len(text))
        differ = (np.sort(routes, -1) != expected[:-1]).any(-1) & (gaps[:-1] > _ALIKE)
        return int(differ[rows].sum())
