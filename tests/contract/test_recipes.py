"""The recipes for GPUs, as their scripts start them, on the installed verl."""

import copy
import functools
import itertools
import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl_rhyme.checks.preflight.checks import examine
from verl_rhyme.checks.preflight.compose import compose
from verl_rhyme.config import PIPELINES, PRESETS, config_tree

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "recipes" / "config"
MODEL = ROOT / "examples" / "tiny_world" / "models" / "qwen2"
ENGINES = ("megatron", "fsdp")
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

#: Samples of one update by recipe: the papers' "mini batch".
RECIPES = {
    "qwen32b_dapo": 512,
    "llama8b_logic": 1024,
    "qwen3_8b_grpo": 256,
    "qwen32b_ppo_math": 128,
    "qwen3_5_9b_dapo": 512,
    "qwen3_30b_a3b_gspo": 512,
}
#: Recipes with one engine.
FSDP_ONLY = ("qwen3_5_9b_dapo",)


def start(recipe, *arguments, verl_rhyme="exit 0", **variables):
    """Run a recipe's script with stand-ins for the programs it calls; ``(result, [[program, argument, ...], ...])``."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "record")
        for program, answer in (("verl-rhyme", verl_rhyme), ("python", "echo trained")):
            line = f"printf '%s\\0' {program} \"$@\" >> {record}; printf '\\n' >> {record}"
            Path(folder, program).write_text(f"#!/bin/sh\n{line}\n{answer}\n")
            Path(folder, program).chmod(0o755)
        kept = {key: value for key, value in os.environ.items() if key in ("HOME", "LANG")}
        own = {"PATH": f"{folder}:/usr/bin:/bin", "SKIP_BOOTSTRAP": "1", "RUN_DIR": f"{folder}/run"}
        result = subprocess.run(
            ["bash", ROOT / "recipes" / f"run_{recipe}.sh", *arguments],
            cwd=folder,
            env={**kept, **own, "MODEL": str(MODEL), **variables},
            capture_output=True,
            text=True,
            timeout=60,
        )
        calls = record.read_text().split("\n")[:-1] if record.exists() else []
        return result, [call.split("\0")[:-1] for call in calls]


@functools.cache
def composed(recipe, rhyme, engine, mode="", **variables):
    """What ``python -m verl.trainer.main_ppo`` would train with."""
    result, calls = start(recipe, DRY_RUN="1", RHYME=rhyme, ENGINE=engine, MODE=mode, **variables)
    assert result.returncode == 0, result.stderr
    assert calls[-1][:3] == ["verl-rhyme", "preflight", "--dry-run"]
    return compose(calls[-1][calls[-1].index("--") + 1 :])


def differing(config, expected):
    return {
        key: OmegaConf.select(config, key) for key, value in expected.items() if OmegaConf.select(config, key) != value
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "engine"),
    [(name, engine) for name in RECIPES for engine in ENGINES if engine == "fsdp" or name not in FSDP_ONLY],
)
def test_verl_turns_it_into_its_dataclasses(recipe, engine):
    """verl's own validation and conversions, as the V1 trainer and its workers do them; an unknown key raises."""
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    config = copy.deepcopy(composed(recipe, "histospec", engine))
    model, length = config.actor_rollout_ref, config.data.max_prompt_length + config.data.max_response_length
    assert model.actor.ppo_mini_batch_size * model.rollout.n == RECIPES[recipe]
    assert model.rollout.max_model_len == length
    assert min(model.actor.ppo_max_token_len_per_gpu, model.rollout.log_prob_max_token_len_per_gpu) >= length
    critic, reference = need_critic(config), need_reference_policy(config)
    assert critic == (recipe == "qwen32b_ppo_math")
    assert reference == (recipe in ("llama8b_logic", "qwen3_8b_grpo"))
    config.data.train_files = config.data.val_files = __file__  # ours looks whether there are any
    validate_config(config, use_reference_policy=reference, use_critic=critic)
    for part in (model.actor, *[config.critic] * critic):
        assert omega_conf_to_dataclass(part).engine.strategy == ("megatron" if engine == "megatron" else "fsdp2")
    omega_conf_to_dataclass(model.rollout)
    omega_conf_to_dataclass(config.algorithm)
    get_adv_estimator_fn(config.algorithm.adv_estimator)


def test_kernels_keep_experts_as_a_weight_sync_loads_them():
    """vLLM chooses FlashInfer's on Blackwell, which keep them in blocks."""
    rollout = composed("qwen3_30b_a3b_gspo", "histospec", "megatron").actor_rollout_ref.rollout
    assert rollout.engine_kwargs.vllm.get("moe_backend") == "triton"


