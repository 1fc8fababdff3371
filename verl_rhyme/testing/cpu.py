"""verl on a machine without an accelerator: FSDP on gloo, vLLM, several replicas.

verl uses this platform only with ``VERL_PLATFORM=cpu``: a head node without a GPU must not change.
"""

from __future__ import annotations

import os
import resource
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase

#: Default environment of the rollout servers; the user's environment takes precedence.
ROLLOUT_ENV = {
    # vLLM would bind each engine's threads to all cores of one NUMA node, and two replicas to the same cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # GiB of KV cache per replica; vLLM would take most of the memory.
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


class _CpuId(str):
    """Device id for verl on a CPU: ``tensor.to(id)`` sees "cpu", ``f"cpu:{id}"`` is "cpu:0", ``int(id)`` is 0."""

    def __format__(self, spec: str) -> str:
        return "0"

    def __int__(self) -> int:
        return 0


def _resident_bytes(*_: Any, **__: Any) -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def _peak_resident_bytes(*_: Any, **__: Any) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _free_and_total_bytes(*_: Any, **__: Any) -> tuple[int, int]:
    page = resource.getpagesize()
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


def do_nothing(*_: Any, **__: Any) -> None:
    return None


def _device_module() -> ModuleType:
    """Return ``torch.cpu`` with the functions of ``torch.cuda`` that verl calls; memory figures are the process's."""
    module = ModuleType("verl_rhyme_cpu_device")
    vars(module).update({name: value for name, value in vars(torch.cpu).items() if not name.startswith("__")})
    vars(module).update(
        memory_allocated=_resident_bytes,
        memory_reserved=_resident_bytes,
        max_memory_allocated=_peak_resident_bytes,
        max_memory_reserved=_peak_resident_bytes,
        mem_get_info=_free_and_total_bytes,
        current_device=lambda: 0,
        get_device_name=lambda *_: "CPU",
        get_rng_state=lambda *_: torch.get_rng_state(),
        set_rng_state=lambda state, *_: torch.set_rng_state(state),
        empty_cache=do_nothing,
        ipc_collect=do_nothing,
        reset_peak_memory_stats=do_nothing,
        set_per_process_memory_fraction=do_nothing,
        manual_seed=do_nothing,
        manual_seed_all=do_nothing,
    )
    return module


class PlatformCPU(PlatformBase):
    """Platform ``cpu``. verl's pools request GPUs from Ray: declare logical GPUs with ``ray_init.num_gpus=N``."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _device_module()

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False  # never selected by detection

    def current_device(self) -> Any:
        return _CpuId("cpu")

    def device_count(self) -> int:
        return 1

    set_device = synchronize = set_allocator_settings = empty_cache = do_nothing
    profiler_start = profiler_stop = cudart = do_nothing

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "VERL_CPU_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> AbstractContextManager[None]:
        return nullcontext()

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False  # verl sends weights to vLLM through shared memory instead

    def rollout_env_vars(self) -> dict[str, str]:
        return {name: os.environ.get(name, value) for name, value in ROLLOUT_ENV.items()}


def register_platform() -> None:
    from verl.plugin.platform.platform_manager import PlatformRegistry

    PlatformRegistry.register(platform="cpu")(PlatformCPU)


def register_fsdp_engines() -> None:
    """Register verl's FSDP engines for "cpu": they are device-neutral, but verl does not list this device."""
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp import transformer_impl

    for model_type, engine in (
        ("language_model", transformer_impl.FSDPEngineWithLMHead),
        ("value_model", transformer_impl.FSDPEngineWithValueHead),
    ):
        EngineRegistry.register(model_type=model_type, backend=["fsdp", "fsdp2"], device="cpu")(engine)
