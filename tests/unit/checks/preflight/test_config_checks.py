"""Checks of a config alone: every check passes on a valid run, and reports a problem with its remedy."""

import functools
import importlib.util
import re
from pathlib import Path

import pytest

from tests.unit.checks.preflight.world import MEGATRON, RELAY, SEPARATE, A, R, complaints, only, preflight
from tests.unit.configs import ROOT
from verl_rhyme.checks.preflight import config_checks, user_code


def test_a_valid_run_has_no_complaints(world):
    found = preflight(world)
    assert not complaints(found)
    assert found.estimate is not None
    assert found.estimate.parameters == 494_032_768
    assert found.plan.replicas == 4
    names = {check.name for check in found.checks}
    assert names >= {"rhyme", "parallel sizes", "batches", "rollout", "data.train_files", "data.val_files", "model"}
    assert names >= {
        "run folder",
        "reward function",
        "GPUs",
        "GPU memory",
        "KV cache",
        "host memory",
        "checkpoints",
        "history store",
    }


SEPARATE_MODE = "trainer.v1.trainer_mode=separate_async"


@pytest.mark.parametrize(
    ("overrides", "name", "words"),
    [
        ([f"+{R}.custom.rhyme.drafting.flor=1"], "rhyme", "drafting.flor"),
        (["trainer.v1.trainer_mode=colocate_asnyc"], "trainer mode", "did you mean colocate_async?"),
        ([MEGATRON, f"{A}.megatron.tensor_model_parallel_size=3"], "parallel sizes", "8 training GPUs"),
        ([MEGATRON, f"{A}.megatron.tensor_model_parallel_size=4"], "parallel sizes", "14 attention heads"),
        ([MEGATRON, f"{A}.megatron.pipeline_model_parallel_size=16"], "parallel sizes", "24 layers"),
        ([f"{A}.fsdp_config.fsdp_size=3"], "parallel sizes", "fsdp_size"),
        ([f"{A}.ulysses_sequence_parallel_size=4"], "parallel sizes", "Ulysses: 14 attention heads"),
        ([f"{R}.tensor_model_parallel_size=3"], "parallel sizes", "8 rollout GPUs"),
        ([f"{R}.tensor_model_parallel_size=4"], "parallel sizes", "vLLM: 14 attention heads"),
        (
            [SEPARATE_MODE, f"{R}.nnodes=1", f"{R}.n_gpus_per_node=3"],
            "parallel sizes",
            "3 standalone rollout GPUs are not a multiple of the 2 GPUs of a replica",
        ),
        (["data.train_batch_size=48"], "batches", "ppo_mini_batch_size=32"),
        ([f"{R}.n=1", f"{A}.ppo_mini_batch_size=4"], "batches", "8 data-parallel ranks"),
        ([f"{A}.use_dynamic_bsz=true", f"{A}.ppo_max_token_len_per_gpu=1000"], "batches", "raise it to 1536"),
        (
            [MEGATRON, f"{A}.optim.lr_warmup_steps=10", "trainer.total_training_steps=5"],
            "batches",
            "lr_warmup_steps=10",
        ),
        (["actor_rollout_ref.hybrid_engine=false"], "batches", "separate_async"),
        ([SEPARATE_MODE, f"{R}.nnodes=1"], "batches", "parameter_sync_step"),
        ([SEPARATE_MODE, f"{R}.nnodes=0"], "batches", "without a rollout pool"),
        ([SEPARATE_MODE, f"{R}.nnodes=1"], "batches", "set it to relay (with rhyme), nccl"),
        (
            [*SEPARATE[1:], "reward.reward_model.enable=true", "reward.reward_model.enable_resource_pool=false"],
            "batches",
            "enable_resource_pool=true",
        ),
        ([f"{R}.checkpoint_engine.backend=rellay"], "weights", "is not one of naive, nccl"),
        ([*RELAY, f"+{R}.checkpoint_engine.engine_kwargs.relay.foldr=/x"], "weights", "takes only folder=PATH"),
        ([*RELAY, f"+{R}.checkpoint_engine.engine_kwargs.relay.folder=4"], "weights", "takes only folder=PATH"),
        ([*RELAY, f"+{R}.checkpoint_engine.engine_kwargs.relay=/x"], "weights", "takes only folder=PATH"),
        ([MEGATRON, f"{A}.ppo_micro_batch_size_per_gpu=null"], "batches", "or actor_rollout_ref.actor.use_dynamic_bsz"),
        ([f"{R}.enforce_eager=maybe"], "types", f"{R}.enforce_eager must be true or false, not 'maybe'"),
        (["algorithm.rollout_correction.rollout_is_threshold=0.5_x"], "types", "must be a number, not '0.5_x'"),
        (["critic.optim.lr=fast"], "types", "critic.optim.lr must be a number, not 'fast'"),
        ([MEGATRON, f"{A}.megatron.param_offload=some"], "types", "param_offload must be true or false, not 'some'"),
        (["algorithm.adv_estimator=gprp"], "values", "did you mean grpo?"),
        ([f"{R}.dtype=bf16"], "values", "did you mean bfloat16?"),
        ([f"+{R}.engine_kwargs.vllm.max_modle_len=9"], "engine options", "did you mean max_model_len?"),
        (["trainer.logger=[console,wanbd]"], "loggers", "did you mean wandb?"),
        (["trainer.logger=swanlab"], "loggers", "pip install swanlab"),
        (["custom_reward_function.path=/x.py"], "reward", "set reward.custom_reward_function.path instead"),
        (["reward_model.reward_manager=dapo"], "reward", "set reward.reward_manager.name instead"),
        ([f"{R}.agent.default_agent_loop=tool_agnt"], "agent loops", "did you mean tool_agent?"),
        ([f"{R}.agent.agent_loop_config_path=/nowhere.yaml"], "agent loops", "no file /nowhere.yaml"),
        ([f"{R}.multi_turn.tool_config_path=/nowhere.yaml"], "agent loops", "no file /nowhere.yaml"),
        ([f"{R}.multi_turn.function_tool_path=/nowhere.py"], f"{R}.multi_turn.function_tool_path", "no file"),
        (["data.custom_cls.path=/nowhere.py"], "data.custom_cls.path", "no file /nowhere.py"),
        ([f"{R}.max_model_len=1000"], "rollout", "prompt + response = 1536"),
        ([f"{R}.enable_chunked_prefill=false"], "rollout", "chunked prefill"),
        ([f"{R}.max_num_batched_tokens=32"], "rollout", "max_num_seqs=64"),
    ],
)
def test_an_invalid_run_fails(world, overrides, name, words):
    found = complaints(preflight(world, *overrides))
    assert words in found.get((name, "fail"), ""), found


