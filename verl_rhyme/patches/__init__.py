"""Patches for other packages where they offer no extension point: one file per patch, all listed here.

A wheel has the patches in this folder. A checkout has them in its top-level ``patches/``, which is searched too. Those
that only a CPU needs are in :mod:`verl_rhyme.testing`.
Importing this package imports none of the patched packages: each patch waits for its target's module.
``verl-rhyme doctor`` applies and verifies every patch. ``CONTRIBUTING.md`` explains how to add one.

Process: all. Engines: verl, vllm, ray, torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

from verl_rhyme.patches.core import Patch, State, Status, apply, apply_on_import, status

__all__ = ["ALL", "VERL", "VLLM", "State", "Status", "apply", "apply_verl", "apply_vllm", "refused", "status"]

_CHECKOUT = Path(__file__).parents[2]
if (_CHECKOUT / "pyproject.toml").is_file():  # next to an installed package, patches/ may belong to another project
    __path__.append(str(_CHECKOUT / "patches"))


def _load(*names: str) -> tuple[Patch, ...]:
    return tuple(import_module(f"verl_rhyme.{name}").PATCH for name in names)


#: Applied in every process that imports verl (``verl.plugins`` entry point).
VERL = _load(
    "patches.hydra_run",
    "patches.verl_continue_metrics",
    "testing.verl_gloo_backend",
    "patches.verl_logger_flush",
    "testing.mbridge_local_spec",
    "testing.mbridge_norm_names",
    "testing.mbridge_expert_names",
    "testing.megatron_padding_mask",
    "testing.megatron_rng_state",
)

#: Checks a run before Ray starts.
BEFORE_RAY = VERL[0]

#: Applied in every vLLM process (``vllm.general_plugins`` entry point).
VLLM = _load(
    "testing.vllm_cpu_recovered_tokens",
    "testing.vllm_cpu_expand",
    "testing.vllm_cpu_keep_weight",
    "testing.vllm_cpu_delta_net",
    "testing.vllm_cpu_experts",
    "testing.vllm_cpu_async_output",
    "patches.vllm_asynchronous",
    "patches.vllm_stop_strings",
    "patches.vllm_undrafted_graphs",
    "patches.vllm_gdn_counts",
    "patches.vllm_gdn_steps",
    "patches.vllm_gdn_gates",
    "patches.vllm_allowed_added",
    "patches.vllm_allowed_swapped",
)

ALL = VERL + VLLM


def apply_verl() -> None:
    """Apply each of :data:`VERL` now, or after the import of its target's module; never raises."""
    for patch in VERL:
        apply_on_import(patch)


def apply_vllm() -> None:
    for patch in VLLM:
        apply_on_import(patch)


def refused(patches: Iterable[Patch] = ALL) -> list[Status]:
    """Return the patches that do not fit the installed packages, for a caller that must not start without them."""
    return [found for found in map(status, patches) if found.state is State.REFUSED]
