"""What must be right before anything heavy starts. Called before Ray does, for commands with a rhyme tree."""

from __future__ import annotations

import os
import shutil
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.version import Version

from verl_rhyme import config_tree
from verl_rhyme.config import CONFIG_PATH, ConfigError

#: The releases whose seams this version was built on; the doctor checks the same.
SUPPORTED = {"verl": "0.9.1", "vllm": "0.24.0"}

#: What a weight sync through /dev/shm needs at least.
SHM_BYTES = 256 << 20


def check(config: Any) -> None:
    """Refuse, with how to mend it, what would fail later or be ignored in silence.

    Args:
        config: verl's whole config. Without a rhyme tree, or with ``enable=false``, nothing is checked.

    Raises:
        ConfigError: See the message.
    """
    if isinstance(config.get("rhyme"), str):
        raise ConfigError(
            f"+rhyme={config.rhyme} did not find its config group: verl-rhyme is not installed beside verl "
            "(pip show verl-rhyme), or the group has another name (histospec, sorted)"
        )
    mode = _trainer_mode(config)
    if config_tree.from_verl(config) is None:
        if mode.startswith("rhyme_"):
            raise ConfigError(f"trainer.v1.trainer_mode={mode} needs {CONFIG_PATH}.enable=true (+rhyme=... sets both)")
        return
    _check_versions()
    _check_plugin()
    _check_rollout(config)
    _check_files(config)
    _check_shared_memory()


def _check_versions() -> None:
    for package, supported in SUPPORTED.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            raise ConfigError(f"{package} is not installed; verl-rhyme needs {package}=={supported}") from None
        if Version(found).base_version != supported:
            raise ConfigError(
                f"{package} {found} is installed, verl-rhyme supports {supported}: "
                f"pip install '{package}=={supported}', or set {CONFIG_PATH}.enable=false"
            )


def _check_plugin() -> None:
    from verl_rhyme import patches, plugin

    failures = [*plugin.FAILURES, *map(str, patches.refused())]
    if failures:
        listed = "\n  ".join(failures)
        raise ConfigError(f"verl-rhyme could not be set up (see `verl-rhyme doctor`):\n  {listed}")


def _check_rollout(config: Any) -> None:
    rollout = config.actor_rollout_ref.rollout
    if rollout.name != "vllm":
        raise ConfigError(f"actor_rollout_ref.rollout.name={rollout.name}: rhyme works with vllm only")
    if rollout.get("disaggregation", {}).get("enabled", False):
        raise ConfigError("rhyme does not work with actor_rollout_ref.rollout.disaggregation.enabled=true")
    if not config.trainer.get("use_v1", True):
        raise ConfigError("rhyme needs verl's V1 trainer: drop trainer.use_v1=false")
    engine_kwargs = (rollout.get("engine_kwargs") or {}).get("vllm") or {}
    rhyme = config_tree.from_verl(config)
    assert rhyme is not None
    if rhyme.drafting.enable and engine_kwargs.get("speculative_config"):
        raise ConfigError(
            "engine_kwargs.vllm.speculative_config and rhyme drafting exclude each other: drop it, or set "
            f"{CONFIG_PATH}.drafting.enable=false"
        )
    check_data_parallel(config, rhyme.drafting.enable, rhyme.sampling.coupled)
    check_sorting(config, rhyme.sorting.mode)


def check_data_parallel(config: Any, drafting: bool, coupled: bool) -> None:
    """Refuse several vLLM engines in one replica; the preflight asks, too.

    vLLM answers a question to all workers with the first engine's answer (``DPLBAsyncMPClient.call_utility_async``):
    that another one runs without our proposer or sampler would go unseen, and its counts would be lost.

    Raises:
        ConfigError: See the message.
    """
    size = int(config.actor_rollout_ref.rollout.get("data_parallel_size", 1))
    if size > 1 and (drafting or coupled):
        raise ConfigError(
            f"actor_rollout_ref.rollout.data_parallel_size={size} does not work with drafting: vLLM lets us see the "
            "first of its engines only. Set it to 1: verl then makes that many times the replicas of the same GPUs; "
            f"or set {CONFIG_PATH}.enable=false (a mixture of experts that needs it for its experts)"
        )


def _trainer_mode(config: Any) -> str:
    from omegaconf import OmegaConf

    return str(OmegaConf.select(config, "trainer.v1.trainer_mode", default="sync"))


def check_sorting(config: Any, sorting: str | None) -> None:
    """What ``rhyme_sorted`` excludes; the preflight asks, too.

    Raises:
        ConfigError: See the message.
    """
    mode = _trainer_mode(config)
    if (mode == "rhyme_sorted") != (sorting is not None):
        raise ConfigError(
            f"trainer.v1.trainer_mode={mode} contradicts {CONFIG_PATH}.sorting.mode={sorting}: +rhyme=sorted sets "
            "both; drop the override of one, or set sorting.mode=null for another trainer mode"
        )
    if sorting is None:
        return
    rollout = config.actor_rollout_ref.rollout
    if sorting == "partial" and rollout.get("enable_rollout_routing_replay", False):
        raise ConfigError(
            f"{CONFIG_PATH}.sorting.mode=partial cannot replay the experts of a response that several policies made: "
            "set actor_rollout_ref.rollout.enable_rollout_routing_replay=false, or sorting.mode=on_policy"
        )
    if not rollout.get("calculate_log_probs", False) and sorting == "partial":
        raise ConfigError(
            f"{CONFIG_PATH}.sorting.mode=partial needs the log-probabilities that tokens were made with: set "
            "actor_rollout_ref.rollout.calculate_log_probs=true"
        )
    sampler = config.trainer.v1.get("sampler") or {}
    if (sampler.get("custom_sampler") or {}).get("path"):
        raise ConfigError(
            "trainer.v1.sampler.custom_sampler.path is ignored by rhyme_sorted, whose controller decides what is "
            "sampled: set it to null, or use another trainer mode"
        )
    if config.actor_rollout_ref.actor.get("shuffle", False):
        raise ConfigError(
            "actor_rollout_ref.actor.shuffle=true undoes the order of rhyme_sorted: set it to false, and "
            f"{CONFIG_PATH}.sorting.order=0 for a shuffled batch"
        )


def _check_files(config: Any) -> None:
    for option in ("train_files", "val_files"):
        files = config.data.get(option) or []
        for file in [files] if isinstance(files, str) else files:
            if "://" not in str(file) and not os.path.exists(os.path.expanduser(str(file))):
                raise ConfigError(f"data.{option}: no file {file}; make or download the dataset, or mend the path")


def _check_shared_memory() -> None:
    """verl moves weights through /dev/shm where devices have no IPC."""
    from verl.plugin.platform import get_platform

    if get_platform().is_ipc_supported():
        return
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        raise ConfigError(f"no shared memory ({error}): mount a tmpfs on /dev/shm; weights go through it") from None
    if free < SHM_BYTES:
        raise ConfigError(
            f"/dev/shm has {free >> 20} MiB free, weights need at least {SHM_BYTES >> 20}: free some, or start the "
            "container with a larger --shm-size"
        )