@pytest.mark.parametrize(
    "values",
    [
        ["algorithm.rollout_correction.rollout_is_threshold=0.5_5.0"],  # IcePop, verl's documented form
        ["trainer.max_actor_ckpt_to_keep=-1"],  # verl keeps all
    ],
)
def test_all_values_that_verl_takes_are_allowed(world, values):
    assert "fail" not in {status for _, status in complaints(preflight(world, *values))}


def test_a_key_that_is_added_and_nearly_one_of_verls_warns(world):
    found = complaints(preflight(world, "+trainer.totl_epochs=4", "+data.my_option=1"))
    assert "trainer.totl_epochs: verl has no such key; did you mean trainer.total_epochs?" in found.pop(
        ("keys", "warn")
    )
    assert not found


def test_refused_options_of_the_pipeline_do_not_count_as_verls_schedule(world):
    found = complaints(preflight(world[1:], "+rhyme=full", SEPARATE_MODE, f"{R}.custom.rhyme.scheduling.in_flight=9"))
    assert "in_flight=9" in found["rhyme", "fail"]
    assert "parameter_sync_step" not in found.get(("batches", "fail"), "")


def test_backends_are_the_registered_ones():
    package = importlib.util.find_spec("verl").submodule_search_locations[0]
    texts = [file.read_text() for file in (Path(package) / "checkpoint_engine").glob("*.py")]
    registered = {name for text in texts for name in re.findall(r'Registry\.register\("(\w+)"\)', text)}
    assert registered | {"relay"} == set(config_checks.BACKENDS)


