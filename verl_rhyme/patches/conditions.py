"""When a patch is needed: cheap looks at the environment that import nothing heavy."""

from __future__ import annotations

import os

from verl_rhyme.patches.core import installed_version


def vllm_runs_on_cpu() -> bool:
    """Whether vLLM will choose its CPU platform; its own rule (``vllm.platforms.cpu_platform_plugin``)."""
    version = installed_version("vllm")
    return version is not None and ("cpu" in version or not _has_distribution("vllm"))


def verl_runs_on_cpu() -> bool:
    """Whether verl was asked for the platform ``cpu``; it never detects it by itself."""
    return os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"


def megatron_runs_on_cpu() -> bool:
    """Whether verl's Megatron engine may be asked to run on the platform ``cpu``."""
    return verl_runs_on_cpu() and None not in map(installed_version, ("megatron-core", "mbridge"))


def _has_distribution(name: str) -> bool:
    from importlib import metadata

    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
