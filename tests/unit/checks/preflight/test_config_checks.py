"""Checks of a config alone: a valid run passes all, and a problem is reported with its remedy."""

import functools
import re

import pytest

from tests.unit.checks.preflight.world import MEGATRON, RELAY, A, R, complaints, only, preflight
from tests.unit.checks.test_combinations import MODELS
from tests.unit.configs import ROOT
from verl_rhyme.checks.preflight import user_code
from verl_rhyme.config import ConfigError

MODE = "trainer.v1.trainer_mode=separate_async"
REFERENCE = [f"{A}.use_kl_loss=true", "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=true"]
#: A response beyond the critic's budget, which is fixed at 32,768 tokens without a key in verl's YAML.
LONG = ["data.max_response_length=40000", f"{A}.ppo_max_token_len_per_gpu=50000"]
RHYME = f"{R}.custom.rhyme"
LORA = "actor_rollout_ref.model.lora_rank=8"
HYBRID = f"actor_rollout_ref.model.path={MODELS}/qwen3_next"
BUFFER = "+reward.reward_kwargs.overlong_buffer_cfg"
#: DAPO's overlong penalty.
PENALTY = [
    "reward.reward_manager.name=dapo",
    "+reward.reward_kwargs.max_resp_len=1024",
    *(f"{BUFFER}.{option}" for option in ("enable=true", "len=256", "penalty_factor=1.0", "log=false")),
]


def test_a_valid_run_has_no_complaints(world):
    found = preflight(world)
    assert not complaints(found)
    assert found.estimate.parameters == 494_032_768
    assert (found.plan.replicas, found.plan.training.tokens) == (4, 4 * 1536)
    assert {check.name for check in found.checks} >= {
        *("rhyme", "parallel sizes", "batches", "rollout", "data.train_files", "data.val_files", "model", "GPUs"),
        *("run folder", "reward.custom_reward_function.path", "GPU memory", "KV cache", "host memory", "checkpoints"),
        "history store",
    }


