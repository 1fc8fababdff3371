"""The recipes for GPUs, as their scripts start them: they compose on the installed verl, and verl reads what they set.

The arguments come from the real scripts, through stand-ins that write down what they were given.
"""

import asyncio
import contextlib
import copy
import functools
import itertools
import os
import shlex
import string
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf, open_dict

from verl_rhyme.checks.preflight.checks import examine
from verl_rhyme.checks.preflight.compose import compose
from verl_rhyme.config import CONFIG_PATH, PIPELINES, PRESETS, config_tree

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "recipes" / "config"
MODEL = ROOT / "examples" / "tiny_world" / "models" / "qwen2"
ENGINES = ("megatron", "fsdp")

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"

RECIPES = ("qwen32b_dapo", "llama8b_logic", "qwen3_8b_grpo", "qwen32b_ppo_math")
#: TP and SP of actor, reference and critic.
SPLIT = {"qwen32b_dapo": (8, 8), "llama8b_logic": (2, 1), "qwen3_8b_grpo": (2, 1), "qwen32b_ppo_math": (8, 8)}
#: Samples of one update: what "mini batch" means in the papers.
UPDATE = {"qwen32b_dapo": 512, "llama8b_logic": 1024, "qwen3_8b_grpo": 256, "qwen32b_ppo_math": 128}

#: Not in verl's YAML, yet read: by DAPORewardManager, by CriticConfig.
ADDED = ("reward.reward_kwargs.", "critic.ppo_infer_max_token_len_per_gpu")
#: In verl's YAML, yet read by nothing in its V1 trainer.
IGNORED = (
    "reward_model.",
    "custom_reward_function.",
    "actor_rollout_ref.nccl_timeout",
    f"{ACTOR}.grad_clip",
    "critic.grad_clip",
    "critic.ulysses_sequence_parallel_size",
    "critic.ppo_max_token_len_per_gpu",
    "critic.forward_max_token_len_per_gpu",
    "critic.use_dynamic_bsz",
    "algorithm.filter_groups.max_num_gen_batches",
)


def start(recipe, *arguments, verl_rhyme="exit 0", training="echo trained", **variables):
    """Run a recipe's script with stand-ins for the programs it calls; ``(result, [[program, argument, ...], ...])``.

    Only ``verl-rhyme run-name`` is the real one.
    """
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "record")
        named = f'[ "$1" != run-name ] || exec {shlex.quote(sys.executable)} -m verl_rhyme.cli "$@"\n'
        for program, answer in (("verl-rhyme", named + verl_rhyme), ("python", training)):
            path = Path(folder, program)
            told = f"printf '{program}\\0' >> {record}\nprintf '%s\\0' \"$@\" >> {record}\nprintf '\\n' >> {record}\n"
            path.write_text(f"#!/bin/sh\n{told}{answer}\n")
            path.chmod(0o755)
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


@pytest.fixture(params=[(recipe, engine) for recipe in RECIPES for engine in ENGINES], ids="-".join)
def case(request):
    recipe, engine = request.param
    return recipe, engine, copy.deepcopy(composed(recipe, "histospec", engine))


def leaves(tree, prefix=""):
    """``(key, value)`` of all in a nested dict."""
    for key, item in tree.items():
        if isinstance(item, dict) and item:
            yield from leaves(item, f"{prefix}{key}.")
        else:
            yield prefix + key, item


def values_of(*files):
    """``{key: value}`` of our YAML files, of which later ones win; without what they interpolate."""
    trees = [OmegaConf.load(CONFIGS / f"{name}.yaml") for name in files if (CONFIGS / f"{name}.yaml").is_file()]
    tree = OmegaConf.to_container(OmegaConf.merge(*trees), resolve=False)
    own = {key: item for key, item in tree.items() if key not in ("hydra", "defaults")}
    return {key: item for key, item in leaves(own) if "${" not in str(item)}


def differing(config, expected):
    return {
        key: OmegaConf.select(config, key) for key, value in expected.items() if OmegaConf.select(config, key) != value
    }


def written(recipe, engine, rhyme="histospec"):
    sizes = [f"{recipe}_rhyme/sorted"] if rhyme in ("sorted", "full") else []
    return values_of("base", f"backend/{engine}", f"{recipe}_engine/{engine}", recipe, *sizes)