@pytest.mark.parametrize(
    ("preset", "overrides", "rules"),
    [
        ("full", RELAY, "max_staleness 1, in_flight 2, put_off 0, take finished, refill always, at_version continue"),
        (
            "full",
            [f"{R}.custom.rhyme.max_staleness=0", f"{R}.custom.rhyme.scheduling.put_off=0.25"],
            "max_staleness 0, in_flight 1.125, put_off 0.25, take finished, refill always, at_version regenerate",
        ),
    ],
)
def test_the_rules_in_force_are_reported(world, preset, overrides, rules):
    found = preflight(world[1:], f"+rhyme={preset}", f"{R}.calculate_log_probs=true", *overrides)
    assert [check.detail for check in found.checks if f"rules in force: {rules}" in check.detail], found.checks


def test_a_placement_policy_needs_several_replicas(world):
    def warned(*overrides):
        return complaints(preflight(world, f"{R}.custom.rhyme.placement.policy=histopipe", *overrides)).get(
            ("placement", "warn"), ""
        )

    assert "placement.policy=histopipe has no effect with a single replica" in warned("trainer.n_gpus_per_node=2")
    assert not warned()


def test_too_few_tokens_for_drafts_warn(world):
    found = preflight(world, f"{R}.max_num_seqs=200", f"{R}.max_num_batched_tokens=300")
    assert "leaves no room for draft tokens" in complaints(found)["rollout", "warn"]


VALUES = {
    "trainer mode": "trainer.v1.trainer_mode=my_async",
    "values": "algorithm.adv_estimator=mine",
    "weights": f"{R}.checkpoint_engine.backend=mine",
    "loggers": "trainer.logger=mine",
    "agent loops": f"{R}.agent.default_agent_loop=mine",
}


class Plugin:
    name, group = "mine", "verl.plugins"


@pytest.mark.parametrize(
    ("source", "reach"),
    [
        ("VERL_USE_EXTERNAL_MODULES", VALUES),
        ("a main of the user's own", VALUES),
        ("a plugin", VALUES),
        ("actor_rollout_ref.model.external_lib=mine", {*VALUES} - {"trainer mode"}),
        (f"{R}.checkpoint_engine.custom_backend_module=mine", {"values", "weights", "loggers"}),
        ("data.custom_cls.path=pkg://tests.mine", {"values", "loggers"}),
        ("reward.custom_reward_function.path=pkg://tests.mine", set()),
    ],
)
def test_names_that_code_of_the_user_may_register_only_warn(world, monkeypatch, source, reach):
    """Each name is looked up in one process; what other processes load cannot register it."""
    overrides = []
    if "=" in source:
        overrides.append(source)
    elif source == "a plugin":
        monkeypatch.setattr(user_code.importlib.metadata, "entry_points", lambda group: [Plugin])
    elif "main" in source:
        monkeypatch.setattr(user_code, "own_main", True)
    else:
        monkeypatch.setenv(source, "verl_rhyme.plugin,mine")
    found = complaints(preflight(world, *VALUES.values(), *overrides))
    for name, override in VALUES.items():
        assert override.partition("=")[0] in found[name, "warn" if name in reach else "fail"]
        assert (name, "fail" if name in reach else "warn") not in found


def test_a_reward_file_may_register_a_reward_manager(world):
    manager = "reward.reward_manager.name=mine"
    assert "reward.custom_reward_function.path=" in complaints(preflight(world, manager))["values", "warn"]
    without = "reward.custom_reward_function.path=null"
    assert ("values", "fail") in complaints(preflight(world, manager, without))


def test_the_pipeline_runs_in_verls_trainer_modes_only(world):
    found = complaints(preflight(world, VALUES["trainer mode"], f"{R}.custom.rhyme.max_staleness=1"))
    assert "trainer_mode=my_async" in found["rhyme", "fail"]
    assert not [name for name, _ in found if name == "trainer mode"], "the table of combinations reports it, once"


def test_a_function_of_verl_is_no_main_of_the_user():
    from verl.utils.config import validate_config

    assert user_code.is_verls(validate_config)
    assert not user_code.is_verls(preflight)
    assert not user_code.is_verls(functools.partial(validate_config)), "an object"