@pytest.mark.parametrize(
    ("overrides", "name", "words"),
    [
        ([MEGATRON, f"{A}.megatron.tensor_model_parallel_size=3"], "parallel sizes", "8 training GPUs"),
        ([f"{A}.fsdp_config.fsdp_size=3"], "parallel sizes", "fsdp_size"),
        ([MEGATRON, f"{A}.megatron.tensor_model_parallel_size=4"], "parallel sizes", "14 attention heads"),
        ([MEGATRON, f"{A}.megatron.pipeline_model_parallel_size=16"], "parallel sizes", "24 layers"),
        ([f"{R}.tensor_model_parallel_size=4"], "parallel sizes", "vLLM: 14 attention heads"),
        ([f"{R}.tensor_model_parallel_size=3"], "parallel sizes", "8 rollout GPUs"),
        ([MODE, f"{R}.nnodes=1", f"{R}.n_gpus_per_node=3"], "parallel sizes", "3 standalone rollout GPUs are not a"),
        ([MODE], "parallel sizes", f"0 separate rollout GPUs set {R}.nnodes and {R}.n_gpus_per_node"),
        (["data.train_batch_size=48"], "batches", "ppo_mini_batch_size=32"),
        ([f"{R}.n=1", f"{A}.ppo_mini_batch_size=4"], "batches", "8 data-parallel ranks"),
        ([f"{A}.use_dynamic_bsz=true", f"{A}.ppo_max_token_len_per_gpu=1000"], "batches", "raise it to 1536"),
        (
            [f"{R}.log_prob_use_dynamic_bsz=true", f"{R}.log_prob_max_token_len_per_gpu=999"],
            "batches",
            f"{R}.log_prob_",
        ),
        ([*REFERENCE, "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=999"], "batches", "actor_rollout_ref.ref."),
        (
            ["critic.enable=true", "critic.use_dynamic_bsz=true", *LONG],
            "batches",
            "critic.ppo_infer_max_token_len_per_",
        ),
        (["actor_rollout_ref.hybrid_engine=false"], "batches", "separate_async"),
        ([*RELAY, f"+{R}.checkpoint_engine.engine_kwargs.relay.foldr=/x"], "weights", "takes only folder=PATH"),
        ([*RELAY, f"+{R}.checkpoint_engine.engine_kwargs.relay=/x"], "weights", "takes only folder=PATH"),
        (["algorithm.adv_estimator=gprp"], "values", "did you mean grpo?"),
        ([f"{R}.checkpoint_engine.backend=rellay"], "values", "is not one of naive, nccl"),
        (["trainer.logger=[console,wanbd]"], "loggers", "did you mean wandb?"),
        (["trainer.logger=swanlab"], "loggers", "pip install swanlab"),
        (["custom_reward_function.path=/x.py"], "reward", "set reward.custom_reward_function.path=/x.py instead"),
        (["reward_model.reward_manager=dapo"], "reward", "set reward.reward_manager.name=dapo instead"),
        (["+reward_model.reward_kwargs.max_resp_len=9"], "reward", "set +reward.reward_kwargs.max_resp_len=9 instead"),
        (["+reward_model.overlong_buffer.len=4"], "reward", "set +reward.reward_kwargs.overlong_buffer_cfg.len=4 ins"),
        (["reward_model.model.path=/m"], "reward", "set reward.reward_model.model_path=/m instead"),
        (["reward_model.model.external_lib=x"], "reward", "verl's V1 trainer drop it"),
        (["sandbox_fusion.url=http://x"], "reward", "set reward.sandbox_fusion.url=http://x instead"),
        (["+reward.reward_manager.reward_kwargs.max_resp_len=9"], "reward", "set +reward.reward_kwargs.max_resp_len=9"),
        (
            ["+reward.overlong_buffer_cfg.len=9"],
            "reward",
            "set +reward.reward_kwargs.overlong_buffer_cfg.len=9",
        ),
        (PENALTY[1:], "reward", "reward_manager.name=naive, which does not read them"),
        ([PENALTY[0], *PENALTY[2:]], "reward", "max_resp_len=null set +reward.reward_kwargs.max_resp_len=1024"),
        ([*PENALTY, f"{BUFFER}.len=1025"], "reward", "len=1025 with reward.reward_kwargs.max_resp_len=1024"),
        ([*PENALTY, f"{BUFFER}.len=0"], "reward", "and len from 1 to that"),
        ([*PENALTY, f"{BUFFER}.penalty_factor=null"], "reward", "overlong_buffer_cfg without penalty_factor"),
        (
            ["+reward.custom_reward_function.reward_kwargs.a=1", "reward.custom_reward_function.path=null"],
            "reward",
            "verl's own reward functions do not get them",
        ),
        ([f"{R}.agent.default_agent_loop=tool_agnt"], "agent loops", "did you mean tool_agent?"),
        ([f"{R}.agent.default_agent_loop=tool_agent", f"{R}.multi_turn.format=qwen"], "agent loops", "one of hermes, "),
        ([f"{R}.agent.agent_loop_config_path=/nowhere.yaml"], "agent loops", "no file /nowhere.yaml"),
        ([f"{R}.multi_turn.tool_config_path=/nowhere.yaml"], "agent loops", "no file /nowhere.yaml"),
        (["data.custom_cls.path=/nowhere.py"], "data.custom_cls.path", "no file /nowhere.py"),
        ([f"{R}.max_model_len=1000"], "rollout", "prompt + response = 1536"),
        ([MEGATRON, f"{A}.megatron.router_replay.mode=R3"], "routing replay", "report no experts"),
    ],
)
def test_an_invalid_run_fails(world, overrides, name, words):
    found = complaints(preflight(world, *overrides))
    assert words in found.get((name, "fail"), ""), found


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("trainer.nnodes=two", "trainer.nnodes must be a whole number of at least 1, not 'two'"),
        (f"{R}.n=null", f"{R}.n must be a whole number of at least 1, not null"),
        (f"{R}.max_model_len=0", f"{R}.max_model_len must be a whole number of at least 1, not 0"),
        (f"{R}.max_num_seqs=[1]", f"{R}.max_num_seqs must be a whole number of at least 1, not [1]"),
        (f"{R}.gpu_memory_utilization=high", f"{R}.gpu_memory_utilization must be a number, not 'high'"),
        (f"{R}.enforce_eager=maybe", f"{R}.enforce_eager must be true or false, not 'maybe'"),
        ("algorithm.rollout_correction.rollout_is_threshold=0.5_x", "must be a number, not '0.5_x'"),
    ],
)
def test_values_of_the_wrong_type_are_refused(world, override, problem):
    with pytest.raises(ConfigError, match=re.escape(problem)):
        preflight(world, override)


