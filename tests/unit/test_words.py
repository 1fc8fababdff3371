"""Documents, docstrings and messages use the field's words: private words for standard ones are listed here."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Private word -> the field's.
WORDS = {
    r"arms?": "preset, run",
    r"beside": "next to, in addition to",
    r"comes? to (its|their) end": "finishes",
    r"crews?": "workers",
    r"cut short": "aborted, interrupted, truncated",
    r"engines? apart": "separate engines",
    r"errands?": "migrations",
    r"generated anew": "regenerated",
    r"harvest(s|ed)?": "collect, collection",
    r"how old": "staleness",
    r"in vain": "wasted tokens",
    r"leftovers?": "cleanup",
    r"nobody|somebody|whoever": "a noun",
    r"tells?|told": "report, print, log",
    r"what pays": "profitable",
    r"whole runs?": "training run",
}
PRIVATE = re.compile(rf"\b({'|'.join(WORDS)})\b", re.IGNORECASE)
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "docs" / "papers").glob("*.md"),
    *(ROOT / "recipes").glob("*.md"),
    *(ROOT / "benchmarks").glob("*.md"),
    *(ROOT / "examples").glob("*/*.md"),
]
MODULES = [*(ROOT / "verl_rhyme").rglob("*.py"), *(ROOT / "patches").glob("*.py")]


def found(text: str) -> list[str]:
    return [match.group(0) for match in PRIVATE.finditer(text)]


def texts(module: Path) -> str:
    """Docstrings and other strings of a module."""
    constants = (node.value for node in ast.walk(ast.parse(module.read_text())) if isinstance(node, ast.Constant))
    return "\n".join(value for value in constants if isinstance(value, str))


def test_a_private_word_is_found():
    assert found("Nobody is told; what remains is a charm.") == ["Nobody", "told"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages(page):
    assert found(re.sub(r"`[^`]*`", "", re.sub(r"^    .*$", "", page.read_text(), flags=re.MULTILINE))) == []


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.relative_to(ROOT).as_posix())
def test_modules(module):
    assert found(texts(module)) == []