MODES = [("qwen3_8b_grpo", "colocate_async"), *itertools.product([*RECIPES, "tiny_cpu"], ("sync", "separate_async"))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "mode", "rhyme"),
    [(*mode, rhyme) for mode, rhyme in itertools.islice(zip(itertools.cycle(MODES), itertools.cycle(PRESETS)), 18)],
)
def test_every_recipe_in_every_mode_with_presets_in_turn(recipe, mode, rhyme, monkeypatch):
    """It composes, and the preflight finds nothing that would stop it."""
    separate, ours = mode == "separate_async", rhyme in PIPELINES
    for name in ("DATA", "MODEL", "TINY_WORLD", "RUN_DIR"):
        monkeypatch.setenv(name, str(MODEL) if name == "MODEL" else name.lower())
    engine = "fsdp" if recipe in FSDP_ONLY else ENGINES[(separate + list(PRESETS).index(rhyme)) % 2]
    # TP is 8 of a real model's heads
    sizes = {} if recipe == "tiny_cpu" else {"TP": "1", "SP": "1", "ROLLOUT_TP": "1"}
    config = composed(recipe, rhyme, engine, mode, **sizes, **({"STALENESS": "2"} if ours else {}))
    assert [check for check in examine(config, elsewhere=True, imports=False).checks if check.status == "fail"] == []
    tree = config_tree.from_verl(config)
    assert (None if tree is None else tree.max_staleness) == (2 if ours else None)
    assert config.trainer.v1.trainer_mode == mode
    assert config.actor_rollout_ref.hybrid_engine == (not separate or (not ours and recipe != "tiny_cpu"))
    carrier = ("relay" if ours or recipe == "tiny_cpu" else "nccl") if separate else "naive"
    assert config.actor_rollout_ref.rollout.checkpoint_engine.backend == carrier
    assert not separate or config.actor_rollout_ref.rollout.nnodes == 1
    if recipe != "tiny_cpu":
        batch, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
        assert config.trainer.v1.separate_async.parameter_sync_step == (1 if ours else batch // mini)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"STALENESS": "-1", "RHYME": "full"}, "STALENESS=-1 is below 0, which is on-policy"),
        ({"STALENESS": "1"}, "STALENESS=1 needs the pipeline, which RHYME=histospec does not"),
        ({"RHYME": "histospeck"}, "RHYME=histospeck is unknown; use one of full histopipe histospec off sorted stream"),
        ({"DRY_RUN": "yes"}, "DRY_RUN=yes is unknown; use one of 0 1"),  # taken for off, it would train
        ({"TP": "two"}, "TP=two is not a whole number"),
        ({"NNODES": "0"}, "NNODES=0 is below 1"),
        ({"VAL_FILE": "/tmp/a=(b)"}, "VAL_FILE=/tmp/a=(b) contains =(), which hydra cannot read"),
    ],
)
def test_a_wrong_variable_is_one_line_before_anything_starts(variables, message):
    result, calls = start("qwen3_8b_grpo", **variables)
    assert (result.returncode, len(result.stderr.splitlines()), calls) == (2, 1, [])
    assert message in result.stderr


def test_checks_then_trains_with_the_same_arguments():
    result, calls = start("qwen3_8b_grpo", "trainer.total_epochs=3")
    assert result.returncode == 0, result.stderr
    starts = ["verl-rhyme preflight --", "verl-rhyme claim --", "python -m verl.trainer.main_ppo"]
    assert [" ".join(call[:3]) for call in calls] == starts
    assert calls[0][3:] == calls[1][3:] == calls[2][3:]
    assert calls[2][-1] == "trainer.total_epochs=3"
    assert result.stderr.startswith("qwen3_8b_grpo: RHYME=histospec MODE=sync ENGINE=megatron in ")


@pytest.mark.parametrize(
    ("answer", "skip", "status", "called"),
    [
        ("exit 1", "0", 1, ["preflight"]),
        ("exit 0", "1", 0, ["claim", "-m"]),
        ('[ "$1" != claim ] || exit 1', "0", 1, ["preflight", "claim"]),  # another run's folder
        ('[ "$1" != claim ] || exit 3', "0", 0, ["preflight", "claim"]),  # a finished run
    ],
)
def test_a_check_stops_it(answer, skip, status, called):
    result, calls = start("qwen3_8b_grpo", verl_rhyme=answer, SKIP_PREFLIGHT=skip)
    assert result.returncode == status
    assert [call[1] for call in calls] == called


def test_variables(tmp_path):
    given = {"NNODES": "2", "GPUS_PER_NODE": "4", "TP": "4", "PP": "2", "ROLLOUT_TP": "2", "ROLLOUT_NNODES": "3"}
    paths = {"DATA_DIR": str(tmp_path), "VAL_FILE": "[a.parquet,b.parquet]", "RUN_DIR": str(tmp_path / "a run")}
    given |= {**paths, "MODEL": "some/model", "LOGGER": "file,wandb", "SEED": "7"}
    config = composed("qwen32b_ppo_math", "histospec", "megatron", "separate_async", **given)
    expected = {
        "data.train_files": str(tmp_path / "dapo-math-17k.parquet"),
        "data.val_files": ["a.parquet", "b.parquet"],
        "data.seed": 7,
        "trainer.nnodes": 2,
        "trainer.n_gpus_per_node": 4,
        "trainer.logger": ["file", "wandb"],
        "trainer.default_local_dir": str(tmp_path / "a run" / "checkpoints"),
        f"{ACTOR}.megatron.tensor_model_parallel_size": 4,
        "critic.megatron.pipeline_model_parallel_size": 2,
        f"{ROLLOUT}.tensor_model_parallel_size": 2,
        f"{ROLLOUT}.nnodes": 3,
        f"{ROLLOUT}.n_gpus_per_node": 4,
        "actor_rollout_ref.model.path": "some/model",
    }
    assert differing(config, expected) == {}