def test_all_values_that_verl_takes_are_allowed(world):
    ice_pop = "algorithm.rollout_correction.rollout_is_threshold=0.5_5.0"  # verl's documented form
    found = complaints(preflight(world, ice_pop, "trainer.max_actor_ckpt_to_keep=-1", "+data.my_option=1"))
    assert "fail" not in {status for _, status in found}


@pytest.mark.parametrize(
    ("overrides", "name", "words"),
    [
        ([f"{R}.max_num_seqs=200", f"{R}.max_num_batched_tokens=300"], "rollout", "leaves no room for draft tokens"),
        ([f"{R}.n=1", f"{A}.ppo_mini_batch_size=64"], "batches", "compares the samples of a prompt"),
        ([LORA, f"{R}.max_num_seqs=256"], "drafts", "at most 31 tokens, not drafting.max_tokens=32: with LoRA"),
        ([LORA, f"{R}.max_num_seqs=256"], "drafts", f"raise {R}.max_num_batched_tokens to 8448"),
        ([HYBRID], "drafts", "prefix caching is off in the engines, because vLLM 0.24 would cache the states"),
        ([HYBRID], "drafts", "several turns prefill their context again in each turn"),
        ([HYBRID], "drafts", f"{RHYME}.drafting.enable=false keeps prefix caching"),
        (
            [*PENALTY, "+reward.reward_kwargs.max_resp_len=2000"],
            "reward",
            "no response of 1024 tokens gets the",
        ),
        ([f"{R}.enable_rollout_routing_replay=true"], "routing replay", "training does not replay the experts"),
        ([f"{R}.nnodes=2"], "batches", "trainer_mode=sync, which generates on the training GPUs only"),
    ],
)
def test_what_is_allowed_but_unwise_warns(world, overrides, name, words):
    assert words in complaints(preflight(world, *overrides))[name, "warn"]


@pytest.mark.parametrize(
    "overrides",
    [
        [LORA, "actor_rollout_ref.model.lora.merge=true", f"{R}.max_num_seqs=256"],
        [LORA, f"{R}.max_num_seqs=248"],
        [LORA, f"{R}.max_num_seqs=256", f"{RHYME}.drafting.enable=false"],
        [HYBRID, f"{R}.enable_prefix_caching=false"],
        [HYBRID, f"{RHYME}.drafting.enable=false"],
    ],
)
def test_drafts_change_nothing_else(world, overrides):
    assert ("drafts", "warn") not in complaints(preflight(world, *overrides))


def test_reward_arguments_that_verl_or_the_user_reads_are_allowed(world, tmp_path):
    mine = [f"reward.reward_manager.module.path={tmp_path}/reward.py", "reward.reward_manager.name=compute_score"]
    for arguments in (
        PENALTY,
        [*PENALTY, f"{BUFFER}.enable=false", "+reward.reward_kwargs.max_resp_len=null"],
        ["+reward.custom_reward_function.reward_kwargs.overlong_buffer_cfg.len=4"],
        ["reward.reward_manager.source=importlib", *mine, "+reward.reward_manager.reward_kwargs.max_resp_len=4"],
    ):
        assert not complaints(preflight(world, *arguments)), arguments


