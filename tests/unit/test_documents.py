"""Links of the documents lead somewhere, pages stay short, and generated tables are those of their source."""

import re
from pathlib import Path

import pytest

from benchmarks import full_scale
from verl_rhyme.observability import metrics

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(page for folder in ("benchmarks", "recipes", "examples") for page in (ROOT / folder).rglob("*.md")),
]


def anchors(document: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(document):
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", document.read_text()):
        file, _, anchor = link.partition("#")
        target = document.parent / file if file else document
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_documents_stay_short():
    words = {page: len(page.read_text().split()) for page in (ROOT / "docs").rglob("*.md")}
    assert sum(words.values()) <= 19_000
    assert words[ROOT / "docs" / "results.md"] <= 3_000


def test_every_metric_is_documented():
    page = (ROOT / "docs" / "metrics.md").read_text()
    names = {value for name, value in vars(metrics).items() if name.isupper() and isinstance(value, str)}
    names = {name for name in names - {metrics.EPOCH} if name.startswith(("rollout/", "training/"))}
    assert {name for name in names - {metrics.HISTORY, metrics.LENGTHS} if f"`{name}`" not in page} == set()


def test_the_simulated_tables_are_those_of_the_recorded_rows():
    page = (ROOT / "docs" / "results.md").read_text()
    assert [table in page for table in full_scale.tables(full_scale.recorded())] == [True, True]