@pytest.mark.slow
def test_verl_turns_it_into_its_dataclasses(case):
    """verl's own validation and conversions, as the V1 trainer and its workers do them; an unknown key raises."""
    recipe, engine, config = case
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert actor.ppo_mini_batch_size * rollout.n == UPDATE[recipe]
    length = config.data.max_prompt_length + config.data.max_response_length
    assert rollout.max_model_len == length
    assert min(actor.ppo_max_token_len_per_gpu, rollout.log_prob_max_token_len_per_gpu) >= length

    import torch
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn, kl_penalty
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "Disabled critic ..."
        critic, reference = need_critic(config), need_reference_policy(config)
    assert critic == (recipe == "qwen32b_ppo_math")
    assert reference == (recipe in ("llama8b_logic", "qwen3_8b_grpo"))
    config.data.train_files = config.data.val_files = __file__  # ours looks whether there are any
    validate_config(config, use_reference_policy=reference, use_critic=critic)

    tensor, ulysses = SPLIT[recipe]
    engines = [omega_conf_to_dataclass(config.actor_rollout_ref.actor).engine]
    if reference:
        ref = config.actor_rollout_ref.ref
        with open_dict(ref):  # as ActorRolloutRefWorker.init_model
            ref.ppo_mini_batch_size = 1
            ref.ppo_micro_batch_size = ref.pop("log_prob_micro_batch_size")
            ref.ppo_micro_batch_size_per_gpu = ref.pop("log_prob_micro_batch_size_per_gpu")
            ref.use_dynamic_bsz = ref.pop("log_prob_use_dynamic_bsz")
            ref.ppo_max_token_len_per_gpu = ref.pop("log_prob_max_token_len_per_gpu")
        engines.append(omega_conf_to_dataclass(ref).engine)
    if critic:
        engines.append(omega_conf_to_dataclass(config.critic).engine)
    for built in engines:
        assert built.strategy == ("megatron" if engine == "megatron" else "fsdp2")
        assert built.param_offload
        if engine == "megatron":
            assert built.tensor_model_parallel_size == tensor
            assert built.sequence_parallel == (tensor > 1)
        else:
            assert built.ulysses_sequence_parallel_size == ulysses

    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    assert (rollout.prompt_length, rollout.response_length) == (
        config.data.max_prompt_length,
        config.data.max_response_length,
    )
    omega_conf_to_dataclass(config.algorithm)
    get_adv_estimator_fn(config.algorithm.adv_estimator)
    kl_penalty(torch.zeros(1, 2), torch.zeros(1, 2), config.actor_rollout_ref.actor.kl_loss_type)


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_verl_builds_its_replay_buffer_from_it(recipe, mode):
    """Group filtering and the staleness bound arrive where V1 applies them."""
    from verl.trainer.ppo.v1 import PPOTrainerSync

    trainer = object.__new__(PPOTrainerSync)
    trainer.config, trainer.trainer_mode = composed(recipe, "off", "megatron"), mode
    buffer = trainer._build_replay_buffer()
    assert type(buffer).__name__ == ("ReplayBuffer" if mode == "sync" else "ReplayBufferAsync")
    assert buffer.filter_groups_metric == ("acc" if recipe == "qwen32b_dapo" else None)
    assert buffer.max_off_policy_threshold == 8


@pytest.mark.parametrize("recipe", RECIPES)
def test_reward_manager_is_the_one_that_verl_loads(recipe):
    from verl.experimental.reward_loop.reward_manager.dapo import DAPORewardManager
    from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
    from verl.trainer.ppo.reward import load_reward_manager, resolve_reward_manager_cls

    config = composed(recipe, "off", "megatron")
    expected = DAPORewardManager if recipe == "qwen32b_dapo" else NaiveRewardManager
    assert resolve_reward_manager_cls(config) is expected
    assert type(asyncio.run(_load(load_reward_manager, config))) is expected


async def _load(load_reward_manager, config, tokenizer=None):
    return load_reward_manager(config, tokenizer)  # wants an event loop


@pytest.mark.parametrize(("tokens", "expected"), [(100, -1.0), (16384, -1.0), (18432, -1.5), (20480, -2.0)])
def test_dapo_penalises_overlong_responses(tokens, expected):
    import numpy as np
    import torch
    from tensordict import TensorDict
    from verl import DataProto
    from verl.trainer.ppo.reward import load_reward_manager

    class Tokenizer:
        def decode(self, ids, **_):
            return "Answer: 41"

    ones = torch.ones((1, tokens), dtype=torch.long)
    data = DataProto(
        batch=TensorDict({"responses": ones, "attention_mask": ones}, batch_size=1),
        non_tensor_batch={
            "data_source": np.array(["math_dapo"], dtype=object),
            "reward_model": np.array([{"ground_truth": "42"}], dtype=object),
        },
    )

    async def score():
        manager = await _load(load_reward_manager, composed("qwen32b_dapo", "off", "megatron"), Tokenizer())
        return await manager.run_single(data)

    result = asyncio.run(score())
    assert float(result["reward_score"]) == pytest.approx(expected)
    assert result["reward_extra_info"]["acc"] is False  # what filter_groups reads


