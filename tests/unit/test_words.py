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
FOLDERS = [ROOT / name for name in ("docs", "recipes", "benchmarks", "examples")]
PAGES = [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in folder.rglob("*.md"))]
MODULES = [*(ROOT / "verl_rhyme").rglob("*.py"), *(ROOT / "patches").glob("*.py")]


def prose(file: Path) -> str:
    """Text of a page without code; docstrings and other strings of a module."""
    text = file.read_text()
    if file.suffix == ".md":
        return re.sub(r"`[^`]*`", "", re.sub(r"^    .*$", "", text, flags=re.MULTILINE))
    constants = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
    return "\n".join(value for value in constants if isinstance(value, str))


@pytest.mark.parametrize("file", [*PAGES, *MODULES], ids=lambda file: file.relative_to(ROOT).as_posix())
def test_no_private_word(file):
    assert [match.group(0) for match in PRIVATE.finditer(prose(file))] == []
