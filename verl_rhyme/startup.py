"""What must be right before anything heavy starts. Called before Ray does, for commands with a rhyme tree."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.version import Version

from verl_rhyme import config_tree
from verl_rhyme.config import CONFIG_PATH, ConfigError, RhymeConfig

#: The releases whose seams this version was built on; the doctor checks the same.
SUPPORTED = {"verl": "0.9.1", "vllm": "0.24.0"}

#: What a weight sync through /dev/shm needs at least.
SHM_BYTES = 256 << 20

#: What ``+rhyme=histospec`` and ``+rhyme=sorted`` set there.
DRAFTING_MANAGER = "verl_rhyme.workers.agent_loop.RhymeAgentLoopManager"
SORTED_MANAGER = "verl_rhyme.workers.agent_loop.SessionAgentLoopManager"
_MANAGER = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"


def check(config: Any) -> None:
    """Refuse, with how to mend it, what would fail later or be ignored in silence.

    Args:
        config: verl's whole config. Without a rhyme tree, or with ``enable=false``, only that nothing of ours that
            needs rhyme is left in it.

    Raises:
        ConfigError: See the message.
    """
    if isinstance(config.get("rhyme"), str):
        raise ConfigError(
            f"+rhyme={config.rhyme} did not find its config group: verl-rhyme is not installed beside verl "
            "(pip show verl-rhyme), or the group has another name (histospec, sorted)"
        )
    rhyme = config_tree.from_verl(config)
    if rhyme is None:
        _check_without(config)
        return
    _check_versions()
    _check_plugin()
    for told in refusals(config, rhyme):
        raise ConfigError(told)
    _check_agent_loops(config, rhyme)
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


def _check_without(config: Any) -> None:
    mode, manager = _trainer_mode(config), _agent_loop_manager(config)
    if mode.startswith("rhyme_") or manager == SORTED_MANAGER:
        what = f"trainer.v1.trainer_mode={mode}" if mode.startswith("rhyme_") else f"{_MANAGER}={manager}"
        raise ConfigError(
            f"{what} needs {CONFIG_PATH}.enable=true (+rhyme=... sets both); for stock verl drop +rhyme=sorted"
        )


def refusals(config: Any, rhyme: RhymeConfig) -> Iterator[str]:
    """What rhyme excludes, and how to mend it, one line each; the preflight asks, too. Imports nothing."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.name != "vllm":
        yield (
            f"actor_rollout_ref.rollout.name={rollout.name}: rhyme works with vllm only; "
            "set actor_rollout_ref.rollout.name=vllm"
        )
    if rollout.get("disaggregation", {}).get("enabled", False):
        yield "rhyme does not work with actor_rollout_ref.rollout.disaggregation.enabled=true: drop it"
    if not config.trainer.get("use_v1", True):
        yield "rhyme needs verl's V1 trainer: drop trainer.use_v1=false"
    engine_kwargs = (rollout.get("engine_kwargs") or {}).get("vllm") or {}
    if rhyme.drafting.enable and engine_kwargs.get("speculative_config"):
        yield (
            "engine_kwargs.vllm.speculative_config and rhyme drafting exclude each other: drop it, or set "
            f"{CONFIG_PATH}.drafting.enable=false"
        )
    yield from _data_parallel(config, rhyme)
    yield from _sorting(config, rhyme.sorting.mode)


def _data_parallel(config: Any, rhyme: RhymeConfig) -> Iterator[str]:
    """Several vLLM engines in one replica.

    vLLM answers a question to all workers with the first engine's answer (``DPLBAsyncMPClient.call_utility_async``):
    that another one runs without our proposer or sampler would go unseen, and its counts would be lost.
    """
    size = int(config.actor_rollout_ref.rollout.get("data_parallel_size", 1))
    if size > 1 and (rhyme.drafting.enable or rhyme.sampling.coupled):
        yield (
            f"actor_rollout_ref.rollout.data_parallel_size={size} does not work with drafting: vLLM lets us see the "
            "first of its engines only. Set it to 1: verl then makes that many times the replicas of the same GPUs; "
            f"or set {CONFIG_PATH}.enable=false (a mixture of experts that needs it for its experts)"
        )


def _trainer_mode(config: Any) -> str:
    from omegaconf import OmegaConf

    return str(OmegaConf.select(config, "trainer.v1.trainer_mode", default="sync"))


def _agent_loop_manager(config: Any) -> str | None:
    from omegaconf import OmegaConf

    return OmegaConf.select(config, _MANAGER)


def _check_agent_loops(config: Any, rhyme: RhymeConfig) -> None:
    """A manager of somebody's own is one of ours with something added; its class is imported to see that."""
    name = _agent_loop_manager(config)
    needed = DRAFTING_MANAGER if rhyme.sorting.mode is None else SORTED_MANAGER
    if name in (DRAFTING_MANAGER, SORTED_MANAGER, None):  # verl's own lacks the samples' numbers only
        known = name == needed or rhyme.sorting.mode is None
    else:
        from verl.utils.import_utils import load_class_from_fqn

        try:
            known = issubclass(load_class_from_fqn(name), load_class_from_fqn(needed))
        except Exception as error:
            raise ConfigError(f"{_MANAGER}={name} cannot be imported: {error}") from error
    if not known:
        raise ConfigError(
            f"{_MANAGER}={name or 'null'} does not derive from {needed}, which rhyme needs there: put that in the "
            "place of verl's manager among its bases, or drop the override"
        )


def _sorting(config: Any, sorting: str | None) -> Iterator[str]:
    """What ``rhyme_sorted`` excludes."""
    mode = _trainer_mode(config)
    if (mode == "rhyme_sorted") != (sorting is not None):
        yield (
            f"trainer.v1.trainer_mode={mode} contradicts {CONFIG_PATH}.sorting.mode={sorting}: +rhyme=sorted sets "
            "both; drop the override of one, or set sorting.mode=null for another trainer mode"
        )
    if sorting is None:
        return
    rollout = config.actor_rollout_ref.rollout
    if sorting == "partial" and rollout.get("enable_rollout_routing_replay", False):
        yield (
            f"{CONFIG_PATH}.sorting.mode=partial cannot replay the experts of a response that several policies made: "
            "set actor_rollout_ref.rollout.enable_rollout_routing_replay=false, or sorting.mode=on_policy"
        )
    if not rollout.get("calculate_log_probs", False) and sorting == "partial":
        yield (
            f"{CONFIG_PATH}.sorting.mode=partial needs the log-probabilities that tokens were made with: set "
            "actor_rollout_ref.rollout.calculate_log_probs=true"
        )
    sampler = config.trainer.v1.get("sampler") or {}
    if (sampler.get("custom_sampler") or {}).get("path"):
        yield (
            "trainer.v1.sampler.custom_sampler.path is ignored by rhyme_sorted, whose scheduler decides what is "
            "sampled: set it to null, or use another trainer mode"
        )
    if config.actor_rollout_ref.actor.get("shuffle", False):
        yield (
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