def test_a_separate_rollout_pool(world):
    found = preflight(
        world,
        "trainer.v1.trainer_mode=separate_async",
        "trainer.v1.separate_async.parameter_sync_step=2",
        "actor_rollout_ref.hybrid_engine=false",
        f"{R}.nnodes=2",
        f"{R}.n_gpus_per_node=8",
        f"{R}.checkpoint_engine.backend=nccl",
    )
    assert not complaints(found)
    assert found.plan.replicas == 8
    assert set(found.estimate.phases) == {"update", "optimizer step", "old log-probs", "rollout pool"}


def test_the_load_reports_batches_in_flight_and_warns_of_several_mini_batches(world):
    def load_of(*overrides):
        return only(preflight(world[1:], *overrides), "load")

    load = load_of("+rhyme=sorted")
    assert load.detail.startswith("4 batches of 64 prompts x 8 in flight: 2048 samples for 256 request slots;")
    assert load.detail.endswith("a training step is 2 optimizer steps, shuffled (order 0)")
    in_flight = f"{R}.custom.rhyme.scheduling.in_flight=8"
    assert load.remedy.startswith(f"set data.train_batch_size=32 and {in_flight} for training steps of one optimizer")
    assert "the run then has 2 times the steps: multiply save_freq, test_freq, " in load.remedy
    load = load_of("+rhyme=sorted", "data.train_batch_size=32", in_flight)
    assert (load.status, load.remedy) == ("ok", "")
    assert load.detail.endswith("a training step is 1 optimizer step, sorted by length (order 1)")
    remedy = "set data.train_batch_size=32 for training steps of one optimizer step"
    assert load_of("+rhyme=full").remedy.startswith(remedy)
    on_policy = load_of("+rhyme=full", f"{R}.custom.rhyme.max_staleness=0")
    assert on_policy.detail.startswith("3 batches of 64 prompts x 8 in flight: 1536 samples")
    assert on_policy.remedy.startswith(remedy)
    assert not [check for check in preflight(world).checks if check.name == "load"]


@pytest.mark.parametrize(
    ("key", "place"),
    [
        ("rhyme.scheduling.take=loaded", ("rhyme", ".scheduling")),
        ("custom.rhyme.drafting.max_tokens=4", ("custom.rhyme", ".drafting")),
        ("actor_rollout_ref.rollout.rhyme=false", ("actor_rollout_ref.rollout.rhyme", "")),
    ],
)
def test_a_rhyme_tree_in_another_place_is_refused(world, key, place):
    place, option = place
    refused = f"{place}{option} is not read: did you mean {R}.custom.rhyme{option}?"
    for preset in (["+rhyme=sorted"], []):
        assert only(preflight(world[1:], *preset, f"+{key}"), "rhyme").detail == refused


def test_keys_of_the_user_are_not_refused(world):
    mine = ["+weights.mine=1", "+events=x", "+history={}", "+reward.custom_reward_function.reward_kwargs.rhyme=0.5"]
    assert only(preflight(world, *mine, "+trainer.rhyme.scheme=abab"), "rhyme").status == "ok"
    assert only(preflight(world[1:], "+history.dir=/mine"), "rhyme").status == "ok"


def test_tokens_of_a_micro_batch(world):
    assert preflight(world).plan.training.tokens == 4 * 1536
    dynamic = [f"{A}.use_dynamic_bsz=true", f"{A}.ppo_max_token_len_per_gpu=3000"]
    assert preflight(world, *dynamic).plan.training.tokens == 3000
    split = preflight(world, f"{A}.ulysses_sequence_parallel_size=2", f"{A}.ppo_micro_batch_size_per_gpu=1").plan
    assert (split.data_parallel, split.training.tokens) == (4, 768)


def documented():
    """Yield the verl commands of README and docs, without a final ``...`` for the user's own arguments."""
    for file in (
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("docs/papers/*.md"),
        *ROOT.glob("recipes/*.md"),
    ):
        text = file.read_text().replace("\\\n", " ")
        for command in re.findall(r"^ {4,}python -m verl\.trainer\.main_ppo (\+rhyme=.*)", text, re.M):
            arguments = command.partition("#")[0].removesuffix("...").split()
            if "..." not in arguments:
                yield pytest.param(arguments, id=f"{file.stem}-{arguments[0]}")


@pytest.mark.parametrize("arguments", documented())
def test_documented_commands_are_not_refused(world, arguments):
    found = complaints(preflight(world[1:], *arguments))
    assert ("rhyme", "fail") not in found, found["rhyme", "fail"]
