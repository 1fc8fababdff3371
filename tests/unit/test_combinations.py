"""What is refused: each key of each row of the table, and the document that shows it."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from verl_rhyme import combinations, config_tree, interpolations
from verl_rhyme.config import CONFIG_PATH, PRESETS
from verl_rhyme.config.presets import MANAGER, PIPELINE_MANAGER

ROOT = Path(__file__).parents[2]
interpolations.register()


@functools.cache
def _preset(name: str) -> Any:
    return OmegaConf.load(ROOT / "verl_rhyme" / "conf" / "rhyme" / f"{name}.yaml")


def config(preset: str, *changes: str) -> Any:
    """As much of verl's config as the table looks at, with a preset."""
    tree = OmegaConf.create(
        {
            "actor_rollout_ref": {"rollout": {"name": "vllm", "calculate_log_probs": True}, "actor": {}},
            "trainer": {"use_v1": True, "v1": {"trainer_mode": "sync"}},
        }
    )
    for name in dict.fromkeys(("histospec", preset)) if preset != "off" else ():  # as their defaults say
        tree.merge_with(_preset(name))
    for change in changes:
        key, _, value = change.partition("=")
        OmegaConf.update(tree, key, OmegaConf.create(f"value: {value}").value, force_add=True)
    return tree


def refused(tree: Any) -> list[combinations.Refusal]:
    return list(combinations.refusals(tree, config_tree.from_verl(tree)))


