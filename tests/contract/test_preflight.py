"""What the preflight says of verl and vLLM is what they say of themselves."""

import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from verl_rhyme.checks.combinations import LEGACY_ESTIMATORS
from verl_rhyme.checks.preflight import memory
from verl_rhyme.checks.preflight.components import AGENT_LOOPS, LOGGERS, PARSERS
from verl_rhyme.checks.preflight.compose import compose
from verl_rhyme.checks.preflight.memory import Rollout
from verl_rhyme.checks.preflight.values import CHOICES
from verl_rhyme.config import TOPOLOGIES
from verl_rhyme.planning.architecture import Architecture

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "arguments",
    [
        ["model_engine=megatron", "trainer.nnodes=2", "+extra.key=${trainer.nnodes}", "hydra.run.dir=/tmp/x"],
        ["--config-path", str(ROOT / "recipes/config"), "--config-name", "tiny_cpu"],
        ["--config-path", "config", "++trainer.project_name=${hydra:job.name}"],
    ],
    ids=["default config", "absolute path", "relative path"],
)
@pytest.mark.xdist_group("forks")
def test_the_config_is_what_verls_main_resolves(arguments, monkeypatch, tmp_path, forks):
    variables = {name: str(tmp_path / name) for name in ("DATA", "MODEL", "TINY_WORLD", "RUN_DIR")}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = forks.main_ppo(*arguments, "--cfg", "job", "--resolve", cwd=tmp_path, env=variables)
    assert found.returncode == 0, found.stderr
    monkeypatch.chdir(tmp_path)
    theirs = found.stdout[found.stdout.index("model_engine:") :]
    assert OmegaConf.to_yaml(compose(arguments)).strip() == theirs.strip()


@pytest.mark.parametrize(("tp", "dtype"), [(1, "bfloat16"), (2, "bfloat16"), (16, "float32")])
def test_cache_bytes_are_vllms(tp, dtype):
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    model = Architecture("llama", 32, 4096, 14336, 32, 8, 128, 128256, tied=False)
    kind = getattr(torch, dtype)
    spec = FullAttentionSpec(block_size=16, num_kv_heads=max(1, 8 // tp), head_size=128, dtype=kind)
    ours = memory.serve(model, Rollout(tp=tp, cache_bytes=kind.itemsize), 80 << 30).bytes_per_token
    assert ours * 16 == 32 * spec.page_size_bytes


MIXTURES: dict[str, dict[str, int]] = {
    "qwen3_moe": {"num_experts": 6, "moe_intermediate_size": 32, "decoder_sparse_step": 2},
    "mixtral": {"num_local_experts": 6},
    "glm4_moe": {"n_routed_experts": 6, "moe_intermediate_size": 32, "n_shared_experts": 2, "first_k_dense_replace": 1},
    "gpt_oss": {"num_local_experts": 6},
    "qwen3_5_moe_text": {"num_experts": 6, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
    "deepseek_v3": {"n_routed_experts": 8, "moe_intermediate_size": 32, "kv_lora_rank": 16, "q_lora_rank": 24},
}


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", *MIXTURES])
def test_parameters_are_those_that_transformers_makes(kind):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        kind,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        head_dim=16,
        attention_bias=kind in ("llama", "glm4_moe", "gpt_oss"),
        mlp_bias=kind == "llama",
        **MIXTURES.get(kind, {}),
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape, found = Architecture.read(config.to_dict()), sum(p.numel() for p in model.parameters())
    rounded = shape.layers * (3 * (kind in MIXTURES) + 128 * bool(shape.delta_nets))  # mean layers, norms of delta nets
    assert abs(shape.parameters - found) <= rounded


def test_values_by_name_are_those_that_verl_and_vllm_know():
    import typing

    from verl import checkpoint_engine
    from verl.experimental.agent_loop import agent_loop, single_turn_agent_loop, tool_agent_loop  # noqa: F401
    from verl.experimental.agent_loop.tool_parser import ToolParser
    from verl.experimental.reward_loop.reward_manager import registry
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
    from verl.utils.tracking import Tracking
    from vllm.config.model import ModelDType

    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    assert set(LOGGERS) - {"tracking"} == set(Tracking.supported_backend)
    assert set(AGENT_LOOPS) == {
        name for name, each in agent_loop._agent_loop_registry.items() if "verl.experimental" in each["_target_"]
    }
    assert set(PARSERS) == set(ToolParser._registry)
    for key, known in {
        "reward.reward_manager.name": registry.REWARD_MANAGER,
        "algorithm.adv_estimator": [str(getattr(each, "value", each)) for each in ADV_ESTIMATOR_REGISTRY],
        f"{actor}.policy_loss.loss_mode": POLICY_LOSS_REGISTRY,
        f"{rollout}.dtype": typing.get_args(ModelDType),
    }.items():
        assert set(CHOICES[key]) == set(known), key
    assert set(TRAINER_REGISTRY) >= set(TOPOLOGIES)
    texts = [file.read_text() for file in Path(checkpoint_engine.__file__).parent.glob("*.py")]
    registered = {name for text in texts for name in re.findall(r'Registry\.register\("(\w+)"\)', text)}
    assert set(CHOICES[f"{rollout}.checkpoint_engine.backend"]) == {*registered, "relay"}


def test_estimators_that_verls_v1_trainer_cannot_compute(queue):
    """Its own method, with all fields that a batch of the V1 trainer has then."""
    import torch
    import transfer_queue as tq
    from tensordict import NonTensorStack, TensorDict
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    keys, fields = ["a_0_0", "a_1_0", "b_0_0", "b_1_0"], {"uid": NonTensorStack("a", "a", "b", "b")}
    ones = torch.nested.as_nested_tensor([torch.ones(length) for length in (2, 3, 4, 3)], layout=torch.jagged)
    for name in ("response_mask", "rm_scores", "rollout_log_probs", "old_log_probs", "values", "prompts"):
        fields[name] = ones.clone()
    tq.kv_batch_put(keys=keys, partition_id="train", fields=TensorDict(fields, batch_size=4), tags=[{}] * 4)
    batch = tq.KVBatchMeta(keys=keys, tags=[{}] * 4, partition_id="train")
    trainer = SimpleNamespace(config=compose(["+algorithm.gdpo_reward_keys=[score]"]))

    def fails(name):
        trainer.config.algorithm.adv_estimator = name
        try:
            PPOTrainer._compute_advantage(trainer, batch, {})
        except (AssertionError, KeyError, TypeError):
            return True
        return False

    names = {str(getattr(each, "value", each)) for each in ADV_ESTIMATOR_REGISTRY}
    assert {name for name in names if fails(name)} == set(LEGACY_ESTIMATORS)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["qwen3_8b_grpo", "tiny_cpu"])
def test_a_recipe_has_a_dry_run(recipe, tmp_path):
    """The scripts themselves: one YAML document on standard output, the estimate in its comments, no GPU, no data.
    ``test_recipes.py`` composes all of them."""
    script = ROOT / "recipes" / f"run_{recipe}.sh"
    environment = {**os.environ, "DRY_RUN": "1", "RUN_DIR": str(tmp_path), "SKIP_BOOTSTRAP": "1", "GPU_MEMORY_GB": "80"}
    found = subprocess.run(["bash", str(script)], capture_output=True, text=True, timeout=300, env=environment)
    assert found.returncode == 0, found.stderr
    config = OmegaConf.create(found.stdout)
    assert config.actor_rollout_ref.rollout.custom.rhyme.enable
    assert "\n# update: " in found.stdout
    assert "\n# KV cache: " in found.stdout
    assert list(tmp_path.iterdir()) == []
