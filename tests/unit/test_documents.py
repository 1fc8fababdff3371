"""What the documents point to exists: links, their anchors, and the files that are named where reading begins."""

import re
from pathlib import Path

import pytest

from benchmarks import full_scale
from verl_rhyme.observability import metrics

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *ROOT.glob("benchmarks/*.md"),
        *ROOT.glob("recipes/*.md"),
        *ROOT.glob("examples/*/*.md"),
    )
)
PACKAGE = ROOT / "verl_rhyme"


def anchors(document: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name):
    document = ROOT / name
    links = re.findall(r"\]\((?!https?:)([^)\s]+)\)", document.read_text())
    wrong = []
    for link in links:
        file, _, anchor = link.partition("#")
        target = document.parent / file if file else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    assert wrong == []


def named(text: str) -> set[str]:
    """Files and folders of the package that a text names by their path, as ``trainer/base.py`` or ``lengths/``."""
    packages = "|".join(path.name for path in PACKAGE.iterdir() if path.is_dir() and not path.name.startswith("_"))
    return set(re.findall(rf"(?<![\w/.])((?:{packages})/(?:[\w/]+\.py)?)", text))


@pytest.mark.parametrize(("name", "least"), [("README.md", 5), ("docs/architecture.md", 20)])
def test_files_that_are_named_exist(name, least):
    found = named((ROOT / name).read_text())
    assert len(found) >= least
    missing = {path for path in found if not any((parent / path).exists() for parent in (PACKAGE, ROOT))}
    assert missing == set()


def test_documents_stay_short():
    words = {name: len((ROOT / name).read_text().split()) for name in DOCUMENTS if name.startswith("docs/")}
    assert sum(words.values()) <= 19_000
    assert words["docs/results.md"] <= 3_000


def test_every_metric_is_documented():
    page = (ROOT / "docs" / "metrics.md").read_text()
    names = {value for name, value in vars(metrics).items() if name.isupper() and isinstance(value, str)}
    names = {name for name in names - {metrics.EPOCH} if name.startswith(("rollout/", "training/"))}
    prefixes = {metrics.HISTORY, metrics.LENGTHS}
    assert {name for name in names - prefixes if f"`{name}`" not in page} == set()


def test_the_simulated_tables_are_those_of_the_recorded_rows():
    page = (ROOT / "docs" / "results.md").read_text()
    assert [table in page for table in full_scale.tables(full_scale.recorded())] == [True, True]
