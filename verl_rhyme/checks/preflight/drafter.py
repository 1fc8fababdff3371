"""Check of the model's own drafter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_rhyme.checks.doctor import FAIL, OK, WARN, Check
from verl_rhyme.checks.preflight.machine_checks import not_cached
from verl_rhyme.checks.preflight.plan import Plan
from verl_rhyme.config.checks import CONFIG_PATH, Unusable
from verl_rhyme.drafting.own_drafter import MTP, examine


def check(plan: Plan, policy: Mapping[str, Any]) -> list[Check]:
    """Check the drafter of a plan for a model with this ``config.json``."""
    if plan.drafter is None:
        return []
    try:
        found = examine(plan.drafter, policy)
    except Unusable as error:
        return [Check("drafter", FAIL, error.detail, error.remedy)]
    if found.method != MTP and not found.sizes:
        return [not_cached("drafter", found.model, "; it is not checked before that")]
    wanted = plan.rhyme.drafting.max_tokens if plan.rhyme and plan.rhyme.drafting.enable else 0
    tokens, rollout = found.draft_tokens(wanted), plan.rollout
    detail = f"{found.model}: {found.method}"
    if tokens < wanted:
        detail += f"; {tokens} draft tokens instead of {wanted}, a multiple of its {found.layers} layers"
    checks = [Check("drafter", OK, detail)]
    known, longest = found.positions, rollout.longest + tokens
    if known is not None and known < min(longest, rollout.max_model_len):
        detail = (
            f"{found.model} knows {known} positions: while any sequence of an engine is longer than {known - tokens} "
            f"tokens, it drafts for none, and sequences of this run reach {rollout.longest}"
        )
        remedy = (
            "raise max_position_embeddings in its config.json if it was trained on such lengths, or drop "
            f"{CONFIG_PATH}.drafting.model"
        )
        checks.append(Check("drafter", WARN, detail, remedy))
    return checks
