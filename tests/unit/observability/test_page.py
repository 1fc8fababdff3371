"""Page: one self-contained file with every figure for which the runs have data."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from verl_rhyme.observability import metrics as m
from verl_rhyme.observability.events import EventLog
from verl_rhyme.observability.page import document, matched, timeline
from verl_rhyme.observability.page.matched import Point
from verl_rhyme.observability.slot_time import measure
from verl_rhyme.observability.summary import read

REPLICAS, PER_STEP = 3, 24


def write_run(folder: Path, name: str, speed: float = 1.0, steps: int = 6, predicted: bool = True) -> Path:
    """Write a run of three replicas that stop while the actor trains, with two steps per epoch."""
    rng = np.random.default_rng(len(name))
    log = EventLog(folder / "events")
    log.describe(1, name, slots=12, engine="vllm test", rollout="gen")
    lines, now = [], 1.7e9
    for step in range(1, steps + 1):
        epoch = (step - 1) // 2
        tokens = np.minimum(rng.lognormal(4.5, 0.6, PER_STEP).astype(int) + 1, 400)
        started = now + rng.random(PER_STEP)
        finished = started + tokens / (20 * speed)
        collected = float(finished.max()) + 0.1
        columns: dict[str, Any] = {
            "uid": [str(k // 4) for k in range(PER_STEP)],
            "sample": np.arange(PER_STEP) % 4,
            "request": np.zeros(PER_STEP, dtype=int),
            "replica": rng.integers(0, REPLICAS, PER_STEP),
            "started_at": started,
            "finished_at": finished,
            "response_tokens": tokens,
            "predicted_tokens": [int(t * 1.3) if k % 3 and predicted else None for k, t in enumerate(tokens)],
            "drafted_tokens": tokens,
            "accepted_tokens": tokens // 2,
            "verify_steps": tokens // 4,
            "policy_version_end": step - 1,
            "reward": rng.random(PER_STEP),
            "trained": True,
            "validate": False,
        }
        log.append_requests(step, epoch, columns)
        parts = {"gen": (now, collected), "update_actor": (collected, collected + 3), "step": (now, collected + 4)}
        parts["update_weights"] = (collected + 3, collected + 4)
        log.append_stages(
            step,
            epoch,
            {
                "stage": list(parts),
                "started_at": [begin for begin, _ in parts.values()],
                "duration_s": [end - begin for begin, end in parts.values()],
            },
        )
        data = {
            m.EPOCH: epoch,
            m.REWARD_MEAN: 0.1 * step,
            **{m.TIMING + name: end - begin for name, (begin, end) in parts.items()},
            m.GEN_MS_PER_TOKEN: 1000.0 * (collected - now) / int(tokens.sum()),
            m.RESPONSE_LENGTH_MEAN: float(tokens.mean()),
            m.REQUESTS: PER_STEP,
            m.LENGTH_CORRELATION: 0.6,
        }
        lines.append(json.dumps({"step": step, "data": data}))
        now = collected + 4
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return write_run(folder / "fast", "fast", speed=2.0), write_run(folder / "slow", "slow", predicted=False)


class Checker(HTMLParser):
    """Parser that collects what a page would fetch, and checks that its elements are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.ids: list[str] = []
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        links = [str(attributes[name]) for name in ("src", "href", "xlink:href", "data") if name in attributes]
        self.fetched += [link for link in links if not link.startswith("#")]
        if attributes.get("id"):
            self.ids.append(str(attributes["id"]))
        if tag not in ("meta", "br", "link"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if self._open and self._open[-1] == tag:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def check(self, page: str) -> Checker:
        self.feed(page)
        assert self._open == []
        return self


def page_of(*folders: Path) -> str:
    return document.page([read(folder) for folder in folders], 2)


def test_the_page_is_self_contained(runs) -> None:
    page = page_of(*runs)
    checked = Checker().check(page)
    assert checked.fetched == []
    assert "@import" not in page
    assert not re.findall(r"url\((?!#)", page)
    assert len(checked.ids) == len(set(checked.ids))
    assert page == page_of(*runs), "equal runs give equal pages"


def test_every_figure_is_present_and_valid_xml(runs) -> None:
    page = page_of(*runs)
    wanted = {"lanes-1", "lanes-2", "bubbles-1", "lengths-1", "rank"}
    wanted |= {"accepted", "rate", "stages-1", "stages-2", "reward", "useful", "length", "matched"}
    assert wanted <= set(Checker().check(page).ids)
    assert "lengths-2" not in Checker().check(page).ids, "the second run has no predictions"
    pictures = re.findall(r"(<svg xmlns=.*?</svg>)(?:</div>)?<div class=\"tools\">", page, re.S)
    assert len(pictures) == page.count("<figure ")
    for picture in pictures:
        root = ElementTree.fromstring(picture)
        assert root.find("{*}title") is not None
        numbers = [
            v for e in root.iter() for k, v in e.attrib.items() if k in ("x", "y", "width", "height", "cx", "cy")
        ]
        assert not [v for v in numbers if not np.isfinite(float(v))]


def test_numbers_agree_with_the_log(runs) -> None:
    run = read(runs[0])
    assert run.slot_time is not None
    page = page_of(runs[0])
    shares = [f"{share:.1%}" for share in run.slot_time.rollout_shares]
    assert "".join(f"<td>{share}</td>" for share in shares) in page
    assert sum(run.slot_time.shares) == pytest.approx(1.0)


def test_a_lane_is_filled_as_high_as_its_busy_slots() -> None:
    """One request runs in two slots; the lane is 110 high."""
    requests = {"step": [1], "replica": [0], "started_at": [0.0], "finished_at": [10.0], "validate": [False]}
    stages: dict[str, list[Any]] = {"step": [], "stage": [], "started_at": [], "duration_s": []}
    measured = measure(*({k: np.array(v) for k, v in each.items()} for each in (requests, stages)), 2, runs_on=False)
    assert measured is not None
    picture = timeline.draw(measured, "title", measured.ended)
    assert 'd="M0 110V55H24000V110Z"' in picture
    assert ">50%</text>" in picture


def test_names_are_escaped(tmp_path) -> None:
    page = page_of(write_run(tmp_path / "run", "<script>alert(1)</script>&", steps=2))
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&amp;" in page
    Checker().check(page)


def test_a_single_step_gives_a_page(tmp_path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "data": {m.EPOCH: 0, m.REWARD_MEAN: 0.5}}) + "\n")
    Checker().check(page_of(tmp_path))


