"""Packages that training engines import on a GPU in addition to verl's dependencies, and how to install them.

Two of the packages are built from source against one version of torch and CUDA. An installed package may be broken, so
the check imports it. The findings are those of the doctor, of the preflight and of its dry run.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

#: verl's image for vLLM 0.24.0 (its docker/README.md), which contains all of these packages.
IMAGE = "verlai/verl:vllm024.latest"

_ELSEWHERE = f", or use the image {IMAGE}: recipes/README.md, Start"


@dataclass(frozen=True)
class Package:
    """A required package: its ``module``, its use ``used_for``, and the command that installs it, ``remedy``."""

    module: str
    used_for: str
    remedy: str

    def finding(self, problem: str) -> str:
        return f"{self.module}: {problem}; used for: {self.used_for}"


MEGATRON = Package("megatron.core", "Megatron", "pip install megatron-core==0.16.1")
MBRIDGE = Package("mbridge", "Megatron's weights (vanilla_mbridge=true)", "pip install mbridge==0.15.1")
MEGATRON_BRIDGE = Package(
    "megatron.bridge",
    "Megatron's weights (vanilla_mbridge=false)",
    "install Megatron-Bridge, or, without LoRA, set actor_rollout_ref.actor.megatron.vanilla_mbridge=true",
)
TRANSFORMER_ENGINE = Package(
    "transformer_engine.pytorch", "Megatron's layers", f"bash requirements/build.sh transformer-engine{_ELSEWHERE}"
)
MEGATRON_ATTENTION = Package(
    "flash_attn",
    "Megatron's attention (attention_backend=flash, verl's default)",
    "bash requirements/build.sh flash-attn, or cuDNN's attention: "
    f"++actor_rollout_ref.actor.megatron.override_transformer_config.attention_backend=fused{_ELSEWHERE}",
)
FSDP_ATTENTION = Package(
    "flash_attn",
    "FSDP's attention (attn_implementation=flash_attention_2, verl's default)",
    f"bash requirements/build.sh flash-attn{_ELSEWHERE}",
)
#: Packages of which Megatron needs one: ``vanilla_mbridge`` is false in verl and true in the recipes.
BRIDGES = (MEGATRON_BRIDGE, MBRIDGE)
#: Packages of verl's Megatron engine.
MEGATRON_ENGINE = (MEGATRON, *BRIDGES, TRANSFORMER_ENGINE, MEGATRON_ATTENTION)


def absent(packages: Sequence[Package]) -> dict[Package, str]:
    """Return the packages that are not installed, with their findings, without imports."""
    return {package: package.finding("not installed") for package in packages if not _installed(package.module)}


def _installed(module: str) -> bool:
    top = module.partition(".")[0]
    spec = importlib.util.find_spec(top)
    if spec is not None and spec.origin is None:  # a namespace: find_spec of a part then runs no code
        spec = importlib.util.find_spec(module)
    return spec is not None


def missing(packages: Sequence[Package]) -> dict[Package, str]:
    """Return the packages that are not installed or cannot be imported, with their findings.

    One subprocess imports the installed ones, in this order after torch.
    """
    found = absent(packages)
    installed = [package for package in packages if package not in found]
    if not installed:
        return found
    code = (
        "import importlib, json, sys\n"
        "errors = {}\n"
        "for name in ['torch', *sys.argv[1:]]:\n"
        "    try:\n"
        "        importlib.import_module(name)\n"
        "    except BaseException as error:\n"
        "        errors[name] = f'{type(error).__name__}: {error}'\n"
        "print(json.dumps(errors))\n"
    )
    command = [sys.executable, "-c", code, *(package.module for package in installed)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:  # a library killed the process
        last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        return found | {package: package.finding(f"the import ended the process: {last}") for package in installed}
    errors = json.loads(done.stdout.splitlines()[-1])
    return found | {each: each.finding(errors[each.module]) for each in installed if each.module in errors}