R = "actor_rollout_ref.rollout"
A = "actor_rollout_ref.actor"
E = f"{R}.engine_kwargs.vllm"
C = "algorithm.rollout_correction"
#: Folders with a ``config.json`` each, of the fields that count here.
MODELS = Path(__file__).with_name("models")
SEPARATE = "trainer.v1.trainer_mode=separate_async"
DRAFTING = f"{CONFIG_PATH}.drafting.enable"
STALENESS = f"{CONFIG_PATH}.max_staleness"
ELASTIC = f"{CONFIG_PATH}.streaming.elastic.min_replicas=1"
#: A config for each key of the table and each way in which it is wrong, and words of what is told.
CASES = [
    ("histospec", [f"{R}.name=sglang"], [f"{R}.name=sglang: ", "vllm only", f"set {R}.name=vllm"]),
    ("histospec", ["trainer.use_v1=false"], ["trainer.use_v1=false: ", "V1 trainer"]),
    ("histospec", [f"{R}.disaggregation.enabled=true"], [f"{R}.disaggregation.enabled=true: ", "decoding together"]),
    ("full", [f"{E}.kv_transfer_config={{kv_role: kv_both}}"], ["kv_transfer_config: ", "decoding together"]),
    ("full", [f"{E}.worker_extension_cls=my.Extension"], ["worker_extension_cls=my.Extension: ", "rhyme's own"]),
    ("full", [f"{E}.config=vllm.yaml"], ["vllm.config=vllm.yaml: ", "cannot be checked"]),
    ("full", [f"{E}.tensor_parallel_size=2"], ["vllm.tensor_parallel_size=2: ", f"set {R}.tensor_model_parallel_size"]),
    (
        "full",
        [f"{E}.pipeline_parallel_size=2"],
        ["vllm.pipeline_parallel_size=2: ", f"set {R}.pipeline_model_parallel_size"],
    ),
    ("full", [f"{E}.data_parallel_size=2"], ["vllm.data_parallel_size=2: ", f"set {R}.data_parallel_size"]),
    ("sorted", [f"{E}.max_num_seqs=64"], ["vllm.max_num_seqs=64: ", f"set {R}.max_num_seqs instead"]),
    (
        "sorted",
        [f"{E}.scheduling_policy=fcfs"],
        ["vllm.scheduling_policy=fcfs: ", f"set {R}.scheduling_policy instead"],
    ),
    *(
        (preset, [f"{E}.{option}={value}"], [f"{E}.{option}", f"with {DRAFTING}=true: ", f"set {DRAFTING}=false"])
        for preset, option, value in (
            ("histospec", "speculative_config", "{method: ngram}"),
            ("full", "spec_method", "ngram"),
            ("full", "spec_model", "small"),
            ("full", "spec_tokens", "4"),
            ("histospec", "async_scheduling", "true"),
            ("histospec", "scheduler_cls", "my.Scheduler"),
            ("histospec", "logits_processors", "[my.Processor]"),
            ("histospec", "enable_dbo", "true"),
            ("histospec", "ubatch_size", "2"),
            ("histospec", "diffusion_config", "{canvas_length: 8}"),
        )
    ),
    (
        "histospec",
        [f"{R}.mtp.enable=true", f"{R}.mtp.enable_rollout=true"],
        ["mtp.enable_rollout=true with", "drafts in one way", "set actor_rollout_ref.model.mtp.enable_rollout=false"],
    ),
    (
        "full",
        [f"actor_rollout_ref.model.path={MODELS}/qwen3_next"],
        ["qwen3_next with", "drafting.enable=true: its recurrent layers", f"set {DRAFTING}=false"],
    ),
    (
        "sorted",
        [f"{R}.data_parallel_size=2"],
        [f"{R}.data_parallel_size=2 with {DRAFTING}=true", "data_parallel_size=1", "replicas"],
    ),
    (
        "sorted",
        [f"{CONFIG_PATH}.sampling.coupled=true", f"{DRAFTING}=false"],
        [f"sampling.coupled=true with {STALENESS}=0 with {DRAFTING}=false: ", "drop it"],
    ),
    ("full", [f"{CONFIG_PATH}.sampling.coupled=true"], [f"sampling.coupled=true with {STALENESS}=1 with", "on-policy"]),
    ("full", ["trainer.v1.trainer_mode=my_async"], [f"=my_async with {STALENESS}=1: ", "set trainer.v1.trainer_mode"]),
    ("full", [f"{MANAGER}=null"], [f"{MANAGER}=null with", f"set {PIPELINE_MANAGER}"]),
    ("full", [f"{R}.scheduling_policy=fcfs"], [f"{R}.scheduling_policy=fcfs with", "scheduling_policy=priority"]),
    ("full", ["trainer.v1.sampler.custom_sampler.path=mine.py"], ["custom_sampler.path=mine.py with", "be ignored"]),
    ("full", ["skip.rollout_tq.enable=true"], ["skip.rollout_tq.enable=true with", "drop it"]),
    ("full", ["data.gen_batch_size=64"], ["data.gen_batch_size=64 with", "scheduling.in_flight"]),
    ("full", [f"{A}.shuffle=true"], [f"{A}.shuffle=true with", "scheduling.order=0"]),
    (
        "full",
        [SEPARATE, "trainer.v1.separate_async.parameter_sync_step=4"],
        ["parameter_sync_step=4 with", "set trainer.v1.separate_async.parameter_sync_step=1"],
    ),
    (
        "stream",
        ["trainer.v1.separate_async.hybrid_rollout.enable_switch=true"],
        ["hybrid_rollout.enable_switch=true with", "drop it"],
    ),
    ("full", [f"{R}.calculate_log_probs=false"], [f"=false with {STALENESS}=1: ", f"set {R}.calculate_log_probs=true"]),
    (
        "histopipe",
        [f"{R}.enable_rollout_routing_replay=true"],
        ["enable_rollout_routing_replay=true with", "experts", f"{STALENESS}=0"],
    ),
    (
        "full",
        [f"{A}.policy_loss.loss_mode=gpg", f"{C}.rollout_is=null"],
        [f"loss_mode=gpg with {STALENESS}=1: ", f"set {C}.rollout_is=token"],
    ),
    ("full", [f"{A}.policy_loss.loss_mode=gpg", f"{C}.bypass_mode=true"], ["loss_mode=gpg with", "bypass_mode=false"]),
    (
        "full",
        [
            f"{A}.policy_loss.loss_mode=bypass_mode",
            f"{A}.policy_loss.rollout_correction.loss_type=reinforce",
            f"{C}.bypass_mode=true",
        ],
        ["loss_mode=bypass_mode with", "or another loss"],
    ),
    (
        "sorted",
        ["algorithm.adv_estimator=grpo", f"{CONFIG_PATH}.scheduling.unit=trajectory"],
        ["adv_estimator=grpo with", "scheduling.unit=trajectory: ", f"set {CONFIG_PATH}.scheduling.unit=group"],
    ),
    (
        "full",
        ["algorithm.adv_estimator=gae", "algorithm.filter_groups.enable=true"],
        ["filter_groups.enable=true with", "scheduling.unit=null: ", f"set {CONFIG_PATH}.scheduling.unit=group"],
    ),
    ("histospec", [f"{R}.checkpoint_engine.backend=shm"], ["backend=shm: ", "weights go by relay"]),
    ("full", [f"{R}.checkpoint_engine.backend=relay"], ["backend=relay: ", "engines of their own"]),
    ("full", [SEPARATE, f"{R}.checkpoint_engine.backend=naive"], ["backend=naive: ", "weights go by relay"]),
    (
        "full",
        [SEPARATE, f"{R}.checkpoint_engine.backend=delta_sharded", ELASTIC],
        ["backend=delta_sharded: ", "cannot send"],
    ),
    (
        "full",
        [ELASTIC],
        [f"min_replicas=1 with trainer.v1.trainer_mode=sync with {STALENESS}=1: ", "set trainer.v1.trainer_mode="],
    ),
    ("stream", [f"{STALENESS}=0", ELASTIC], [f"{STALENESS}=0: ", "max_staleness to at least 1"]),
    ("histospec", [SEPARATE, ELASTIC], [f"{STALENESS}=null: ", "max_staleness to at least 1"]),
    (
        "histospec",
        [f"{CONFIG_PATH}.placement.policy=makespan"],
        [f"placement.policy=makespan with {STALENESS}=null: ", "expected lengths", "placement.policy=sticky_group"],
    ),
    (
        "full",
        [f"{R}.router_config_path=mine.yaml"],
        ["=mine.yaml with", "placement.policy=longest_first: there is one"],
    ),
    (
        "histospec",
        [f"{CONFIG_PATH}.placement.policy=least_loaded", f"{R}.full_determinism=true"],
        ["full_determinism=true with", "placement.policy=null"],
    ),
    ("sorted", [f"{CONFIG_PATH}.enable=false"], [f"{MANAGER}={PIPELINE_MANAGER}: it needs", "for stock verl"]),
    (
        "off",
        [SEPARATE, f"{R}.checkpoint_engine.backend=relay"],
        ["checkpoint_engine.backend=relay: it needs a trainer of verl-rhyme", "add +rhyme=PRESET"],
    ),
]


