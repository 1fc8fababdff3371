"""No process waits for another for ever without a line: each blocking call has a limit or is within ``waiting_for``."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "verl_rhyme"
MODULES = [module for room in ("agent_loop", "coordinator", "trainer") for module in (ROOT / room).glob("*.py")]
#: Results that have arrived, by module and function.
ARRIVED = {
    ("draft_counts", "_fetch"),
    ("ranking", "on_step"),
    ("replicas", "_seen"),
    ("replicas", "_let_in"),
    ("client", "_give_back"),
}
BLOCKING = {"ray.get", "ray.wait", "result", "shutdown"}


def name(call):
    if isinstance(call.func, ast.Attribute):
        of = call.func.value
        return f"{of.id}.{call.func.attr}" if isinstance(of, ast.Name) and of.id == "ray" else call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def silent_waits(source):
    """Return function and line of each blocking call without a limit or a line."""
    found = []

    def visit(node, function, logged):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function, logged = node.name, False
        if isinstance(node, ast.With):
            logged = logged or any(
                isinstance(item.context_expr, ast.Call) and name(item.context_expr) == "waiting_for"
                for item in node.items
            )
        if isinstance(node, ast.Call) and name(node) in BLOCKING and not logged:
            limited = any(keyword.arg == "timeout" for keyword in node.keywords)
            if not limited:
                found.append((function, node.lineno))
        for child in ast.iter_child_nodes(node):
            visit(child, function, logged)

    visit(ast.parse(source), "", False)
    return found


def test_a_silent_wait_is_found():
    source = "def f():\n    ray.get(x)\n    ray.get(x, timeout=1)\n    with waiting_for('x'):\n        ray.get(x)\n"
    assert silent_waits(source) == [("f", 2)]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.relative_to(ROOT).as_posix())
def test_each_wait_has_a_limit_or_a_line(module):
    found = silent_waits(module.read_text())
    assert [wait for wait in found if (module.stem, wait[0]) not in ARRIVED] == []