def test_a_row_says_how_many_samples_validation_draws(tmp_path):
    """Of files of ``prepare eval``, through verl's data set and collation, as its validation reads it."""
    from types import SimpleNamespace

    import numpy as np
    from typer.testing import CliRunner
    from verl.trainer.ppo.metric_utils import process_validation_metrics
    from verl.utils import tensordict_utils as tu
    from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn

    from examples.data import prepare

    for name in prepare.EVALUATION:
        rows = [prepare.make_row(name, f"{name} {i}?", i, "test", i) for i in range(2)]
        prepare.write(tmp_path / f"{name}.parquet", rows)
    assert CliRunner().invoke(prepare.app, ["eval", "--out", str(tmp_path), "--samples", "4"]).exit_code == 0
    config = OmegaConf.create({"cache_dir": str(tmp_path / "cache"), "filter_overlong_prompts": False})
    files = [str(tmp_path / "eval" / f"{name}.parquet") for name in prepare.EVALUATION]
    data = RLHFDataset(files, SimpleNamespace(), config)
    batch = collate_fn([data[i] for i in range(len(data))])
    batch["uid"] = np.array([str(i) for i in range(len(data))], dtype=object)
    column = tu.get_tensordict(batch)[prepare.SAMPLES]
    counts = dict(zip(zip(batch["data_source"], batch["uid"], strict=True), map(int, column), strict=True))
    assert all(list(range(int(count))) == list(range(n)) for count, n in zip(column, counts.values(), strict=True))
    drawn = [key for key, n in counts.items() for _ in range(n)]
    told = process_validation_metrics([k[0] for k in drawn], [k[1] for k in drawn], {"acc": [1.0] * len(drawn)})
    for name, (_, few) in prepare.EVALUATION.items():
        assert told[name]["acc"][f"mean@{4 if few else 1}"] == 1.0


@functools.cache
def stock(engine):
    return compose([f"model_engine={'dp' if engine == 'fsdp' else engine}", f"{ROLLOUT}.name=vllm"])


@pytest.mark.parametrize(
    "file",
    sorted(CONFIGS.glob("backend/*.yaml"))
    + sorted(file for file in CONFIGS.glob("*_engine/*.yaml") if file.parent.name != "tiny_cpu_engine")
    + [CONFIGS / f"{name}.yaml" for name in ["base", *RECIPES]],
)
def test_every_key_we_set_is_one_that_verl_reads(file):
    tree = OmegaConf.to_container(OmegaConf.load(file))
    tree.pop("hydra", None)
    tree.pop("defaults", None)
    for engine in [file.stem] if file.stem in ENGINES else ENGINES:
        known = {key for key, _ in leaves(OmegaConf.to_container(stock(engine)))}
        unknown = [key for key, _ in leaves(tree) if key not in known and not key.startswith(ADDED)]
        # a dict that verl declares empty, or by an interpolation, holds what it likes
        unknown = [key for key in unknown if not key.startswith("critic.megatron.override_transformer_config")]
        assert unknown == []
    assert [key for key, _ in leaves(tree) if key.startswith(IGNORED)] == []


