"""Page: one self-contained file with every figure for which the runs have data."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.unit.observability.logged_run import stock, write_metrics, write_run
from verl_rhyme.observability import metrics as m
from verl_rhyme.observability.page import document, matched, timeline
from verl_rhyme.observability.page.matched import Point
from verl_rhyme.observability.run import read
from verl_rhyme.observability.slot_time import measure


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return write_run(folder / "fast", "fast"), write_run(folder / "slow", "slow", slower=2.0)


def page_of(*folders: Path) -> str:
    """Return the page of one run or two; each element is closed, and no two figures share a name."""
    page = document.page([read(folder) for folder in folders])
    body = page.partition("<script>")[0]
    for element in ("div", "figure", "table", "tr", "td", "p", "ul", "li", "dl", "dd", "svg", "g", "text", "main"):
        assert len(re.findall(rf"<{element}[ >]", body)) == body.count(f"</{element}>"), element
    names = re.findall(r'<figure id="(.*?)"', page)
    assert len(names) == len(set(names))
    return page


def test_every_figure_is_present_and_valid_xml(runs) -> None:
    page = page_of(*runs)
    assert not re.findall(r"(?:src|href|data)=\"(?!#)|@import|url\((?!#)", page), "it is not self-contained"
    assert page == page_of(*runs), "equal runs give equal pages"
    wanted = {"lanes-1", "lanes-2", "bubbles-1", "bubbles-2", "rank", "accepted", "rate"}
    wanted |= {"stages-1", "stages-2", "reward", "useful", "length"}
    assert set(re.findall(r'<figure id="(.*?)"', page)) == wanted
    assert "<b>fast generates 2.00 times the tokens per second of slow</b>" in page
    pictures = re.findall(r"(<svg xmlns=.*?</svg>)(?:</div>)?<div class=\"tools\">", page, re.S)
    assert len(pictures) == page.count("<figure ")
    for picture in pictures:
        root = ElementTree.fromstring(picture)
        assert root.find("{*}title") is not None
        numbers = [
            v for e in root.iter() for k, v in e.attrib.items() if k in ("x", "y", "width", "height", "cx", "cy")
        ]
        assert not [v for v in numbers if not np.isfinite(float(v))]


def test_shares_are_those_of_the_log(runs) -> None:
    measured = read(runs[0]).slot_time
    assert measured is not None
    assert "".join(f"<td>{share:.1%}</td>" for share in measured.rollout_shares) in page_of(runs[0])


def test_a_lane_is_filled_as_high_as_its_busy_slots() -> None:
    """One request runs in two slots; the lane is 110 high."""
    times = {"queued_at": [0.0], "started_at": [0.0], "finished_at": [10.0]}
    of = {"uid": ["a"], "sample": [0], "trained": [True], "validate": [False], "stop_reason": ["completed"]}
    requests = {"step": [1], "replica": [0], **times, **of}
    stages = {"step": [1], "stage": ["gen"], "started_at": [0.0], "duration_s": [10.0]}
    measured = measure(*({k: np.array(v) for k, v in each.items()} for each in (requests, stages)), 2, runs_on=False)
    assert measured is not None
    picture = timeline.draw(measured, "title", measured.ended)
    assert 'd="M0 110V55H24000V110Z"' in picture
    assert ">50%</text>" in picture


def test_samples_in_tools_are_drawn_above_the_busy_slots() -> None:
    """In two slots, one sample runs, calls a tool from 4 to 6 and returns, while another one runs."""
    times = {"queued_at": [0.0, 6.0, 0.0], "started_at": [0.0, 6.0, 0.0], "finished_at": [4.0, 10.0, 10.0]}
    of = {"uid": ["a", "a", "b"], "sample": [0] * 3, "trained": [True] * 3, "stop_reason": ["completed"] * 3}
    requests = {"step": [1] * 3, "replica": [0] * 3, **times, **of, "validate": [False] * 3}
    stages = {"step": [1], "stage": ["gen"], "started_at": [0.0], "duration_s": [10.0]}
    measured = measure(*({k: np.array(v) for k, v in each.items()} for each in (requests, stages)), 2, runs_on=False)
    assert measured is not None
    picture = timeline.draw(measured, "title", measured.ended)
    assert 'class="r-tool" d="M0 110V0H24000V110Z"' in picture
    assert 'class="r-busy" d="M0 110V0H9600V55H14400V0H24000V110Z"' in picture
    assert "r-tool" in timeline.legend()


def test_names_are_escaped(tmp_path) -> None:
    page = page_of(write_run(tmp_path / "run", "<script>alert(1)</script>&", steps=2))
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&amp;" in page


def test_the_page_shows_staleness_in_its_table_and_a_curve(tmp_path) -> None:
    pages = []
    for stale in (0, 1):
        row = stock(1, 0, **{m.STALENESS_MEAN: 0.75 * stale, m.STALENESS_MAX: 2.0 * stale})
        pages.append(page_of(write_metrics(tmp_path, [row])))
    assert "<td>0.75</td><td>2</td>" in pages[1]
    assert ['id="staleness"' in page for page in pages] == [False, True], "on-policy runs have no curve"


def test_the_page_of_a_large_run_is_small(tmp_path) -> None:
    """Lanes are binned, and bars and dots are limited, so the page hardly grows with requests."""
    page = page_of(write_run(tmp_path / "run", "many", steps=200))
    assert len(page) < 1_000_000


def test_speeds_are_compared_only_at_equal_lengths() -> None:
    """Shorter responses alone do not make the first run faster."""
    first = [Point(length, 2e5 / length, 2) for length in (100, 100, 120, 60)]
    second = [Point(length, 1e5 / length, 2) for length in (100, 120, 121, 300, 310)]
    cold = [Point(100, 1e9, 1)]
    bins = matched.match(first + cold, second + cold, 2)
    assert [(b.first, b.second) for b in bins] == [(2, 1), (1, 2)]
    assert matched.mean_ratio(bins) == pytest.approx(2.0, rel=0.02)
    assert matched.match(first, [Point(1000, 1.0, 2)], 2) == []


def test_steps_of_one_batch_of_prompts_are_one_point() -> None:
    """In a sorted rollout, the first step includes the seconds of tokens that later steps train."""

    def step(loaded: int, seconds: float, dropped: int = 0) -> dict[str, float]:
        same = {m.EPOCH: 1, m.TRAINED_TOKENS: 100, m.REQUESTS: 10}
        return {**same, m.ROLLOUT_S: seconds, m.LOADED_PROMPTS: loaded, m.DROPPED_PROMPTS: dropped}

    run = [step(8, 7.0), step(0, 1.0), step(2, 2.0, dropped=2), step(8, 4.0, dropped=1), step(1, 4.0), step(0, 2.0)]
    unfinished = [step(8, 90.0)]
    points = matched.points(dict(enumerate([*run, *unfinished], 1)))
    assert [(point.length, point.speed) for point in points] == [(10, 30.0), (10, 30.0)]
    stock = [{name: value for name, value in data.items() if "rollout/prompts/" not in name} for data in run]
    assert len(matched.points(dict(enumerate(stock, 1)))) == 6
