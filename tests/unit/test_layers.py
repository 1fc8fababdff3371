"""Imports point down only, and the policies stay pure: docs/architecture.md's layers, read from the source."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "verl_rhyme"

#: A package may import from the layers below its own, and from itself. ``cli.py`` is above them all.
LAYERS = [
    {"history", "lengths"},
    {"planning"},
    {"placement"},
    {"drafting", "sampling", "scheduling"},
    {"observability"},
    {"patches", "simulation"},
    {"processes"},
    {"weights"},
    {"history_writer", "router", "actor"},
    {"engine", "agent_loop"},
    {"coordinator"},
    {"checks"},
    {"trainer"},
    {"commands"},
]
#: ``plugin.py`` names what it registers in strings, and imports none of it.
ANYWHERE = {"compiled", "config", "once", "plugin", "testing", "__init__"}
ENGINES = {"verl", "vllm", "ray", "torch", "transformers"}
#: The last line of a package's docstring.
LINE = re.compile(r"Process: .+\. Engines: (.+)\.$")
#: (module, what it may import all the same) and why.
EXCEPTIONS = {
    ("verl_rhyme.patches.hydra_run", "verl_rhyme.checks.startup"),  # hydra calls it
    ("verl_rhyme.patches.hydra_run", "verl_rhyme.checks.preflight.compose"),
    ("verl_rhyme.lengths.ranker", "torch"),  # a language model: the one file of the policies that has one
    ("verl_rhyme.lengths.ranker", "transformers"),
}


def layer(package):
    return next((i for i, packages in enumerate(LAYERS) if package in packages), len(LAYERS))


@functools.cache
def engines(package):
    """What a package says that it imports; all for the modules at the root, which import them late."""
    if not (ROOT / package).is_dir():
        return ENGINES
    text = ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text()))
    return set(LINE.search(text)[1].split(", ")) - {"none"}


def imports(source, module):
    """Every absolute module name that a source imports, wherever in it; ``from a import b`` counts as ``a.b``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{name}.{alias.name}" for alias in node.names)


def violations(source, module):
    """What a module of ``verl_rhyme`` imports against the rules, as readable lines."""
    package = [*module.split("."), "__init__"][1]
    for name in imports(source, module):
        top, _, rest = name.partition(".")
        if any(module == who and f"{name}.".startswith(f"{what}.") for who, what in EXCEPTIONS):
            continue
        if top in ENGINES and top not in engines(package):
            yield f"{module} imports {name}, which is none of its package's engines"
        if top == "verl_rhyme" and rest:
            target = rest.split(".")[0]
            known = (ROOT / target).exists() or (ROOT / f"{target}.py").exists()  # else an attribute of the package
            if not known or target in ANYWHERE or target == package:
                continue
            if layer(target) >= layer(package):
                yield f"{module} imports {name}: layer {layer(target)} is not below layer {layer(package)}"


def test_every_package_has_a_layer_and_says_whose_process_runs_it():
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages == {"config", "testing"}.union(*LAYERS)
    assert all(engines(package) <= ENGINES for package in packages)


def test_nothing_else_lies_at_the_root():
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "cli.py", "compiled.py", "once.py", "plugin.py"}


def sources():
    files = {path: path.relative_to(ROOT) for path in ROOT.rglob("*.py")}
    files |= {path: path.relative_to(ROOT.parent) for path in ROOT.parent.glob("patches/*.py")}
    for path, place in sorted(files.items()):
        parts = place.with_suffix("").parts
        yield pytest.param(path, ".".join(["verl_rhyme", *parts]), id="/".join(parts))


@pytest.mark.parametrize(("path", "module"), sources())
def test_imports_point_down(path, module):
    ours = [name for name in imports(path.read_text(), module) if name.startswith("verl_rhyme.")]
    assert module != "verl_rhyme.config" or not ours
    assert module != "verl_rhyme.config.config_tree" or all(name.startswith("verl_rhyme.config.") for name in ours)
    assert not list(violations(path.read_text(), module))


@pytest.mark.parametrize(
    ("module", "source", "broken"),
    [
        ("verl_rhyme.history.store", "import torch", True),
        ("verl_rhyme.drafting.adaptive", "def f():\n    from vllm.v1 import x", True),
        ("verl_rhyme.drafting.adaptive", "from ..trainer import base", True),
        ("verl_rhyme.drafting.adaptive", "from . import choice", False),
        ("verl_rhyme.lengths.ranker", "import torch.nn", False),
        ("verl_rhyme.agent_loop.client", "import ray, verl", False),
        ("verl_rhyme.patches.core", "import verl_rhyme.checks.startup", True),
    ],
)
def test_the_rules_themselves(module, source, broken):
    assert bool(list(violations(source, module))) == broken
