"""Each option of each row of the table is refused, valid configs are not, and the document shows the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.configs import ROOT, composed, verl_config
from verl_rhyme.checks import combinations, predicates
from verl_rhyme.checks.doctor import Check
from verl_rhyme.config import CONFIG_PATH, PIPELINES, TOPOLOGIES, config_tree


def refused(tree: Any) -> list[Check]:
    return list(combinations.refusals(tree, config_tree.from_verl(tree)))


R = "actor_rollout_ref.rollout"
E = f"{R}.engine_kwargs.vllm"
#: Model folders with the fields of ``config.json`` that the checks read.
MODELS = Path(__file__).with_name("models")
SEPARATE = "trainer.v1.trainer_mode=separate_async"
STEPS = "trainer.v1.separate_async.parameter_sync_step"
BACKEND = f"{R}.checkpoint_engine.backend"
ELASTIC = f"{CONFIG_PATH}.streaming.elastic.min_replicas=1"
K = f"{CONFIG_PATH}.max_staleness"
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
OWN = "actor_rollout_ref.actor.policy_loss.rollout_correction"
IS = "algorithm.rollout_correction.rollout_is"
QUEUE = "transfer_queue.backend.SimpleStorage.total_storage_size"
A = "actor_rollout_ref.actor.checkpoint"
C = "critic.enable=true"
RESUME = "trainer.resume_mode=auto"
STRATEGY = "actor_rollout_ref.actor.strategy"
MERGED = "actor_rollout_ref.model.lora.merge=true"
LIVE = f"{CONFIG_PATH}.drafting.live_tokens"
VANILLA = "actor_rollout_ref.actor.megatron.vanilla_mbridge"
LORA = "actor_rollout_ref.model.lora_rank=8"
ADAPTER, MEGATRON_ADAPTER = "actor_rollout_ref.model.lora_adapter_path", "actor_rollout_ref.model.lora.adapter_path"
NO_DRAFTS = f"{CONFIG_PATH}.drafting.enable=false"
#: For each option of each row, in table order: preset, and overrides that only this option refuses.
CASES = [
    ("histospec", [f"{R}.name=sglang"]),
    ("full", ["trainer.use_v1=false"]),
    ("histospec", ["algorithm.adv_estimator=remax"]),
    ("histospec", [f"{R}.disaggregation.enabled=true"]),
    ("sorted", [f"{E}.kv_transfer_config={{kv_role: kv_both}}"]),
    ("full", [f"{E}.kv_offloading_backend=lmcache"]),
    ("full", [f"{E}.worker_extension_cls=my.Extension"]),
    ("full", [f"{E}.kv_offloading_size=64", f"actor_rollout_ref.model.path={MODELS}/qwen3_next"]),
    ("full", [f"{E}.kv_offloading_size=64", f"{R}.enable_rollout_routing_replay=true"]),
    ("sorted", [f"{E}.config=vllm.yaml"]),
    ("histospec", [f"{E}.speculative_config={{method: ngram}}"]),
    ("full", [f"{E}.spec_method=ngram"]),
    ("full", [f"{E}.spec_model=small"]),
    ("full", [f"{E}.spec_tokens=4"]),
    ("stream", [f"{E}.scheduler_cls=my.Scheduler", SEPARATE]),
    ("histospec", [f"{E}.enable_dbo=true"]),
    ("histospec", [f"{E}.ubatch_size=2"]),
    ("full", [f"{R}.mtp.enable=true", f"{R}.mtp.enable_rollout=true", f"{CONFIG_PATH}.drafting.model=eagle-x"]),
    ("histospec", [f"{CONFIG_PATH}.drafting.policy=paper", f"{R}.mtp.enable=true", f"{R}.mtp.enable_rollout=true"]),
    ("histospec", [f"{CONFIG_PATH}.drafting.model=mtp", f"{R}.enable_rollout_routing_replay=true"]),
    ("full", [f"{E}.logits_processors=[my.Processor]", NO_DRAFTS]),
    ("histospec", [f"{E}.diffusion_config={{canvas_length: 8}}"]),
    ("full", [f"{LIVE}=1024", "data.max_prompt_length=512", "data.max_response_length=1024"]),
    ("sorted", [f"{E}.tensor_parallel_size=2"]),
    ("full", [f"{E}.data_parallel_size=2"]),
    ("sorted", [f"{E}.max_num_seqs=64"]),
    ("sorted", [f"{E}.scheduling_policy=fcfs"]),
    ("full", [f"{E}.logprobs_mode=raw_logprobs"]),
    ("histospec", [f"{R}.pipeline_model_parallel_size=2"]),
    ("full", [f"{E}.pipeline_parallel_size=2", f"{R}.pipeline_model_parallel_size=1"]),
    ("full", [f"actor_rollout_ref.model.path={MODELS}/nemotron_h"]),
    ("full", [f"actor_rollout_ref.model.path={MODELS}/qwen3_next", f"{E}.async_scheduling=false"]),
    ("sorted", [f"{R}.data_parallel_size=2"]),
    ("histospec", [LORA, f"{R}.max_num_seqs=256", f"{R}.max_num_batched_tokens=511"]),
    ("full", [LORA, MERGED, SEPARATE, f"{BACKEND}=delta_sharded"]),
    ("full", [f"{STRATEGY}=megatron", LORA, MERGED]),
    ("histospec", [f"{STRATEGY}=fsdp", "actor_rollout_ref.model.lora.rank=8"]),
    ("full", [f"{STRATEGY}=fsdp2", f"{ADAPTER}=/adapter"]),
    ("histospec", [f"{STRATEGY}=megatron", f"{MEGATRON_ADAPTER}=/adapter"]),
    ("full", [f"{STRATEGY}=megatron", f"{VANILLA}=true", "actor_rollout_ref.model.lora.rank=8", MERGED]),
    ("histospec", [f"{R}.agent.agent_loop_manager_class=null"]),
    ("full", ["trainer.v1.trainer_mode=my_async"]),
    ("sorted", [f"{R}.agent.agent_loop_manager_class=null"]),
    ("full", [SEPARATE, f"{STEPS}=4"]),
    ("full", [f"{R}.scheduling_policy=fcfs"]),
    ("sorted", [SEPARATE, "trainer.v1.separate_async.hybrid_rollout.enable_switch=true"]),
    ("full", ["trainer.v1.sampler.custom_sampler.path=mine.py"]),
    ("sorted", ["skip.rollout_tq.enable=true"]),
    ("full", ["actor_rollout_ref.actor.shuffle=true"]),
    ("full", ["data.gen_batch_size=64"]),
    ("stream", [f"{QUEUE}=1000"]),
    ("full", [f"{R}.calculate_log_probs=false"]),
    ("full", ["algorithm.adv_estimator=opo"]),
    ("full", [f"{LOSS}=gpg", f"{IS}=null"]),
    ("histospec", [f"{A}.async_save=true"]),
    ("full", [C, "critic.checkpoint.async_save=true"]),
    ("histospec", [RESUME, f"{A}.load_contents=[hf_model]", f"{A}.save_contents=[hf_model]"]),
    ("full", [C, RESUME, "critic.checkpoint.load_contents=[optimizer]", "critic.checkpoint.save_contents=[optimizer]"]),
    ("histospec", ["trainer.default_hdfs_dir=hdfs://a/b", f"{STRATEGY}=fsdp2"]),
    ("histospec", ["trainer.default_local_dir=hdfs://a/b", f"{STRATEGY}=megatron"]),
    ("sorted", [f"{CONFIG_PATH}.scheduling.unit=trajectory"]),
    ("full", [ELASTIC]),
    ("stream", [SEPARATE, ELASTIC, f"{BACKEND}=delta_sharded"]),
    ("sorted", [f"{BACKEND}=relay"]),
    ("full", [SEPARATE, f"{BACKEND}=naive"]),
    ("histospec", [f"{CONFIG_PATH}.placement.policy=histopipe"]),
    ("full", [f"{R}.router_config_path=mine.yaml"]),
    ("full", [f"{R}.full_determinism=true"]),
    ("histospec", [NO_DRAFTS, f"{R}.logprobs_mode=policy_logprobs"]),
    ("full", [f"{CONFIG_PATH}.enable=false", f"{BACKEND}=naive"]),
    ("off", [SEPARATE, f"{BACKEND}=relay"]),
    ("off", [f"{R}.logprobs_mode=policy_logprobs"]),
]
OPTIONS = [(row, option) for row in combinations.TABLE for option in row.options]


@pytest.mark.parametrize(
    ("row", "option", "case"),
    [(*pair, case) for pair, case in zip(OPTIONS, CASES, strict=True)],
    ids=lambda x: getattr(x, "key", ""),
)
def test_each_option_of_each_row(
    row: combinations.Row, option: combinations.Option, case: tuple[str, list[str]]
) -> None:
    preset, changes = case
    [refusal] = refused(verl_config(preset, *changes))
    assert refusal.remedy == (option.remedy or row.remedy)
    settings, _, reason = refusal.detail.rpartition(f": {row.reason}")
    assert (reason, "\n" in settings) == ("", False)
    for key in (option.key, *option.named_with, *row.named_with):
        assert key.removeprefix("rhyme") in settings


@pytest.mark.parametrize("preset", PIPELINES)
@pytest.mark.parametrize("mode", TOPOLOGIES)
@pytest.mark.parametrize("stale", [0, 1, 4])
def test_every_preset_works_in_every_trainer_mode_at_every_staleness(preset: str, mode: str, stale: int) -> None:
    assert refused(verl_config(preset, f"trainer.v1.trainer_mode={mode}", f"{K}={stale}")) == []


@pytest.mark.parametrize("preset", ["histospec", *PIPELINES])
def test_verls_defaults_need_no_further_override(preset: str) -> None:
    """Each of these in one more option of verl: adapters, filtered groups, MTP layers that draft, hybrids."""
    mtp = [f"{R}.mtp.enable=true", f"{R}.mtp.enable_rollout=true"]
    hybrid, filtered = f"actor_rollout_ref.model.path={MODELS}/qwen3_next", "algorithm.filter_groups.enable=true"
    for changes in ([], [LORA], [filtered], mtp, [hybrid], [SEPARATE, LORA, filtered]):
        config = composed(f"+rhyme={preset}", f"{R}.name=vllm", *changes)
        assert refused(config) == [], changes


@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        ("off", [f"{A}.async_save=true", f"{R}.name=sglang", f"{R}.data_parallel_size=2", "trainer.use_v1=false"]),
        ("off", [f"{E}.speculative_config={{method: ngram}}", f"{E}.data_parallel_size=2"]),
        # verl's own schedule
        ("histospec", []),
        (
            "histospec",
            [
                *(f"{R}.calculate_log_probs=false", "actor_rollout_ref.actor.shuffle=true", "data.gen_batch_size=64"),
                *("skip.rollout_tq.enable=true", f"{R}.scheduling_policy=fcfs", f"{QUEUE}=1000"),
                *(f"{R}.router_config_path=mine.yaml", f"{R}.full_determinism=true"),
                *(f"{R}.mtp.enable=true", f"{R}.mtp.enable_rollout=false"),
            ],
        ),
        ("histospec", [SEPARATE, f"{STEPS}=4", "algorithm.adv_estimator=opo", f"{LOSS}=gpg", f"{BACKEND}=relay"]),
        ("histospec", [SEPARATE, f"{BACKEND}=naive"]),  # verl checks it
        ("histospec", ["trainer.v1.trainer_mode=my_async", f"{BACKEND}=relay", "algorithm.adv_estimator=gdpo"]),
        ("histospec", [NO_DRAFTS, f"{R}.data_parallel_size=2"]),
        ("histospec", [f"{E}.async_scheduling=true"]),
        ("full", [f"{E}.kv_offloading_size=64"]),
        ("full", [f"{E}.async_scheduling=false"]),
        ("full", [f"{QUEUE}=1000", "transfer_queue.backend.storage_backend=MooncakeStore"]),
        # on-policy: every token is the current policy's
        ("sorted", [f"{R}.enable_rollout_routing_replay=true", f"{R}.calculate_log_probs=false"]),
        ("full", [f"{K}=0", "algorithm.adv_estimator=opo", f"{LOSS}=gpg", SEPARATE, f"{BACKEND}=nccl"]),
        # earlier policies' tokens, corrected
        ("full", [f"{LOSS}=gpg"]),
        ("full", [f"{LOSS}=gpg", f"{IS}=null", "algorithm.rollout_correction.rollout_rs=token_k1"]),
        ("full", [f"{LOSS}=bypass_mode", f"{OWN}.loss_type=reinforce", f"{OWN}.rollout_is=token"]),
        ("full", [f"{LOSS}=bypass_mode", f"{OWN}.loss_type=ppo_clip"]),
        ("full", [f"{K}=2", f"{R}.enable_rollout_routing_replay=true"]),
        ("full", [SEPARATE, ELASTIC, f"{CONFIG_PATH}.scheduling.at_version=finish"]),
        # LoRA: merged, as separate engines get it; or with room for a draft token
        ("histospec", [LORA, MERGED, f"{ADAPTER}=/adapter"]),
        ("full", [LORA, SEPARATE, f"{STRATEGY}=fsdp2"]),
        ("full", ["actor_rollout_ref.model.lora.rank=8", SEPARATE, f"{STRATEGY}=megatron"]),
        ("full", [LORA, f"{R}.max_num_seqs=256", f"{R}.max_num_batched_tokens=512"]),
        ("histospec", [f"actor_rollout_ref.model.path={MODELS}/qwen3_next", f"{R}.enable_prefix_caching=true"]),
        ("histospec", [LORA, NO_DRAFTS]),
        ("full", [f"{CONFIG_PATH}.placement.policy=null", "data.gen_batch_size=1"]),
        ("full", ["actor_rollout_ref.model.path=no/folder"]),
        ("full", ["critic.checkpoint.async_save=true"]),  # no critic
        ("full", [f"{A}.load_contents=[hf_model]", "trainer.resume_mode=disable"]),
        (
            "full",
            [f"{A}.load_contents=[hf_model]", RESUME, f"{STRATEGY}=megatron", "trainer.default_hdfs_dir=hdfs://a"],
        ),
        ("full", [f"{A}.load_contents=[model,extra]", f"{A}.save_contents=[model]", "trainer.resume_mode=resume_path"]),
        ("sorted", [f"{E}.scheduling_policy=priority", f"{E}.ubatch_size=1", f"{E}.scheduler_cls=null"]),
        ("full", [f"actor_rollout_ref.model.path={MODELS}/qwen3_next", NO_DRAFTS]),
    ],
)
def test_valid_configs_are_not_refused(preset: str, changes: list[str]) -> None:
    assert refused(verl_config(preset, *changes)) == []


def test_a_bypass_mode_loss_without_importance_weights_is_refused() -> None:
    """verl's ``bypass_mode`` loss with ``loss_type=reinforce`` takes importance weights from its own config only."""
    [refusal] = refused(verl_config("full", f"{LOSS}=bypass_mode", f"{OWN}.loss_type=reinforce"))
    assert f"{LOSS}=bypass_mode with {K}=1: " in str(refusal)


