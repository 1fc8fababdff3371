"""Makes ``pytest.mark.xdist_group`` hold: xdist 3.8 writes a test's group into ``_nodeid``, which pytest 9.2 does not
read any more, so that groups are ignored in silence (``tests/unit/test_groups.py``)."""

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    for item in items:
        grouped = getattr(item, "_nodeid", item.nodeid)
        if grouped != item.nodeid:
            item._id = type(item._id).parse(grouped)
