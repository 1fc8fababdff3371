"""Makes ``pytest.mark.xdist_group`` hold: xdist 3.8 writes a test's group into ``_nodeid``, which pytest 9.2 does not
read any more, so that groups are ignored in silence (``tests/unit/test_groups.py``)."""

import logging
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# A first example compiles, and machines are busy.
settings.register_profile("ours", deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile("ours")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
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
    yield
    logger.handlers[:], logger.propagate = before[:2]
    logger.setLevel(before[2])