def test_only_the_listed_losses_have_no_ratio_to_the_sampling_policy() -> None:
    """Only these losses of verl have a gradient that does not depend on ``old_log_prob``."""
    import torch
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, get_policy_loss_fn
    from verl.workers.config import ActorConfig
    from verl.workers.config.actor import PolicyLossConfig

    def gradient(name: str, old: float) -> torch.Tensor:
        loss = PolicyLossConfig(loss_mode=name, dro_beta=1.0)
        actor = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=loss)
        now = torch.full((2, 4), -1.05, requires_grad=True)
        advantages, mask = torch.tensor([[1.0] * 4, [-1.0] * 4]), torch.ones(2, 4)
        get_policy_loss_fn(name)(torch.full((2, 4), old), now, advantages, mask, config=actor)[0].backward()
        return now.grad

    others = POLICY_LOSS_REGISTRY.keys() - {"bypass_mode"}  # it calls one of them, by its own config
    free = {name for name in others if torch.equal(gradient(name, -1.0), gradient(name, -1.1))}
    assert free == set(predicates.RATIO_FREE_LOSSES)


def test_an_engine_option_is_found_in_every_spelling_of_its_name() -> None:
    for name in ("pipeline-parallel-size", "pipe", "speculative_config.method"):
        tree = verl_config("histospec")
        tree.actor_rollout_ref.rollout.engine_kwargs = {"vllm": {name: 2}}
        assert refused(tree), name


