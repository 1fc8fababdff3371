"""Check of the model's own drafter, and its sizes in the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from verl_rhyme.checks.doctor import FAIL, OK, WARN, Check
from verl_rhyme.checks.preflight.machine_checks import not_cached
from verl_rhyme.checks.preflight.memory import Drafter
from verl_rhyme.checks.preflight.plan import Plan
from verl_rhyme.config.checks import CONFIG_PATH, Unusable
from verl_rhyme.drafting.own_drafter import MTP, OwnDrafter, examine
from verl_rhyme.planning.architecture import KNOWN, Architecture, UnknownArchitecture


def check(plan: Plan, policy: Mapping[str, Any], model: Architecture | None) -> tuple[list[Check], Drafter | None]:
    """Check the drafter of a plan for a model with this ``config.json``; also return its sizes, ``None`` if unknown."""
    if plan.drafter is None:
        return [], None
    try:
        found = examine(plan.drafter, policy)
    except Unusable as error:
        return [Check("drafter", FAIL, error.detail, error.remedy)], None
    if found.method != MTP and not found.sizes:
        return [not_cached("drafter", found.model, "; it is not checked, nor is its memory counted, before that")], None
    wanted = plan.rhyme.drafting.max_tokens if plan.rhyme and plan.rhyme.drafting.enable else 0
    tokens, rollout = found.draft_tokens(wanted), plan.rollout
    fewer = f"; {tokens} draft tokens instead of {wanted}, a multiple of its {found.layers} layers"
    checks = [Check("drafter", OK, f"{found.model}: {found.method}{fewer if tokens < wanted else ''}")]
    known = found.positions
    if known is not None and known < min(rollout.longest + tokens, rollout.max_model_len):
        checks.append(
            Check(
                "drafter",
                WARN,
                f"{found.model} knows {known} positions: while any sequence of an engine is longer than "
                f"{known - tokens} tokens, it drafts for none, and sequences of this run reach {rollout.longest}",
                "raise max_position_embeddings in its config.json if it was trained on such lengths, or drop "
                f"{CONFIG_PATH}.drafting.model",
            )
        )
    try:
        sizes = _sizes(found, model, rollout.tp, rollout.pp)
    except UnknownArchitecture as error:
        sizes = None
        checks.append(Check("drafter", WARN, f"{found.model}: {error}", "add its memory to the estimates by hand"))
    return checks, sizes


def _sizes(found: OwnDrafter, model: Architecture | None, tp: int, pp: int) -> Drafter | None:
    """vLLM shares the policy's embeddings with heads and MTP layers; EAGLE-3 heads have an output embedding."""
    if not found.sizes or model is None:
        return None
    if found.method == MTP:
        mixture = model.mixture and replace(model.mixture, layers=found.layers)
        shape = replace(model, layers=found.layers, delta_nets=None, mixture=mixture, windows=0)
    else:
        kind = found.sizes.get("model_type")
        shape = Architecture.read({**found.sizes, "model_type": kind if kind in KNOWN else "llama"})
    parameters = shape.rank_parameters(tp, pp)
    if found.method != "draft_model":
        eagle3 = found.method == "eagle3"
        joined = shape.hidden * (3 * model.hidden if eagle3 else 2 * shape.hidden * max(1, found.layers))
        table = int(found.sizes.get("draft_vocab_size") or 0) * shape.hidden
        first = shape.hidden * (shape.query + 2 * shape.key) if eagle3 else 0  # it reads embeddings as well
        parameters = shape.layers * shape.layer(tp) + joined + (table + first) // tp
    return Drafter(parameters, shape.cache_values(tp, pp))
