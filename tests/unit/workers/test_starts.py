"""Samples that cannot be started: again and again is the end of the run, now and then is not."""

from types import SimpleNamespace

import pytest

from verl_rhyme.scheduling.attempts import Ended
from verl_rhyme.workers import coordinator as module
from verl_rhyme.workers.coordinator import Coordinator


@pytest.fixture
def watch(monkeypatch):
    """Gives the coordinator's error after reports at these seconds: (when, status)."""

    def after(*reports):
        built = object.__new__(Coordinator)
        built._losing = built._error = None
        for when, status in reports:
            loop = SimpleNamespace(time=lambda when=when: when)
            monkeypatch.setattr(module.asyncio, "get_running_loop", lambda loop=loop: loop)
            built._watch_starts(Ended("a_0", status, error="no queue"))
        return built._error

    return after


def test_for_minutes_without_a_start_that_holds_ends_the_run(watch):
    error = watch(*((10.0 * i, "lost") for i in range(20)))
    assert "no sample could be started for 180 s; the latest error: no queue" in str(error)


def test_what_starts_in_between_or_long_after_does_not(watch):
    assert watch(*((10.0 * i, "generated" if i == 10 else "lost") for i in range(25))) is None
    assert watch((0.0, "lost"), (240.0, "lost"), (500.0, "lost")) is None, "hundreds may have started, and told nothing"
