"""The packages of a training engine are checked before the run; a CPU run needs no kernels."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from verl_rhyme.checks import engine_packages
from verl_rhyme.checks.preflight import machine_checks


def plan(strategy: str, device: str = "cuda") -> Any:
    return SimpleNamespace(strategy=strategy, device=device)


def config(vanilla_mbridge: bool = True, attention: str = "flash", **override: str) -> Any:
    megatron = {
        "vanilla_mbridge": vanilla_mbridge,
        "override_transformer_config": {"attention_backend": attention},
    }
    model = {"override_config": override}
    return OmegaConf.create({"actor_rollout_ref": {"actor": {"megatron": megatron}, "model": model}})


def required(config, strategy: str, device: str = "cuda") -> list[str]:
    return [package.module for package in machine_checks._engine_packages(config, plan(strategy, device))]


def test_packages_of_each_engine() -> None:
    megatron = ["megatron.core", "mbridge", "transformer_engine.pytorch", "flash_attn"]
    assert required(config(), "megatron") == megatron
    assert required(config(attention="fused"), "megatron") == megatron[:3]
    assert required(config(vanilla_mbridge=False), "megatron")[1] == "megatron.bridge"
    assert required(config(), "fsdp2") == required(config(), "fsdp") == ["flash_attn"]
    assert required(config(attn_implementation="sdpa"), "fsdp2") == []
    assert required(config(), "torchtitan") == []
    assert required(config(vanilla_mbridge=False), "megatron", device="cpu") == megatron[:2]
    assert required(config(), "fsdp2", device="cpu") == []


def test_a_package_of_a_namespace_is_missed_next_to_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by the check that imports, in the same words."""
    (tmp_path / "some" / "core").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    packages = [engine_packages.Package(f"some.{name}", f"the {name}", "") for name in ("core", "bridge")]
    found = {packages[1]: "some.bridge: not installed; used for: the bridge"}
    assert engine_packages.absent(packages) == found
    assert engine_packages.missing(packages[1:]) == found


@pytest.mark.parametrize(
    ("broken", "code", "words"),
    [
        (None, "", "transformer_engine.pytorch"),
        (
            "transformer_engine/pytorch.py",
            "raise ImportError('undefined symbol: _ZN3c10')",  # built against another torch
            "transformer_engine.pytorch: ImportError: undefined symbol: _ZN3c10",
        ),
        ("flash_attn.py", "import os; os.abort()", "the import ended the process"),
    ],
)
def test_packages_are_imported_in_a_process_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str | None, code: str, words: str
) -> None:
    """Stubs, with torch among them, whose real import takes seconds."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    for folder in ("transformer_engine", "megatron/core"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "__init__.py").touch()
    for name in ("torch", "transformer_engine/pytorch", "flash_attn", "mbridge"):
        (tmp_path / f"{name}.py").touch()
    if broken:
        (tmp_path / broken).write_text(code)
    found = list(machine_checks.engine(config(), plan("megatron"), imports=True))
    assert {check.status for check in found} == {"fail" if broken else "ok"}
    assert words in found[-1].detail
    assert not broken or "bash requirements/build.sh" in found[-1].remedy
