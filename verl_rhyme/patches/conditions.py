"""Conditions under which a patch is needed: cheap checks of the environment, without heavy imports."""

from __future__ import annotations

import os
from importlib import metadata

from verl_rhyme.patches.core import installed_version


def vllm_runs_on_cpu() -> bool:
    """Return whether vLLM will choose its CPU platform (the rule of ``vllm.platforms.cpu_platform_plugin``)."""
    version = installed_version("vllm")
    return version is not None and ("cpu" in version or not any(metadata.distributions(name="vllm")))


def verl_runs_on_cpu() -> bool:
    """Return whether ``VERL_PLATFORM`` selects the platform ``cpu``; verl never detects it."""
    return os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"


def megatron_runs_on_cpu() -> bool:
    return verl_runs_on_cpu() and None not in map(installed_version, ("megatron-core", "mbridge"))