MODES = [("qwen3_8b_grpo", "colocate_async"), *itertools.product([*RECIPES, "tiny_cpu"], ("sync", "separate_async"))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "mode", "rhyme"),
    [(*mode, rhyme) for mode, rhyme in itertools.islice(zip(itertools.cycle(MODES), itertools.cycle(PRESETS)), 18)],
)
def test_every_recipe_in_every_mode_with_presets_in_turn(recipe, mode, rhyme, monkeypatch):
    """It composes, the preflight finds nothing that would stop it, and its sizes are those of the tables."""
    separate, ours = mode == "separate_async", rhyme in PIPELINES
    for name in ("DATA", "MODEL", "TINY_WORLD", "RUN_DIR"):
        monkeypatch.setenv(name, str(MODEL) if name == "MODEL" else name.lower())
    engine = ENGINES[(separate + list(PRESETS).index(rhyme)) % 2]
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
        assert differing(config, written(recipe, engine, rhyme)) == {}
        batch, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
        assert config.trainer.v1.separate_async.parameter_sync_step == (1 if ours else batch // mini)


@pytest.mark.parametrize("rhyme", ["full", "off"])
def test_the_yaml_alone_selects_a_preset(rhyme, tmp_path):
    """With plain ``python -m verl.trainer.main_ppo``: the recipe's own YAML, or one of a user's that names another."""
    text = (CONFIGS / "qwen3_8b_grpo.yaml").read_text()
    assert "  - rhyme: histospec" in text
    text = text.replace("  - rhyme: histospec", f'  - rhyme: "{rhyme}"')
    (tmp_path / "mine.yaml").write_text(text.replace("  searchpath:", f"  searchpath:\n    - file://{CONFIGS}"))
    config = compose(["--config-path", str(tmp_path), "--config-name", "mine"])
    by_script = composed("qwen3_8b_grpo", rhyme, "megatron")
    for key in (
        "data.train_batch_size",
        f"{ACTOR}.ppo_mini_batch_size",
        "trainer.save_freq",
        "trainer.v1.trainer_mode",
    ):
        assert OmegaConf.select(config, key) == OmegaConf.select(by_script, key)
    assert config_tree.from_verl(config) == config_tree.from_verl(by_script)
    assert config.trainer.experiment_name == rhyme


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"STALENESS": "-1", "RHYME": "full"}, "STALENESS=-1 is below 0, which is on-policy"),
        ({"STALENESS": "1"}, "STALENESS=1 needs the pipeline, which RHYME=histospec does not"),
        ({"RHYME": "histospeck"}, "RHYME=histospeck is unknown; use one of full histopipe histospec off sorted stream"),
        ({"ENGINE": "deepspeed"}, "ENGINE=deepspeed is unknown; use one of megatron fsdp"),
        ({"MODE": "my_async"}, "MODE=my_async is unknown; use one of sync colocate_async separate_async"),
        # taken for off, DRY_RUN=yes would train
        *(({name: "yes"}, f"{name}=yes is unknown; use one of 0 1") for name in ("DRY_RUN", "SKIP_PREFLIGHT")),
        ({"TP": "two"}, "TP=two is not a whole number"),
        *(({name: "0"}, f"{name}=0 is below 1") for name in ("NNODES", "ROLLOUT_TP")),
        *(
            ({name: "/tmp/a=(b)"}, f"{name}=/tmp/a=(b) contains =(), which hydra cannot read")
            for name in ("RUN_DIR", "VAL_FILE", "MODEL")
        ),
    ],
)
def test_a_wrong_variable_is_one_line_before_anything_starts(variables, told):
    result, calls = start("qwen3_8b_grpo", **variables)
    assert (result.returncode, len(result.stderr.splitlines()), calls) == (2, 1, [])
    assert told in result.stderr


def test_checks_then_trains_with_the_same_arguments():
    result, calls = start("qwen3_8b_grpo", "trainer.total_epochs=3")
    assert result.returncode == 0, result.stderr
    preflight, claim, training = calls
    assert preflight[:3] == ["verl-rhyme", "preflight", "--"]
    assert claim[:3] == ["verl-rhyme", "claim", "--"]
    assert training[:3] == ["python", "-m", "verl.trainer.main_ppo"]
    assert preflight[3:] == claim[3:] == training[3:]
    assert training[-1] == "trainer.total_epochs=3"
    assert "trained" in result.stdout
    assert result.stderr.startswith("qwen3_8b_grpo: RHYME=histospec MODE=sync ENGINE=megatron in ")
    assert "timing_s/gen" in result.stdout.splitlines()[-1]


def test_a_failed_check_stops_it():
    result, calls = start("qwen3_8b_grpo", verl_rhyme="exit 1")
    assert result.returncode == 1
    assert "SKIP_PREFLIGHT=1" in result.stderr
    assert [call[0] for call in calls] == ["verl-rhyme"]
    result, calls = start("qwen3_8b_grpo", verl_rhyme='[ "$1" = claim ]', SKIP_PREFLIGHT="1")
    assert result.returncode == 0
    assert [call[:2] for call in calls] == [["verl-rhyme", "claim"], ["python", "-m"]]


@pytest.mark.parametrize(("claimed", "status"), [(1, 1), (3, 0)])
def test_a_foreign_folder_and_a_finished_run_are_not_trained_in(claimed, status):
    result, calls = start("qwen3_8b_grpo", verl_rhyme=f'[ "$1" != claim ] || exit {claimed}')
    assert result.returncode == status
    assert [call[1] for call in calls] == ["preflight", "claim"]