@pytest.mark.parametrize(
    ("preset", "changes", "words"), CASES, ids=lambda each: ",".join(each) if isinstance(each, list) else None
)
def test_each_way_to_be_wrong(preset: str, changes: list[str], words: list[str]) -> None:
    [told] = refused(config(preset, *changes))
    for word in words:
        assert word in str(told)


def test_each_key_of_the_table_has_a_case() -> None:
    told = [str(refusal) for preset, changes, _ in CASES for refusal in refused(config(preset, *changes))]
    for row in combinations.TABLE:
        for key in row.keys:
            full = f"{CONFIG_PATH}{key.removeprefix('rhyme')}" if key.startswith("rhyme.") else key
            assert any(re.match(rf"{re.escape(full)}[=: ]", line) and row.reason in line for line in told), key


def test_it_is_short() -> None:
    """What is one thing is one row."""
    assert len(combinations.TABLE) <= 15


@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        *((preset, []) for preset in PRESETS),
        *((preset, [f"trainer.v1.trainer_mode={mode}"]) for preset in PRESETS for mode in combinations.TOPOLOGIES),
        *(
            (preset, [f"{STALENESS}={k}", *mode])
            for preset in ("full", "sorted", "histopipe", "stream")
            for k in (0, 2)
            for mode in ([], [SEPARATE])
        ),
        ("off", [f"{R}.name=sglang", f"{R}.data_parallel_size=2", "trainer.use_v1=false"]),
        ("off", [f"{E}.speculative_config={{method: ngram}}", f"{E}.data_parallel_size=2"]),
        ("histospec", [f"{R}.calculate_log_probs=false", f"{A}.shuffle=true", f"{R}.scheduling_policy=fcfs"]),
        ("histospec", [f"{R}.data_parallel_size=2", f"{DRAFTING}=false"]),
        ("histospec", [SEPARATE, "trainer.v1.separate_async.parameter_sync_step=4"]),
        ("histospec", ["data.gen_batch_size=64", "skip.rollout_tq.enable=true"]),
        ("histospec", [f"{R}.router_config_path=mine.yaml", f"{R}.full_determinism=true"]),
        ("histospec", [SEPARATE, f"{R}.checkpoint_engine.backend=relay"]),
        ("histospec", ["trainer.v1.trainer_mode=my_async", f"{R}.checkpoint_engine.backend=relay"]),
        ("histospec", [f"{R}.mtp.enable=true", f"{R}.mtp.enable_rollout=false"]),
        ("histospec", [f"{E}.async_scheduling=true", f"{DRAFTING}=false"]),
        ("histospec", [f"{E}.distributed_executor_backend=uni", f"{E}.config_format=hf"]),
        ("full", [f"{STALENESS}=null", f"{CONFIG_PATH}.placement.policy=sticky_group", f"{MANAGER}=null"]),
        ("full", ["trainer.v1.separate_async.parameter_sync_step=4", "data.gen_batch_size=1"]),  # of another mode
        ("full", [f"{STALENESS}=0", f"{R}.enable_rollout_routing_replay=true", f"{R}.calculate_log_probs=false"]),
        ("full", [f"{STALENESS}=0", f"{A}.policy_loss.loss_mode=gpg"]),
        ("full", [f"{A}.policy_loss.loss_mode=gpg"]),  # with the preset's weights
        ("full", [f"{C}.bypass_mode=true"]),  # PPO's ratio is taken to the policy that sampled
        ("full", [SEPARATE, f"{R}.checkpoint_engine.backend=nccl", ELASTIC]),
        ("stream", [f"{STALENESS}=0", "algorithm.adv_estimator=gae"]),
        ("sorted", [f"{CONFIG_PATH}.sampling.coupled=true"]),
        ("sorted", ["algorithm.adv_estimator=grpo", "algorithm.filter_groups.enable=true"]),
        ("full", ["algorithm.adv_estimator=gae", "algorithm.filter_groups.enable=true", "unit=group"]),
        ("full", [f"actor_rollout_ref.model.path={MODELS}/qwen3_next", f"{DRAFTING}=false"]),
        ("full", ["actor_rollout_ref.model.path=no/folder"]),
        ("full", [f"{E}.scheduling_policy=priority", f"{E}.ubatch_size=1", f"{E}.scheduler_cls=null"]),
    ],
)
def test_what_goes_together(preset: str, changes: list[str]) -> None:
    changes = [f"{CONFIG_PATH}.scheduling.{change}" if change.startswith("unit=") else change for change in changes]
    assert refused(config(preset, *changes)) == []


