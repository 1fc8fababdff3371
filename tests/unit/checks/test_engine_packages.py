"""The packages of a training engine are checked before the run; a CPU run needs none."""

import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl_rhyme.checks import engine_packages as packages
from verl_rhyme.checks.preflight import machine_checks
from verl_rhyme.checks.preflight.plan import Plan


def plan(strategy: str, device: str = "cuda") -> Plan:
    found = object.__new__(Plan)
    for name, value in (("strategy", strategy), ("device", device)):
        object.__setattr__(found, name, value)
    return found


def config(vanilla_mbridge: bool = True, attention: str = "flash", implementation: str | None = None):
    model = {} if implementation is None else {"override_config": {"attn_implementation": implementation}}
    megatron = {
        "vanilla_mbridge": vanilla_mbridge,
        "override_transformer_config": {"attention_backend": attention},
    }
    return OmegaConf.create({"actor_rollout_ref": {"actor": {"megatron": megatron}, "model": model}})


def required(config, strategy: str) -> list[str]:
    return [package.module for package in machine_checks._engine_packages(config, plan(strategy))]


def test_packages_of_each_engine() -> None:
    megatron = ["megatron.core", "mbridge", "transformer_engine.pytorch", "flash_attn"]
    assert required(config(), "megatron") == megatron
    assert required(config(attention="fused"), "megatron") == megatron[:3]
    assert required(config(vanilla_mbridge=False), "megatron")[1] == "megatron.bridge"
    assert required(config(), "fsdp2") == required(config(), "fsdp") == ["flash_attn"]
    assert required(config(implementation="sdpa"), "fsdp2") == []
    assert required(config(), "torchtitan") == []


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stub packages that a subprocess imports, with torch among them, whose real import takes seconds."""
    (tmp_path / "torch.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine/__init__.py").touch()
    for name in ("transformer_engine/pytorch", "flash_attn", "mbridge"):
        (tmp_path / f"{name}.py").write_text("import torch\n")
    (tmp_path / "megatron/core").mkdir(parents=True)
    (tmp_path / "megatron/core/__init__.py").touch()
    yield tmp_path
    for name in ("transformer_engine", "transformer_engine.pytorch", "flash_attn", "mbridge", "megatron"):
        sys.modules.pop(name, None)


def statuses() -> list[tuple[str, str]]:
    found = machine_checks.engine(config(), plan("megatron"), imports=True)
    return [(check.status, check.detail + " " + check.remedy) for check in found]


def test_all_packages_can_be_imported(modules: Path) -> None:
    [(status, detail)] = statuses()
    assert status == "ok"
    assert "transformer_engine.pytorch" in detail


def test_a_package_built_against_another_torch(modules: Path) -> None:
    (modules / "transformer_engine/pytorch.py").write_text("raise ImportError('undefined symbol: _ZN3c10')\n")
    [(status, text)] = statuses()
    assert status == "fail"
    assert "transformer_engine.pytorch: ImportError: undefined symbol: _ZN3c10" in text
    assert "bash requirements/build.sh transformer-engine" in text
    assert packages.IMAGE in text


def test_a_package_that_kills_the_process(modules: Path) -> None:
    (modules / "flash_attn.py").write_text("import os; os.abort()\n")
    assert {status for status, _ in statuses()} == {"fail"}


def test_a_cpu_run_requires_no_packages() -> None:
    assert list(machine_checks.engine(config(), plan("megatron", device="cpu"), imports=True)) == []