def test_the_page_of_a_large_run_is_small(tmp_path) -> None:
    """Lanes are binned, and bars and dots are limited, so the page hardly grows with requests."""
    page = page_of(write_run(tmp_path / "run", "many", steps=200))
    assert len(page) < 1_000_000


def test_speeds_are_compared_only_at_equal_lengths() -> None:
    """Shorter responses alone do not make the first run faster."""

    def curve(length: float) -> float:
        return 1e5 / length

    first = [Point(length, 2 * curve(length), 2) for length in (100, 100, 120, 60)]
    second = [Point(length, curve(length), 2) for length in (100, 120, 121, 300, 310)]
    cold = [Point(100, 1e9, 1)]
    compared = matched.match(first + cold, second + cold, 2)
    assert [(b.first, b.second) for b in compared.bins] == [(2, 1), (1, 2)]
    assert compared.ratio == pytest.approx(2.0, rel=0.02)
    assert compared.unmatched == (1, 2)
    assert matched.match(first, [Point(1000, 1.0, 2)], 2).ratio is None


def test_steps_of_one_batch_of_prompts_are_one_point() -> None:
    """In a sorted rollout, the first step includes the seconds of tokens that later steps train."""

    def step(loaded: int, seconds: float, dropped: int = 0) -> dict[str, float]:
        return {
            m.EPOCH: 1,
            m.TRAINED_TOKENS: 100,
            m.REQUESTS: 10,
            m.ROLLOUT_S: seconds,
            m.SORTED_LOADED: loaded,
            m.SORTED_DROPPED: dropped,
        }

    run = [step(8, 7.0), step(0, 1.0), step(2, 2.0, dropped=2), step(8, 4.0, dropped=1), step(1, 4.0), step(0, 2.0)]
    unfinished = [step(8, 90.0)]
    points = matched.points(dict(enumerate([*run, *unfinished], 1)))
    assert [(point.length, point.speed) for point in points] == [(10, 30.0), (10, 30.0)]
    stock = [{name: value for name, value in data.items() if "sorted" not in name} for data in run]
    assert len(matched.points(dict(enumerate(stock, 1)))) == 6


def test_a_response_is_as_long_as_all_its_requests(tmp_path) -> None:
    """One response migrates twice, one is regenerated, one runs through, and one has no prediction."""
    log = EventLog(tmp_path / "events")
    log.describe(1, "moved", slots=4)
    rows = [("a", 0, 0, 90, 10, True), ("b", 0, 0, 70, 5, False), ("a", 0, 1, 80, 20, True), ("a", 1, 0, 50, 40, True)]
    rows += [("a", 0, 2, 60, 70, True), ("b", 0, 1, 65, 60, True), ("b", 1, 0, None, 30, True)]
    names = ("uid", "sample", "request", "predicted_tokens", "response_tokens", "trained")
    columns = {name: list(values) for name, values in zip(names, zip(*rows, strict=True), strict=True)}
    times = {"started_at": np.arange(7.0), "finished_at": np.arange(7.0) + 1, "replica": 0}
    log.append_requests(1, 0, {**columns, **times, "validate": False})
    predicted, real = read(tmp_path).lengths
    assert list(zip(predicted.tolist(), real.tolist(), strict=True)) == [(90, 100), (50, 40), (65, 60)]
