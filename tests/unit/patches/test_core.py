"""The patch core with generated packages."""

import importlib
import inspect
import subprocess
import sys
import types
from importlib import metadata
from pathlib import Path

import pytest

from verl_rhyme.patches import core
from verl_rhyme.patches.core import Patch, State


def greet(name):
    return "hello " + name


class Stubborn:
    func = staticmethod(greet)

    def __setattr__(self, name, value):
        """Ignores assignments."""


ORIGINAL = inspect.getsource(greet) + inspect.getsource(Stubborn) + "stubborn = Stubborn()"


@core.around
def _louder(original, name):
    return original(name).upper()


@pytest.fixture
def package(tmp_path, monkeypatch, request):
    """Name of a new package with the modules ``target`` and ``caller``, not imported yet."""
    name = f"patched_{abs(hash(request.node.nodeid))}"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "target.py").write_text(ORIGINAL)
    (folder / "caller.py").write_text(f"from {name}.target import greet")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    return name


@pytest.fixture
def make(package):
    """Function that builds a valid patch of ``target.greet``; keyword arguments replace its fields."""

    def build(qualname="greet", **fields):
        defaults = {
            "name": f"{package}_{qualname}",
            "target": f"{package}.target:{qualname}",
            "why": "a test requires it",
            "requires": f"packaging=={metadata.version('packaging')}",
            "source_sha256": core.source_hash(greet),
            "replace": _louder,
        }
        return Patch(**defaults | fields)

    return build


def test_applies_right_after_the_import_and_once(make, package):
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


def test_callers_that_imported_the_original_by_name_get_the_replacement(make, package):
    caller = importlib.import_module(f"{package}.caller")
    assert caller.greet("you") == "hello you"
    assert core.apply(make()).state is State.APPLIED
    assert caller.greet("you") == "HELLO YOU"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"requires": "packaging==0.0.1"}, "packaging==0.0.1"),
        ({"requires": "no-such-distribution==1.0"}, "no-such-distribution==1.0"),
        ({"qualname": "farewell"}, "does not exist"),
        ({"qualname": "stubborn"}, "cannot be read"),  # an instance has no source
        ({"qualname": "stubborn.func"}, "still returns the original"),
    ],
)
def test_refuses_other_versions_and_irreplaceable_targets(make, package, changes, reason):
    target = importlib.import_module(f"{package}.target")
    found = core.apply(make(**changes))
    assert found.state is State.REFUSED
    assert reason in found.detail
    assert target.greet("you") == "hello you"


def test_failed_replacement_changes_nothing(make, package, monkeypatch):
    target = importlib.import_module(f"{package}.target")
    original = target.greet

    class Frozen(types.ModuleType):
        def __setattr__(self, name, value):
            raise AttributeError("frozen")

    frozen = Frozen(f"{package}.frozen")
    vars(frozen)["greet"] = original
    monkeypatch.setitem(sys.modules, f"{package}.frozen", frozen)
    found = core.apply(make())
    assert found.state is State.REFUSED
    assert "frozen" in found.detail
    assert target.greet is original


def test_not_needed_is_left_alone(make, package):
    patch = make(needed=lambda: False, requires="no-such-distribution==1.0")
    target = importlib.import_module(f"{package}.target")
    assert core.apply_on_import(patch).state is State.NOT_NEEDED
    assert target.greet("you") == "hello you"


def test_one_target_has_at_most_one_patch(make, package):
    importlib.import_module(f"{package}.target")
    assert core.apply(make()).state is State.APPLIED
    second = core.apply(make(name="second"))
    assert second.state is State.REFUSED
    assert "already has the patch" in second.detail


def test_importing_patches_imports_no_patched_package():
    code = (
        "import sys, verl_rhyme.patches as p; p.apply_verl(); p.apply_vllm();"
        "print([m for m in ('verl', 'vllm', 'torch', 'ray') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_names_are_unique_and_equal_the_file_names():
    from verl_rhyme import patches

    names = [patch.name for patch in patches.ALL]
    assert len(set(names)) == len(names)
    root = Path(__file__).parents[3]
    files = [
        path
        for path in [*root.glob("patches/*.py"), *root.glob("verl_rhyme/testing/*.py")]
        if "PATCH" in path.read_text()
    ]
    assert {path.stem for path in files} == set(names)
