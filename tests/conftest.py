"""What all tests share: ``RHYME_SLOW``, and ``pytest.mark.xdist_group`` that holds.

A test module imports from here as ``from tests.conftest import examples``.
"""

import gc
import logging
import os
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings

from verl_rhyme import once

# A first example compiles, and machines are busy.
settings.register_profile("ours", deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile("ours")

#: ``RHYME_SLOW=1``: also what takes hours, or fails rarely. It runs weekly and before a release.
SLOW = os.environ.get("RHYME_SLOW", "") not in ("", "0")
#: Marks what runs then only.
ONLY_SLOW = pytest.mark.skipif(not SLOW, reason="runs with RHYME_SLOW=1")


def examples(usual: int, slow: int) -> int:
    """How many examples, seeds, rounds or seconds: ``slow`` of them with ``RHYME_SLOW=1``."""
    return slow if SLOW else usual


def cpu_seconds(work: Callable[[], object]) -> float:
    """Seconds of the calling thread's CPU. Threads that earlier tests left do not count, nor do collections of the
    garbage of a process that has imported everything."""
    gc.collect()
    gc.disable()
    try:
        began = time.thread_time()
        work()
        return time.thread_time() - began
    finally:
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """xdist 3.8 writes a test's group into ``_nodeid``, which pytest 9.2 does not read any more: without this, groups
    are ignored in silence (``tests/unit/test_groups.py``)."""
    for item in items:
        grouped = getattr(item, "_nodeid", item.nodeid)
        if grouped != item.nodeid:
            item._id = type(item._id).parse(grouped)


@pytest.fixture(autouse=True)
def our_logger() -> Iterator[None]:
    """caplog has its warnings: verl's server, where a test imports it, raises the root's level. And it is afterwards as
    it was: a trainer in a test's own process gives it a handler of its own."""
    logger = logging.getLogger("verl_rhyme")
    before = logger.handlers[:], logger.propagate, logger.level
    logger.setLevel(logging.WARNING)
    once._PRINTED.clear()
    yield
    logger.handlers[:], logger.propagate = before[:2]
    logger.setLevel(before[2])