@pytest.mark.parametrize(
    ("variables", "overrides", "name"),
    [
        ({}, [], "histospec-qwen2-megatron-sync"),
        ({"ENGINE": "fsdp", "MODE": "colocate_async"}, ["rhyme=off"], "off-qwen2-fsdp-colocate_async"),
        ({"RHYME": "full", "STALENESS": "2", "MODE": "separate_async"}, [], "full-k2-qwen2-megatron-separate_async"),
        ({"RHYME": "full"}, [f"{CONFIG_PATH}.max_staleness=0"], "full-k0-qwen2-megatron-colocated"),
        (
            {"RHYME": "stream", "SMOKE": "1"},
            [f"{CONFIG_PATH}.drafting.enable=false"],
            "smoke/stream-no_drafting-qwen2-megatron-separate_async",
        ),
    ],
)
def test_python_names_the_folder(variables, overrides, name):
    result, calls = start("qwen3_8b_grpo", *overrides, DRY_RUN="1", RUN_DIR="", **variables)
    assert result.returncode == 0, result.stderr
    named, dry_run = calls
    assert named[1] == "run-name"
    assert compose(dry_run[4:]).trainer.default_local_dir == f"{ROOT}/runs/qwen3_8b_grpo/{name}/checkpoints"


def test_variables(tmp_path):
    config = composed(
        "qwen32b_ppo_math",
        "histospec",
        "megatron",
        "separate_async",
        NNODES="2",
        GPUS_PER_NODE="4",
        TP="4",
        PP="2",
        ROLLOUT_TP="2",
        MODEL="some/model",
        DATA_DIR=str(tmp_path),
        VAL_FILE="[a.parquet,b.parquet]",
        RUN_DIR=str(tmp_path / "a run"),
        LOGGER="file,wandb",
        SEED="7",
        ROLLOUT_NNODES="3",
    )
    expected = {
        "data.train_files": str(tmp_path / "dapo-math-17k.parquet"),
        "trainer.nnodes": 2,
        "trainer.n_gpus_per_node": 4,
        f"{ACTOR}.megatron.tensor_model_parallel_size": 4,
        f"{ACTOR}.megatron.pipeline_model_parallel_size": 2,
        "critic.megatron.pipeline_model_parallel_size": 2,
        f"{ROLLOUT}.tensor_model_parallel_size": 2,
        f"{ROLLOUT}.nnodes": 3,
        f"{ROLLOUT}.n_gpus_per_node": 4,
        f"{ROLLOUT}.seed": 7,
        "data.seed": 7,
        "actor_rollout_ref.model.path": "some/model",
        "data.val_files": ["a.parquet", "b.parquet"],
        "trainer.logger": ["file", "wandb"],
        "trainer.default_local_dir": str(tmp_path / "a run" / "checkpoints"),
        "ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH": str(tmp_path / "a run" / "metrics.jsonl"),
    }
    assert differing(config, expected) == {}


def test_paths_are_refused_where_hydra_cannot_read_them():
    def read(value):
        with contextlib.suppress(HydraException):
            return OverridesParser.create().parse_override(f"key={value}").value()

    paths = {each: f"/a{each}b/{each}c/d" for each in [*string.printable, "ü", "日"]}
    script = 'for P in "$@"; do (plain_path P) 2> /dev/null && echo yes || echo no; done'
    command = ["bash", "-c", f"source {shlex.quote(str(ROOT))}/recipes/settings.sh; NAME=test; {script}", "-"]
    told = subprocess.run([*command, *paths.values()], capture_output=True, text=True, check=True).stdout.split()
    taken = {each for each, word in zip(paths, told, strict=True) if word == "yes"}
    readable = {each for each, path in paths.items() if read(path) == path}
    assert {*string.ascii_letters, *string.digits, *" ._-+@%"} <= taken
    # hydra drops a tab at the end, and a backslash before some others
    assert readable - taken == {"\t", "\\"}
    assert taken <= readable


@pytest.mark.parametrize("recipe", ["qwen3_8b_grpo", "tiny_cpu"])
def test_a_checkout_where_hydra_cannot_read_it(recipe, tmp_path):
    (tmp_path / "a=b").symlink_to(ROOT)
    script = tmp_path / "a=b" / "recipes" / f"run_{recipe}.sh"
    environment = {**os.environ, "SKIP_BOOTSTRAP": "1", "RUN_DIR": str(tmp_path / "run")}
    result = subprocess.run(["bash", script], env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert f"the checkout's folder={tmp_path}/a=b contains =, which hydra cannot read" in result.stderr
    assert len(result.stderr.splitlines()) == 1
