"""Changes to other packages where they have no seam: one file per patch, all of them listed here.

Importing this package imports none of the packages it patches; each patch waits for the module of its target.
``verl-rhyme doctor`` applies and reads back every patch; see ``CONTRIBUTING.md`` for how to add one.
"""

from __future__ import annotations

from collections.abc import Iterable

from . import (
    mbridge_local_spec,
    mbridge_norm_names,
    megatron_padding_mask,
    megatron_rng_state,
    verl_early_check,
    verl_gloo_backend,
    verl_logger_flush,
    vllm_cpu_expand,
    vllm_cpu_keep_weight,
    vllm_cpu_recovered_tokens,
    vllm_undrafted_graphs,
)
from .core import Patch, PatchRefusedError, State, Status, apply, apply_on_import, status

__all__ = [
    "ALL",
    "MEGATRON",
    "VERL",
    "VLLM",
    "Patch",
    "PatchRefusedError",
    "State",
    "Status",
    "apply",
    "apply_all",
    "apply_on_import",
    "apply_verl",
    "apply_vllm",
    "refused",
    "status",
]

#: Applied in every process that imports verl (``verl.plugins`` entry point).
VERL: tuple[Patch, ...] = (
    verl_early_check.PATCH,
    verl_gloo_backend.PATCH,
    verl_logger_flush.PATCH,
)

#: Applied with verl's, where megatron-core and mbridge are imported.
MEGATRON: tuple[Patch, ...] = (
    mbridge_local_spec.PATCH,
    mbridge_norm_names.PATCH,
    megatron_padding_mask.PATCH,
    megatron_rng_state.PATCH,
)

#: Applied in every vLLM process (``vllm.general_plugins`` entry point).
VLLM: tuple[Patch, ...] = (
    vllm_cpu_recovered_tokens.PATCH,
    vllm_cpu_expand.PATCH,
    vllm_cpu_keep_weight.PATCH,
    vllm_undrafted_graphs.PATCH,
)

ALL: tuple[Patch, ...] = VERL + MEGATRON + VLLM


def apply_all(patches: Iterable[Patch]) -> list[Status]:
    """Apply each of ``patches`` now, or when the module of its target is imported; never raises."""
    return [apply_on_import(patch) for patch in patches]


def apply_verl() -> list[Status]:
    """:func:`apply_all` of :data:`VERL` and :data:`MEGATRON`."""
    return apply_all(VERL + MEGATRON)


def apply_vllm() -> list[Status]:
    """:func:`apply_all` of :data:`VLLM`."""
    return apply_all(VLLM)


def refused(patches: Iterable[Patch] = ALL) -> list[Status]:
    """Those that do not fit what is installed; for a caller that would rather not start than run without them."""
    return [found for found in map(status, patches) if found.state is State.REFUSED]