@pytest.mark.parametrize(
    ("logger", "login", "remedy"),
    [
        ("wandb", {"WANDB_API_KEY": "k"}, "run `wandb login`, or export WANDB_API_KEY, or WANDB_MODE=offline"),
        ("tracking", {"WANDB_MODE": "offline"}, "run `wandb login`"),
        ("swanlab", {"SWANLAB_MODE": "local"}, "swanlab login"),
        ("clearml", {"CLEARML_API_ACCESS_KEY": "k"}, "clearml-init"),
        (
            "vemlp_wandb",
            {"VOLC_ACCESS_KEY_ID": "a", "VOLC_SECRET_ACCESS_KEY": "b", "MLP_TRACKING_REGION": "c"},
            "export VOLC_ACCESS_KEY_ID",
        ),
    ],
)
def test_a_logger_without_a_login_fails_before_the_engines_start(world, tmp_path, monkeypatch, logger, login, remedy):
    """verl logs in after they run, in a process without a terminal to ask at."""
    for name in ("HOME", "NETRC", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.chdir(tmp_path)

    def without(*given):
        found = complaints(preflight(world, f"trainer.logger=[console,{logger}]", *given))
        return remedy in found.get(("loggers", "fail"), "")

    assert without()
    workers = "+ray_kwargs.ray_init.runtime_env.env_vars"
    assert not without(*(f"{workers}.{name}={value}" for name, value in login.items()))
    *_, last = login
    monkeypatch.setenv(last, login[last])
    assert without() == (len(login) > 1)
    monkeypatch.setenv(last, "")
    (tmp_path / ".netrc").write_text("machine api.wandb.ai\n  login user\n  password k\n")
    assert without() == ("wandb login" not in remedy)
    monkeypatch.setenv("HOME", f"/{'x' * 256}")  # the system refuses it, as one that this user may not enter
    assert without()


VALUES = ["algorithm.adv_estimator=mine", "trainer.logger=mine", f"{R}.agent.default_agent_loop=mine"]


class Plugin:
    name, group = "mine", "verl.plugins"


@pytest.mark.parametrize("source", ["VERL_USE_EXTERNAL_MODULES", "main", "plugin", "data.custom_cls.path", None])
def test_names_that_code_of_the_user_may_register_only_warn(world, monkeypatch, source):
    overrides = ["reward.custom_reward_function.path=pkg://tests.mine"]  # another process loads it
    if source == "VERL_USE_EXTERNAL_MODULES":
        monkeypatch.setenv(source, "verl_rhyme.plugin,mine")
    elif source == "main":
        monkeypatch.setattr(user_code, "own_main", True)
    elif source == "plugin":
        monkeypatch.setattr(user_code.importlib.metadata, "entry_points", lambda group: [Plugin])
    elif source:
        overrides.append(f"{source}=pkg://tests.mine")
    found = complaints(preflight(world, *VALUES, *overrides))
    for name, override in zip(("values", "loggers", "agent loops"), VALUES, strict=True):
        assert override.partition("=")[0] in found[name, "warn" if source else "fail"]
        assert (name, "fail" if source else "warn") not in found


def test_a_reward_file_may_register_a_reward_manager(world):
    assert ("values", "fail") not in complaints(preflight(world, "reward.reward_manager.name=mine"))
    alone = ["reward.reward_manager.name=mine", "reward.custom_reward_function.path=null"]
    assert ("values", "fail") in complaints(preflight(world, *alone))


def test_a_function_of_verl_is_no_main_of_the_user():
    from verl.utils.config import validate_config

    assert user_code.is_verls(validate_config)
    assert not user_code.is_verls(preflight)
    assert not user_code.is_verls(functools.partial(validate_config)), "an object"


def test_a_separate_rollout_pool(world):
    pool = [MODE, f"{R}.nnodes=2", f"{R}.n_gpus_per_node=8", f"{R}.checkpoint_engine.backend=nccl"]
    found = preflight(world, *pool, "actor_rollout_ref.hybrid_engine=false")
    assert not complaints(found)
    assert found.plan.replicas == 8
    assert set(found.estimate.phases) == {"update", "optimizer step", "old log-probs", "rollout pool"}
    crowded = preflight(world, *pool, f"{R}.gpu_memory_utilization=0.9")
    assert crowded.estimate.peak[0] == "rollout"
    assert "set actor_rollout_ref.hybrid_engine=false" in complaints(crowded)["GPU memory", "warn"]


def test_the_load_reports_batches_in_flight_and_optimizer_steps(world):
    def load_of(*overrides):
        return only(preflight(world[1:], *overrides), "load")

    load = load_of("+rhyme=sorted")
    assert load.detail.startswith("4 batches of 64 prompts x 8 in flight: 2048 samples for 256 request slots;")
    assert load.detail.endswith("a training step is 2 optimizer steps, shuffled (order 0)")
    assert load.status == "ok"
    load = load_of("+rhyme=sorted", "data.train_batch_size=32", f"{RHYME}.scheduling.in_flight=8")
    assert (load.status, load.remedy) == ("ok", "")
    assert load.detail.endswith("a training step is 1 optimizer step, sorted by length (order 1)")
    assert not [check for check in preflight(world).checks if check.name == "load"]


def test_streamed_parts_that_wait_for_the_batch_are_reported(world):
    def found(*overrides):
        return complaints(preflight(world[1:], "+rhyme=stream", *RELAY, *overrides)).get(("load", "warn"))

    whole = f"{A}.ppo_mini_batch_size=32"
    assert found(whole) is None
    several = found(f"{A}.ppo_mini_batch_size=16")
    assert f"several mini-batches in a training step to stream them, set {whole};" in several
    assert found(f"{A}.ppo_mini_batch_size=16", f"{RHYME}.streaming.part=null") is None
    assert "wait for the whole batch: actor.shuffle=true" in found(whole, f"{A}.shuffle=true")


@pytest.mark.parametrize("preset", [["+rhyme=sorted"], []])
@pytest.mark.parametrize(
    ("place", "option", "value"),
    [
        ("rhyme", ".scheduling", "{take: loaded}"),
        ("custom.rhyme", ".drafting", "{max_tokens: 4}"),
        ("actor_rollout_ref.rollout.rhyme", "", "false"),
        ("RHYME", ".max_staleness", "2"),
        (f"{R}.custom.ryhme", ".enable", "true"),
    ],
)
def test_a_rhyme_tree_in_another_place_is_refused(world, preset, place, option, value):
    refused = f"{place}{option} is not read: did you mean {RHYME}{option}?"
    assert only(preflight(world[1:], *preset, f"+{place}{option}={value}"), "rhyme").detail == refused


@pytest.mark.parametrize(
    ("name", "given", "meant"),
    [
        ("rhyme", "+ryhme=full", "+rhyme=full"),
        ("rhyme", "+RHYME=histospec", "+rhyme=histospec"),
        ("keys", "+trainer.save_frq=1", "trainer.save_freq"),
        ("keys", "+trainr.total_epochs=1", "trainer.total_epochs"),
        ("keys", "+actor.optim.lr=0.1", f"{A}.optim.lr"),  # another place, with the same end
        ("keys", "+trainer.kl_loss_coef=0.1", f"{A}.kl_loss_coef"),
        ("keys", f"+{R}.max_num_seq=8", f"{R}.max_num_seqs"),
        ("keys", f"+{R}.max_stalness=2", f"{RHYME}.max_staleness"),
        ("keys", "+history.dir=/mine", f"{RHYME}.history.dir"),
        ("keys", f"+{A}.model_engine=megatron", "model_engine"),
    ],
)
def test_a_key_that_nothing_reads_is_refused_with_the_nearest_one(world, monkeypatch, name, given, meant):
    found = preflight(world, given)
    assert f"did you mean {meant}?" in complaints(found)[name, "fail"]
    if meant.startswith(("+", RHYME)):
        return
    monkeypatch.setattr(user_code, "own_main", True)  # it may read what verl does not
    assert f"did you mean {meant}?" in complaints(preflight(world, given))[name, "warn"]


def test_keys_that_verl_or_the_user_reads_are_not_refused(world):
    """Sections of other libraries' options, keys that verl reads without a default, and a user's own ones."""
    published = [  # by verl's examples
        f"+{A}.optim.override_optimizer_config.optimizer_cpu_offload=true",
        f"+{A}.fsdp_config.mixed_precision.param_dtype=bf16",
        f"+{R}.engine_kwargs.vllm.disable_cascade_attn=true",
        f"+{R}.engine_kwargs.sglang.attention_backend=fa3",
        "+actor_rollout_ref.model.override_config.rope_scaling.factor=4",
        "+critic.model.override_config.attn_implementation=eager",
        "+data.apply_chat_template_kwargs.reasoning_effort=low",
        "+trainer.wandb_proxy=http://proxy",
    ]
    mine = [
        *("+weights.mine=1", "+events=x", "+history={}", "+reward.custom_reward_function.reward_kwargs.rhyme=0.5"),
        *("+extra.key=3", "+rewards.scale=2", "+max_prompt_length=512"),  # as a YAML has that interpolates them
        *("+distillation.teacher_models.second.key=x", "+ray_kwargs.ray_init.runtime_env.env_vars.A=b"),
        *("+transfer_queue.controller.polling_mode=true", "+actor_rollout_ref.model.lora.fully_sharded_loras=true"),
        *(f"+{R}.custom.mine.option=1", f"+{R}.checkpoint_engine.engine_kwargs.nccl.rebuild_group=true"),
    ]
    found = preflight(world, *published, *mine)
    assert only(found, "rhyme").status == "ok"
    assert not {key for key in complaints(found) if key[0] == "keys"}, complaints(found)
    assert only(preflight(world[1:], "+history.dir=/mine"), "rhyme").status == "ok"
    keys = [f"+{A}.megatron.override_transformer_config.{key}=1" for key in ("moe_router_dtype", "use_flash_attn")]
    assert not {key for key in complaints(preflight(world, "model_engine=megatron", *keys)) if key[0] == "keys"}


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        (f"{R}.temperature", "-1", "at least 0"),
        (f"{R}.val_kwargs.top_p", "0", "above 0"),
        (f"{R}.top_k", "-2", "at least -1"),
        (f"{R}.gpu_memory_utilization", "90", "at most 1"),
    ],
)
def test_values_that_vllm_refuses_are_refused(world, key, value, allowed):
    with pytest.raises(ConfigError, match=f"{key} must be .*{allowed}"):
        preflight(world, f"{key}={value}")


