"""Preflight of a composed config, and its findings."""

from tests.unit.configs import composed
from verl_rhyme.checks.preflight import checks
from verl_rhyme.checks.preflight.machine import Machine

R, A = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
MEGATRON = "model_engine=megatron"
RELAY = [
    "trainer.v1.trainer_mode=separate_async",
    f"{R}.nnodes=1",
    f"{R}.n_gpus_per_node=8",
    "data.train_batch_size=32",
    f"{R}.checkpoint_engine.backend=relay",
]
ROW = {"prompt": [{"role": "user", "content": "a"}], "data_source": "x", "reward_model": {"ground_truth": "b"}}
MODEL = {
    "model_type": "qwen2",
    "num_hidden_layers": 24,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
}
HERE = Machine(gpus=8, gpu_bytes=80 << 30, gpu_source="nvidia-smi", host_bytes=512 << 30, host_free=400 << 30)


def preflight(world, *overrides, **options):
    return checks.examine(composed(*world, *overrides), imports=False, **options)


def complaints(found):
    """Return the texts of warnings and failures by name and status."""
    complaints = {}
    for check in found.checks:
        if check.status != "ok":
            assert check.remedy or check.name == "rhyme", "an error of the parser contains its remedy"
            complaints.setdefault((check.name, check.status), []).append(f"{check.detail} {check.remedy}")
    return {key: "\n".join(texts) for key, texts in complaints.items()}


def only(found, name):
    """Return the single check of a name."""
    [check] = [check for check in found.checks if check.name == name]
    return check
