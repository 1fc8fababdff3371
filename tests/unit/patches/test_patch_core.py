"""The patch core with generated packages."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import subprocess
import sys
import types
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from verl_rhyme.patches import core
from verl_rhyme.patches.core import Patch, State

ORIGINAL = '''
def greet(name):
    return "hello " + name


class Holder:
    def __init__(self, func):
        self.func = func

    def method(self):
        return "method"


class Stubborn:
    """Ignores assignments."""

    func = staticmethod(greet)

    def __setattr__(self, name, value):
        pass


wrapped = Holder(greet)
stubborn = Stubborn()
'''
CALLER = "from {package}.target import greet\n"


def _louder(original: Callable[[str], str]) -> Callable[[str], str]:
    def replacement(name: str) -> str:
        return original(name).upper()

    return replacement


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """Name of a new package with the modules ``target`` and ``caller``, not imported yet."""
    name = f"patched_{abs(hash(request.node.nodeid))}"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "target.py").write_text(ORIGINAL)
    (folder / "caller.py").write_text(CALLER.format(package=name))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    return name


@pytest.fixture
def make(package: str, tmp_path: Path) -> Callable[..., Patch]:
    """Function that builds a valid patch of ``target.greet``; keyword arguments replace its fields."""
    (tmp_path / "same.py").write_text(ORIGINAL)
    sha = core.source_hash(importlib.import_module("same").greet)
    sys.modules.pop("same")

    def build(qualname: str = "greet", **fields: object) -> Patch:
        patch = Patch(
            name=f"{package}_{qualname}",
            target=f"{package}.target:{qualname}",
            why="a test requires it",
            upstream="unreported",
            requires=f"packaging=={metadata.version('packaging')}",
            source_sha256=sha,
            replace=_louder,
        )
        return dataclasses.replace(patch, **fields)  # type: ignore[arg-type]

    return build


def test_applies_right_after_the_import_and_once(make: Callable[..., Patch], package: str) -> None:
    made = []
    patch = make(replace=lambda original: made.append(original) or _louder(original))
    assert core.apply_on_import(patch).state is State.PENDING
    assert core.apply(patch).state is State.PENDING
    assert f"{package}.target" not in sys.modules
    target = importlib.import_module(f"{package}.target")
    assert target.greet("you") == "HELLO YOU"
    assert core.status(patch).state is State.APPLIED
    assert core.apply(patch).state is State.APPLIED
    assert core.apply_on_import(patch).state is State.APPLIED
    assert len(made) == 1


def test_callers_that_imported_the_original_by_name_get_the_replacement(
    make: Callable[..., Patch], package: str
) -> None:
    caller = importlib.import_module(f"{package}.caller")
    assert caller.greet("you") == "hello you"
    assert core.apply(make()).state is State.APPLIED
    assert caller.greet("you") == "HELLO YOU"


def test_patches_an_attribute_of_an_object(make: Callable[..., Patch], package: str) -> None:
    target = importlib.import_module(f"{package}.target")
    assert core.apply(make("wrapped.func")).state is State.APPLIED
    assert target.wrapped.func("you") == "HELLO YOU"


def test_refuses_a_changed_original(
    make: Callable[..., Patch], package: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / package / "target.py").write_text(ORIGINAL.replace("hello ", "good morning "))
    patch = make()
    core.apply_on_import(patch)
    with caplog.at_level(logging.WARNING):
        target = importlib.import_module(f"{package}.target")
    assert target.greet("you") == "good morning you"
    found = core.status(patch)
    assert found.state is State.REFUSED
    assert "has changed" in found.detail
    assert patch.name in caplog.text
    assert "REFUSED" in caplog.text
    assert patch.why in caplog.text


def test_not_needed_is_left_alone(make: Callable[..., Patch]) -> None:
    assert core.apply_on_import(make(needed=lambda: False)).state is State.NOT_NEEDED


@pytest.mark.parametrize("requires", ["packaging==0.0.1", "no-such-distribution==1.0"])
def test_refuses_another_version(make: Callable[..., Patch], package: str, requires: str) -> None:
    target = importlib.import_module(f"{package}.target")
    found = core.apply(make(requires=requires))
    assert found.state is State.REFUSED
    assert requires in found.detail
    assert target.greet("you") == "hello you"


@pytest.mark.parametrize(
    ("qualname", "reason"),
    [
        ("farewell", "does not exist"),
        ("wrapped", "cannot be read"),  # an instance has no source
        ("stubborn.func", "still returns the original"),
    ],
)
def test_refuses_irreplaceable_targets(make: Callable[..., Patch], package: str, qualname: str, reason: str) -> None:
    target = importlib.import_module(f"{package}.target")
    found = core.apply(make(qualname))
    assert found.state is State.REFUSED
    assert reason in found.detail
    assert target.greet("you") == "hello you"


def test_guard_replaces_missing_source(make: Callable[..., Patch], package: str) -> None:
    target = importlib.import_module(f"{package}.target")
    new = target.Holder(None)
    patch = make("wrapped", guard="greet", replace=lambda original: new)
    assert core.apply(patch).state is State.APPLIED
    assert target.wrapped is new


def test_failed_replacement_changes_nothing(
    make: Callable[..., Patch], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = importlib.import_module(f"{package}.target")
    original = target.greet

    class Frozen(types.ModuleType):
        def __setattr__(self, name: str, value: object) -> None:
            raise AttributeError("frozen")

    frozen = Frozen(f"{package}.frozen")
    vars(frozen)["greet"] = original
    monkeypatch.setitem(sys.modules, f"{package}.frozen", frozen)
    found = core.apply(make())
    assert found.state is State.REFUSED
    assert "frozen" in found.detail
    assert target.greet is original


def test_a_failing_patch_does_not_fail_the_import(make: Callable[..., Patch], package: str) -> None:
    patch = make(replace=lambda original: 1 / 0)
    core.apply_on_import(patch)
    target = importlib.import_module(f"{package}.target")
    assert target.greet("you") == "hello you"
    assert "ZeroDivisionError" in core.status(patch).detail


def test_one_target_has_at_most_one_patch(make: Callable[..., Patch], package: str) -> None:
    importlib.import_module(f"{package}.target")
    assert core.apply(make()).state is State.APPLIED
    second = core.apply(make(name="second"))
    assert second.state is State.REFUSED
    assert "already has the patch" in second.detail


def test_importing_patches_imports_no_patched_package() -> None:
    code = (
        "import sys, verl_rhyme.patches as p; p.apply_verl(); p.apply_vllm();"
        "print([m for m in ('verl', 'vllm', 'torch', 'ray') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_names_are_unique_and_equal_the_file_names() -> None:
    from verl_rhyme import patches

    names = [patch.name for patch in patches.ALL]
    assert len(set(names)) == len(names)
    for name in names:
        importlib.import_module(f"verl_rhyme.patches.{name}")
    assert {path.stem for path in (Path(__file__).parents[3] / "patches").glob("*.py")} == set(names)
