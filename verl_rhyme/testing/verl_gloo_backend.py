"""Request the gloo backend once on a CPU: verl requests it twice for the same device."""

from __future__ import annotations

from typing import Any

from verl_rhyme.patches.conditions import verl_runs_on_cpu
from verl_rhyme.patches.core import Patch, around


def _gloo_once(original: Any, timeout_second: int | None = None, backend: str | None = None) -> None:
    original(timeout_second=timeout_second, backend=backend or "cpu:gloo")


PATCH = Patch(
    name="verl_gloo_backend",
    target="verl.utils.distributed:initialize_global_process_group_ray",
    why='on the platform "cpu" verl builds the backend "cpu:gloo,cpu:gloo", which torch rejects',
    requires="verl==0.9.1",
    source_sha256="e9ec517a0089c3c5e6917f28bdd2f55bf493b452aa70fd85c7c17bd12a3e485f",
    replace=around(_gloo_once),
    needed=verl_runs_on_cpu,
)
