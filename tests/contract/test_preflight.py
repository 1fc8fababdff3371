"""What the preflight says of verl and vLLM is what they say of themselves."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl_rhyme.checks.preflight import memory
from verl_rhyme.checks.preflight.components import AGENT_LOOPS, LOGGERS
from verl_rhyme.checks.preflight.compose import compose
from verl_rhyme.checks.preflight.memory import Rollout, Training
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


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
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
        attention_bias=kind == "llama",
        mlp_bias=kind == "llama",
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert Architecture.read(config.to_dict()).parameters == sum(p.numel() for p in model.parameters())


def measured_peaks(fields, recompute: bool, rows: int, length: int) -> tuple[int, int]:
    """Return the peak bytes, by torch's allocator, of a second training step as verl's FSDP engine makes it: of forward
    and backward, and of Adam's step.
    """
    import gc

    import torch
    from torch.profiler import ProfilerActivity, profile, record_function
    from transformers import AutoConfig, AutoModelForCausalLM
    from verl.utils.torch_functional import logprobs_from_logits

    gc.collect()  # an earlier model that is freed during the measurement would count
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        config = AutoConfig.for_model(**fields)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").train()
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=False)
        for step in range(2):
            with record_function(f"backward {step}"):
                for _ in range(2):
                    ids = torch.randint(0, fields["vocab_size"], (rows, length))
                    logits = model(input_ids=ids, use_cache=False).logits
                    loss = -logprobs_from_logits(logits, ids).mean()
                    del logits
                    loss.backward()
                    del loss
            with record_function(f"step {step}"):
                optimizer.step()
                optimizer.zero_grad()
    events = profiler.profiler.kineto_results.events()
    span = {e.name(): (e.start_ns(), e.end_ns()) for e in events if e.name() in ("backward 1", "step 1")}
    peaks, held = dict.fromkeys(span, 0), 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        for name, (start, end) in span.items():
            if start <= event.start_ns() <= end:
                peaks[name] = max(peaks[name], held)
    return peaks["backward 1"], peaks["step 1"]


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_the_estimate_is_within_fifteen_percent_of_the_allocator(recompute):
    fields = {"model_type": "qwen2", "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8}
    fields |= {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 16384}
    fields |= {"tie_word_embeddings": False, "max_position_embeddings": 8192}
    training = Training("torch", compute_bytes=4, fused_loss=False, foreach=False, tokens=256, recompute=recompute)
    update, step = measured_peaks(fields, recompute, rows=2, length=128)
    model = Architecture.read(fields)
    assert memory.update(model, training).total == pytest.approx(update, rel=0.15)
    assert memory.optimizer_step(model, training).total == pytest.approx(step, rel=0.15)


def test_values_by_name_are_those_that_verl_and_vllm_know():
    import typing

    from verl import checkpoint_engine
    from verl.experimental.agent_loop import agent_loop, single_turn_agent_loop, tool_agent_loop  # noqa: F401
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


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted(ROOT.glob("recipes/run_*.sh")), ids=lambda script: script.stem)
def test_every_recipe_has_a_dry_run(script, tmp_path):
    """The scripts themselves: one YAML document on standard output, the estimate in its comments, no GPU, no data."""
    subprocess.run(["bash", "-n", str(script)], check=True)
    environment = {**os.environ, "DRY_RUN": "1", "RUN_DIR": str(tmp_path), "SKIP_BOOTSTRAP": "1", "GPU_MEMORY_GB": "80"}
    found = subprocess.run(["bash", str(script)], capture_output=True, text=True, timeout=300, env=environment)
    assert found.returncode == 0, found.stderr
    config = OmegaConf.create(found.stdout)
    assert config.actor_rollout_ref.rollout.custom.rhyme.enable
    assert "\n# update: " in found.stdout
    assert "\n# KV cache: " in found.stdout
    assert list(tmp_path.iterdir()) == []