@pytest.mark.parametrize(
    ("changes", "is_refused"),
    [
        (["algorithm.adv_estimator=gae"], False),
        (["algorithm.adv_estimator=gae", "algorithm.filter_groups.enable=true"], False),
        (["algorithm.adv_estimator=gae", "algorithm.filter_groups.enable=true", "unit=trajectory"], True),
        (["algorithm.adv_estimator=rloo", "unit=trajectory"], True),
    ],
)
def test_groups_that_are_compared_are_not_split(changes: list[str], is_refused: bool) -> None:
    changes = [f"{CONFIG_PATH}.scheduling.{change}" if change.startswith("unit") else change for change in changes]
    refusals = refused(verl_config("full", *changes))
    assert ["splits groups" in str(refusal) for refusal in refusals] == [True] * is_refused


def test_a_config_group_that_hydra_did_not_find() -> None:
    for name, words in (
        ("sorted", "rhyme: +rhyme=sorted did not find its config group -> verl-rhyme is not installed"),
        ("histospeck", "rhyme: +rhyme=histospeck: no such preset -> use +rhyme=full or "),
    ):
        assert str(combinations.group_not_found(name)).startswith(words)


def test_the_document_shows_the_table() -> None:
    def keys(names: list[str]) -> str:
        return ", ".join(f"`{name}`" for name in dict.fromkeys(names))

    wanted = []
    for row in combinations.TABLE:
        checked = keys([option.key for option in row.options])
        remedies = dict.fromkeys(option.remedy or row.remedy for option in row.options)
        wanted.append(f"| {checked} | {row.reason} | {'; '.join(remedies)} |".replace(CONFIG_PATH, "rhyme"))
    lines = (ROOT / "docs" / "combinations.md").read_text().splitlines()
    assert [line for line in lines if line.startswith("| `")] == wanted