@pytest.mark.parametrize(
    "name",
    ["pipeline-parallel-size", "pipeline_parallel", "pipe", "speculative-config", "speculative_config.method", "spec"],
)
def test_an_engine_option_is_found_however_its_name_is_written(name: str) -> None:
    tree = config("histospec")
    tree.actor_rollout_ref.rollout.engine_kwargs = {"vllm": {name: 2}}
    assert refused(tree)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sorted", "not installed beside verl"),
        ("histospeck", r"no such group; use \+rhyme=histospec or \+rhyme=full or .*=stream, or "),
    ],
)
def test_a_group_that_hydra_did_not_find(name: str, words: str) -> None:
    told = combinations.group_not_found(name)
    assert f"+rhyme={name} did not find its config group" in told.detail
    assert re.search(words, told.remedy)


def test_the_document_shows_the_table() -> None:
    wanted = []
    for row in combinations.TABLE:
        keys = ", ".join(f"`{key}`" for key in row.keys)
        mend = "; or ".join(filter(None, ["; ".join(dict.fromkeys(k.mend for k in row.keys.values())), row.otherwise]))
        wanted.append(f"| {row.when.what} | {keys} | {row.reason} | {mend} |".replace(CONFIG_PATH, "rhyme"))
    lines = (ROOT / "docs" / "combinations.md").read_text().splitlines()
    assert [line for line in lines if line.startswith("| ")][1:] == wanted
