"""Checks of a config that do not depend on the machine: what verl and vLLM find late, or not at all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from omegaconf import OmegaConf

from verl_rhyme.checks import combinations, streaming
from verl_rhyme.checks.doctor import FAIL, OK, WARN, Check, problems, verdict
from verl_rhyme.checks.predicates import MERGE
from verl_rhyme.checks.preflight import values
from verl_rhyme.checks.preflight.memory import Serving
from verl_rhyme.checks.preflight.plan import Plan, sequence_tokens
from verl_rhyme.config import CONFIG_PATH, ConfigError, RhymeConfig, config_tree, training_order
from verl_rhyme.config.presets import DRAFTING_MANAGER, MANAGER, PIPELINE_MANAGER
from verl_rhyme.config.run_name import run_name
from verl_rhyme.drafting import recurrent
from verl_rhyme.planning.architecture import Architecture
from verl_rhyme.router import router_file
from verl_rhyme.weights import BACKEND as RELAY

#: Whether a problem is there, its detail, and its remedy (:func:`.doctor.problems`).
_Row: TypeAlias = tuple[Any, str, str]

_A, _R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def rhyme(config: Any, plan: Plan | None) -> Iterator[Check]:
    if isinstance(config.get("rhyme"), str):
        yield combinations.group_not_found(config.rhyme)
        return
    refused: list[Check] = []
    try:
        tree = config_tree.from_verl(config)
        refused += combinations.refusals(config, tree)
        if tree is not None:
            router_file.check(tree.placement)
    except ConfigError as error:
        refused.append(Check("rhyme", FAIL, str(error)))
    yield from refused or [Check("rhyme", OK, _summary(plan) if plan else "")]


def _summary(plan: Plan) -> str:
    if plan.rhyme is None:
        return "no rhyme tree, or enable=false: stock verl"
    rules, drafting, parts = plan.rules, plan.rhyme.drafting, [run_name(plan.rhyme)]
    if rules is not None:
        parts[0] += " on separate engines" if rules.separate else " on colocated engines"
    parts.append(f"drafting {'on' if drafting.enable else 'off'}, policy {drafting.policy}")
    if plan.rhyme.placement.policy:
        parts.append(f"placement {plan.rhyme.placement.policy}")
    if rules is not None:
        parts.append(f"rules in force: {rules.summary}")
    return "; ".join(parts)


def agent_loops(config: Any, tree: RhymeConfig | None) -> Iterator[Check]:
    """Check that a user's own agent loop manager derives from rhyme's; imports its class."""
    name = OmegaConf.select(config, MANAGER)
    if tree is None or name in (DRAFTING_MANAGER, PIPELINE_MANAGER, None):  # combinations.TABLE refuses wrong ones
        return
    from verl.utils.import_utils import load_class_from_fqn

    needed, remedy = PIPELINE_MANAGER if tree.pipeline else DRAFTING_MANAGER, "or drop the override"
    try:
        known = issubclass(load_class_from_fqn(name), load_class_from_fqn(needed))
    except Exception as error:
        yield Check("agent loops", FAIL, f"{MANAGER}={name} cannot be imported: {error}", f"correct the name, {remedy}")
        return
    if not known:
        yield Check(
            "agent loops",
            FAIL,
            f"{MANAGER}={name} does not derive from {needed}, which rhyme requires",
            f"replace verl's manager among its bases with that class, {remedy}",
        )


def load(config: Any, plan: Plan) -> Iterator[Check]:
    """Report the prompts in flight, and the optimizer steps of a training step."""
    actor, samples = config.actor_rollout_ref.actor, int(config.actor_rollout_ref.rollout.n)
    mini, batch, rules = int(actor.ppo_mini_batch_size), int(config.data.train_batch_size), plan.rules
    if plan.rhyme is None or rules is None or batch % mini:  # :func:`batches` reports the last
        return
    steps = batch // mini
    order = training_order(plan.rhyme.scheduling.order, steps, str(actor.loss_agg_mode), actor.get("loss_scale_factor"))
    yield Check(
        "load",
        OK,
        f"{rules.batches:g} batches of {batch} prompts x {samples} in flight: "
        f"{math.ceil(rules.batches * rules.batch_samples)} samples for {plan.replicas * plan.rollout.max_num_seqs} "
        f"request slots; a training step is {steps} optimizer step{'s' if steps > 1 else ''}, "
        f"{'sorted by length' if order else 'shuffled'} (order {order:g})",
    )
    why = streaming.find_unsupported_option(config)
    if rules.separate and plan.rhyme.streaming.part is not None and why is not None:
        yield Check(
            "load",
            WARN,
            f"gradients of streamed parts wait for the whole batch: {why}",
            f"to stream them, {'change it' if steps == 1 else f'set {_A}.ppo_mini_batch_size={batch}'}; "
            f"{CONFIG_PATH}.streaming.part=null trains whole batches",
        )


def weights(config: Any) -> Iterator[Check]:
    """Check the options of the relay; training workers read them after loading the model."""
    key = f"{_R}.checkpoint_engine.engine_kwargs.{RELAY}"
    given = OmegaConf.select(config, key) or {}
    if not (isinstance(given, Mapping) and {*given} <= {"folder"} and isinstance(given.get("folder"), str | None)):
        yield Check("weights", FAIL, f"{key}={given}: the relay takes only folder=PATH", f"set {key}.folder")


def parallel(config: Any, plan: Plan, model: Architecture | None) -> Sequence[Check]:
    """Check GPU counts and model sizes against the parallel sizes; the engines fail late, in their workers."""
    sizes = (
        f"{plan.train_gpus} training GPUs: data parallel {plan.data_parallel} x model parallel {plan.model_parallel}; "
        f"{plan.replicas} rollout replicas of {plan.replica_gpus}"
    )
    if plan.standalone:
        sizes += f", with {plan.rollout_gpus} separate rollout GPUs"
    engines = config.actor_rollout_ref.rollout
    experts, ranks = int(engines.expert_parallel_size), plan.rollout.tp * int(engines.data_parallel_size)
    divided = (
        experts > 1 and experts != ranks,
        f"vLLM: {_R}.expert_parallel_size={experts} is neither 1 nor tensor x data parallel = {ranks}",
        f"set {_R}.expert_parallel_size={ranks}, which divides the experts over a replica, or 1",
    )
    rows = (*_gpu_counts(plan), divided, *(_model_sizes(plan, model) if model else ()))
    return problems("parallel sizes", *rows) or [Check("parallel sizes", OK, sizes)]


def _model_sizes(plan: Plan, model: Architecture) -> Iterator[_Row]:
    training, rollout = plan.training, plan.rollout
    mixture, megatron = model.mixture, training is not None and training.engine == "megatron"
    mlp = {"MLP columns": model.ffn} if mixture is None or mixture.layers < model.layers else {}
    split = [("vLLM", rollout.tp, f"{_R}.tensor_model_parallel_size", mlp)]
    layers = ("vLLM", model.layers < rollout.pp, rollout.pp, f"{_R}.pipeline_model_parallel_size")
    if training and megatron:
        columns = mlp | {"vocabulary entries": model.vocab}
        split.append(("Megatron", training.tp, f"{_A}.megatron.tensor_model_parallel_size", columns))
        if model.layers % training.pp:
            layers = ("Megatron", True, training.pp, f"{_A}.megatron.pipeline_model_parallel_size")
    elif training:
        yield (
            model.heads % plan.model_parallel,
            f"Ulysses: {model.heads} attention heads are not divisible by {plan.model_parallel}",
            f"set {_A}.ulysses_sequence_parallel_size to a divisor of {model.heads}",
        )
    if training and megatron and mixture:
        count, ep, option = mixture.experts.count, training.ep, f"{_A}.megatron.expert_model_parallel_size"
        yield (
            count % ep,
            f"Megatron: {count} experts are not divisible by {ep}",
            f"set {option} to a divisor of {count}",
        )
        yield (
            training.world % (training.expert_ranks * training.pp),
            f"Megatron: {training.world} training GPUs are not a multiple of expert model x expert tensor x pipeline "
            f"parallel = {training.expert_ranks * training.pp}",
            f"lower {option} or expert_tensor_parallel_size",
        )
    for engine, tp, option, columns in split:
        for parts, size in {"attention heads": model.heads, **columns}.items():
            yield (
                size % tp,
                f"{engine}: {size} {parts} are not divisible by {tp}",
                f"set {option} to a divisor of {size}",
            )
        yield (
            model.kv_heads % tp and tp % model.kv_heads,
            f"{engine}: neither of {model.kv_heads} key heads and tp={tp} divides the other",
            f"change {option}",
        )
    engine, wrong, stages, option = layers
    yield wrong, f"{engine}: {model.layers} layers cannot be split into {stages} pipeline stages", f"lower {option}"


def _gpu_counts(plan: Plan) -> Iterator[_Row]:
    mesh = "tensor x pipeline x context parallel" if plan.strategy == "megatron" else "Ulysses sequence parallel"
    yield (
        plan.train_gpus < 1 or plan.train_gpus % plan.model_parallel,
        f"{plan.train_gpus} training GPUs are not a multiple of {mesh} = {plan.model_parallel}",
        "change trainer.nnodes, trainer.n_gpus_per_node or the parallel sizes",
    )
    shards = plan.training.shards if plan.training and plan.training.engine == "fsdp" else 1
    yield (
        plan.train_gpus % shards,
        f"{plan.train_gpus} training GPUs are not a multiple of fsdp_size = {shards}",
        f"set {_A}.fsdp_config.fsdp_size to a divisor, or to -1 for all",
    )
    yield (
        plan.standalone and plan.rollout_gpus < 1,
        "trainer.v1.trainer_mode=separate_async with 0 separate rollout GPUs",
        f"set {_R}.nnodes and {_R}.n_gpus_per_node",
    )
    for pool, used, held in (
        ("rollout", plan.colocated, plan.train_gpus),
        ("standalone rollout", plan.standalone, plan.rollout_gpus),
    ):
        yield (
            used and held % plan.replica_gpus,
            f"{held} {pool} GPUs are not a multiple of the {plan.replica_gpus} GPUs of a replica; verl would leave "
            "some idle",
            f"change the count or {_R}.tensor_model_parallel_size",
        )


def batches(config: Any, plan: Plan) -> Iterator[Check]:
    """Check sizes against each other, as verl asserts in its workers; its check before Ray starts has others."""
    actor, n = config.actor_rollout_ref.actor, int(config.actor_rollout_ref.rollout.n)
    batch, mini, dp = int(config.data.train_batch_size), int(actor.ppo_mini_batch_size), plan.data_parallel
    estimator = str(config.algorithm.adv_estimator)
    mode, nodes = config.trainer.v1.trainer_mode, config.actor_rollout_ref.rollout.nnodes
    yield from problems(
        "batches",
        (
            n == 1 and estimator in values.GROUP_ESTIMATORS,
            f"{_R}.n=1 with algorithm.adv_estimator={estimator}, which compares the samples of a prompt",
            f"set {_R}.n=8, for example, or another algorithm.adv_estimator",
        ),
        (
            mode != "separate_async" and int(nodes),
            f"{_R}.nnodes={nodes} with trainer_mode={mode}, which generates on the training GPUs only",
            "set trainer.v1.trainer_mode=separate_async to use those nodes, or drop it",
        ),
        status=WARN,
    )
    wrong = problems(
        "batches",
        (
            mode != "separate_async" and not plan.colocated,
            f"actor_rollout_ref.hybrid_engine=false with trainer_mode={mode}",
            "set trainer.v1.trainer_mode=separate_async, or hybrid_engine=true",
        ),
        (
            batch % mini,
            f"data.train_batch_size={batch} is not a multiple of ppo_mini_batch_size={mini}",
            "change one of them",
        ),
        (
            not batch % mini and mini * n % dp,
            f"a mini-batch of {mini} x {n} responses is not divisible by {dp} data-parallel ranks",
            f"change {_A}.ppo_mini_batch_size or {_R}.n",
        ),
        *(
            (
                tokens * split < sequence_tokens(config),
                f"{key}={tokens} is below the longest prompt and response",
                f"raise it to {-(-sequence_tokens(config) // split)} or more",
            )
            for key, tokens, split in _budgets(config, plan)
        ),
    )
    passed = f"{batch} prompts x {n} in {batch // mini} optimizer steps, each of {mini * n // dp} responses per rank"
    yield from wrong or [Check("batches", OK, passed)]


def _budgets(config: Any, plan: Plan) -> Iterator[tuple[str, int, int]]:
    """Yield the key and tokens of each budget of dynamic micro-batches, and how many GPUs share a sequence."""
    ref, critic = config.actor_rollout_ref, config.critic
    if ref.actor.use_dynamic_bsz:
        yield f"{_A}.ppo_max_token_len_per_gpu", int(ref.actor.ppo_max_token_len_per_gpu), _split(plan)
    sections = {
        "rollout": not OmegaConf.select(config, "algorithm.rollout_correction.bypass_mode"),
        "ref": ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward,
    }
    for name in (name for name, used in sections.items() if used and ref[name].log_prob_use_dynamic_bsz):
        key = "log_prob_max_token_len_per_gpu"
        yield f"actor_rollout_ref.{name}.{key}", int(ref[name][key]), _split(plan)
    if plan.critic and critic.use_dynamic_bsz:
        engine = critic.get("megatron") or critic.get("fsdp") or {}
        splits = engine.get("context_parallel_size"), engine.get("ulysses_sequence_parallel_size")
        split = max(int(each or 1) for each in (*splits, critic.get("ulysses_sequence_parallel_size")))
        key = "ppo_infer_max_token_len_per_gpu"  # the only one that the V1 trainer reads, and not in verl's YAML
        yield f"critic.{key}", int(critic.get(key) or 32768), split


def _split(plan: Plan) -> int:
    """Return the number of GPUs that share one sequence."""
    return plan.training.cp if plan.training and plan.training.engine == "megatron" else plan.model_parallel


def rollout(config: Any, plan: Plan) -> Iterator[Check]:
    serving, longest = plan.rollout, sequence_tokens(config)
    budget, requests = serving.max_num_batched_tokens, serving.max_num_seqs
    yield from problems(
        "rollout",
        (
            serving.draft_bytes and budget < 2 * requests,
            f"max_num_batched_tokens={budget} leaves no room for draft tokens with max_num_seqs={requests}",
            f"raise {_R}.max_num_batched_tokens above {2 * requests}",
        ),
        status=WARN,
    )
    yield verdict(
        "rollout",
        serving.max_model_len >= longest,
        f"{serving.max_model_len} tokens per request, {budget} per step"
        if serving.max_model_len >= longest
        else f"max_model_len={serving.max_model_len} is below prompt + response = {longest}",
        f"raise {_R}.max_model_len, or lower data.max_response_length",
    )
    mode, reports = f"{_A}.{plan.strategy}.router_replay.mode", f"{_R}.enable_rollout_routing_replay"
    replays, reported = OmegaConf.select(config, mode) == "R3", bool(OmegaConf.select(config, reports))
    if replays and not reported:
        yield Check("routing replay", FAIL, f"{mode}=R3, but the engines report no experts", f"set {reports}=true")
    elif reported and not replays:
        detail = f"{reports}=true, but training does not replay the experts"
        yield Check(
            "routing replay", WARN, detail, f"drop it, or with Megatron set {_A}.megatron.router_replay.mode=R3"
        )


def drafts(config: Any, plan: Plan, fields: Mapping[str, Any], serving: Serving | None) -> Iterator[Check]:
    """Report what the engines change for drafts, and what drafts cost them.

    ``fields`` are those of the model's ``config.json``, ``serving`` the estimate of an engine's memory, if known.
    """
    if plan.rhyme is None or not plan.rhyme.drafting.enable or recurrent.undrafted(fields):
        return
    rollout, wanted, hybrid = plan.rollout, plan.rhyme.drafting.max_tokens, bool(recurrent.recurrent(fields))
    off, room = f"{CONFIG_PATH}.drafting.enable=false", f"raise {_R}.gpu_memory_utilization"
    yield from problems(
        "drafts",
        (
            hybrid and config.actor_rollout_ref.rollout.enable_prefix_caching,
            recurrent.UNCACHED,
            f"none needed for single turns; {off} keeps prefix caching",
        ),
        (
            rollout.draft_tokens < (min(wanted, recurrent.MAX_TOKENS) if hybrid else wanted),
            f"at most {rollout.draft_tokens} tokens, not drafting.max_tokens={wanted}: with LoRA adapters, vLLM "
            "requires max_num_seqs * (draft tokens + 1) <= max_num_batched_tokens",
            f"none needed; for longer drafts raise {_R}.max_num_batched_tokens to "
            f"{rollout.max_num_seqs * (wanted + 1)}, or set {MERGE}=true",
        ),
        status=WARN,
    )
    if serving is None or not hybrid:
        return
    without = min(rollout.requests, int(serving.undrafted))
    fewer = serving.sequences < without
    yield from problems(
        "drafts",
        (
            fewer,
            f"an engine holds {int(serving.sequences)} requests of {rollout.longest} tokens at once, since even drafts "
            f"of one token need states; without drafts, {without}",
            f"{room}, or, if most responses are long, set {off}",
        ),
        (
            not fewer and serving.draft_tokens < rollout.draft_tokens,
            f"at most {serving.draft_tokens} tokens, not {rollout.draft_tokens}, so that their states leave room for "
            f"{without} requests of {rollout.longest} tokens at once in an engine",
            f"none needed; for longer drafts {room}, or lower {_R}.max_num_seqs",
        ),
        status=WARN,
    )