@pytest.mark.parametrize("key", [f"{R}.max_tokens", f"{A}.path", f"{A}.optim.path"])
def test_a_key_that_verls_dataclass_does_not_take_is_refused(world, key):
    """verl reads a key of this name in another section."""
    assert f"{key} is no key of verl's " in complaints(preflight(world, f"+{key}=2"))["keys", "fail"]


def test_an_unread_key_without_a_near_one_warns(world):
    found = complaints(preflight(world, "+trainer.rhyme.scheme=abab", "+data.my_option=1", "+max_prompt_length=1"))
    assert "data.my_option, trainer.rhyme are read by neither verl nor rhyme" in found["keys", "warn"]
    assert "max_prompt_length is not read: did you mean data.max_prompt_length?" in found["keys", "warn"]
    assert ("keys", "fail") not in found


def test_tokens_of_a_micro_batch(world):
    dynamic = [f"{A}.use_dynamic_bsz=true", f"{A}.ppo_max_token_len_per_gpu=3000"]
    assert preflight(world, *dynamic).plan.training.tokens == 3000
    split = preflight(world, f"{A}.ulysses_sequence_parallel_size=2", f"{A}.ppo_micro_batch_size_per_gpu=1").plan
    assert (split.data_parallel, split.training.tokens) == (4, 768)
    veomni = ["model_engine=veomni", f"{A}.veomni.ulysses_parallel_size=2", f"{A}.ppo_max_token_len_per_gpu=800"]
    found = preflight(world[1:], *veomni, *dynamic[:1])
    assert (found.plan.data_parallel, only(found, "batches").status) == (4, "ok")


def documented():
    """Yield the verl commands of README and docs, without a final ``...`` for the user's own arguments."""
    for file in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("recipes/*.md")):
        text = file.read_text().replace("\\\n", " ")
        for command in re.findall(r"^ {4,}python -m verl\.trainer\.main_ppo (\+rhyme=.*)", text, re.M):
            arguments = command.partition("#")[0].removesuffix("...").split()
            if "..." not in arguments:
                yield pytest.param(arguments, id=f"{file.stem}-{arguments[0]}")


@pytest.mark.parametrize("arguments", documented())
def test_documented_commands_are_not_refused(world, arguments):
    found = complaints(preflight(world[1:], *arguments))
    assert ("rhyme", "fail") not in found, found["rhyme", "fail"]
