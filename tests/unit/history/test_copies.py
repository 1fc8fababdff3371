"""Copies of histories on nodes without the store."""

import os
import shutil
from time import time_ns
from types import SimpleNamespace

import numpy as np
import pytest

from tests.unit.history.stores import failing, key, value
from verl_rhyme.config import HistoryConfig
from verl_rhyme.history import history_folder, share
from verl_rhyme.history.copies import Copies, CopyReader
from verl_rhyme.history.environment import HistoryError
from verl_rhyme.history.record import version_of
from verl_rhyme.history_writer import history_copies
from verl_rhyme.history_writer.history_copies import HistoryFetcher, node_copies_dir

KEYS = [key(i) for i in range(6)]


@pytest.fixture
def copies(tmp_path):
    opened = Copies(tmp_path / "c", 1 << 15)
    yield opened
    opened.close()


@pytest.fixture
def reader(tmp_path):
    return CopyReader(tmp_path / "c")


def test_a_copy_has_arrived_once_it_is_as_recent_as_the_request(copies, reader):
    assert copies.outdated({KEYS[0]: 5}) == {KEYS[0]: b""}
    assert not reader.arrived(KEYS[0], 5)
    assert reader.get(KEYS[0]) is None
    first = value(range(9))
    copies.put(KEYS[0], np.frombuffer(first, np.uint8), 5)
    assert reader.arrived(KEYS[0], 5)
    assert reader.get(KEYS[0]).response(0).tolist() == list(range(9))
    assert copies.outdated({KEYS[0]: 5}) == {}
    assert not reader.arrived(KEYS[0], 6)
    assert copies.outdated({KEYS[0]: 6}) == {KEYS[0]: version_of(first)}
    assert copies.confirm(KEYS[0], 7)
    assert reader.arrived(KEYS[0], 7)
    assert copies.outdated({KEYS[0]: 7}) == {}
    copies.put(KEYS[0], value([40, 41]), 8)
    assert reader.get(KEYS[0]).response(0).tolist() == [40, 41]
    copies.put(KEYS[0], b"", 9)
    assert reader.arrived(KEYS[0], 9)
    assert reader.get(KEYS[0]) is None, "the history was deleted"
    assert copies.outdated({KEYS[0]: 10}) == {KEYS[0]: b""}


def test_least_recently_used_copies_go_first_and_the_bound_holds(copies, reader, tmp_path):
    for step, each in enumerate(KEYS[:4]):
        copies.put(each, value(range(2000)), step)  # 2 pages each, of 8
    copies.confirm(KEYS[0], 9)
    copies.put(KEYS[4], value(range(2000)), 9)
    assert [reader.get(each) is not None for each in KEYS[:5]] == [True, False, True, True, True]
    copies.put(KEYS[2], value(range(4000)), 10)
    assert [reader.get(each) is not None for each in KEYS[:5]] == [True, False, True, False, True]
    held = sum(-(-os.path.getsize(tmp_path / "c" / KEYS[i].hex()) // 4096) * 4096 for i in (0, 2, 4))
    assert held == copies._bytes == 1 << 15
    copies.put(KEYS[1], bytes((1 << 15) + 1), 11)
    assert reader.arrived(KEYS[1], 11), "a value larger than the bound counts as no history"
    assert reader.get(KEYS[1]) is None
    assert not copies.confirm(KEYS[0], 12), "gone meanwhile"


def test_a_bound_that_cannot_be_chosen_leaves_the_folder_free(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(share.shutil, "disk_usage", failing(OSError("input/output error")))
        with pytest.raises(OSError, match="input/output"):
            Copies(tmp_path / "c", None)
    os.close(history_folder.acquire(tmp_path / "c", None, timeout=0))


def test_a_damaged_copy_counts_as_no_history_and_warns_once(copies, reader, caplog):
    for turn, damaged in enumerate((b"?", value(range(9))[:-1])):
        copies.put(KEYS[0], damaged, turn)
        assert reader.get(KEYS[0]) is None
        assert reader.errors == turn + 1
    assert caplog.text.count("logged once") == 1


def test_one_writer_and_files_of_a_dead_writer_are_deleted(copies, reader, tmp_path, monkeypatch):
    monkeypatch.setattr("verl_rhyme.history.copies._LOCK_TIMEOUT_S", 0.1)
    with pytest.raises(HistoryError, match="another process writes"):
        Copies(tmp_path / "c", 1 << 15)
    copies.put(KEYS[0], value(range(9)), 1)
    os.close(copies._lock)  # like the death of the process
    copies._lock = None
    again = Copies(tmp_path / "c", None)
    assert reader.get(KEYS[0]) is None
    assert again.outdated({KEYS[0]: 1}) == {KEYS[0]: b""}
    again.close()
    assert not (tmp_path / "c").exists()


# ---- fetched copies ----


@pytest.fixture
def stored(monkeypatch):
    """Values by key; ``stored[None]`` lists the requests to the history writer."""
    values = {None: []}

    def answer(known):
        values[None].append(known)
        return {each: None if version_of(values[each]) == version else values[each] for each, version in known.items()}

    writer = SimpleNamespace(values=SimpleNamespace(options=lambda **_: SimpleNamespace(remote=answer)))
    ray = SimpleNamespace(get=lambda answers, timeout: answers, get_actor=lambda name: writer)
    monkeypatch.setattr(history_copies, "ray", ray)
    return values


def fetcher_of(folder):
    config = HistoryConfig(dir=str(folder), max_bytes=1 << 20)
    return HistoryFetcher("node", config), CopyReader(node_copies_dir(str(folder), "node"))


def test_a_copy_that_is_gone_when_it_is_confirmed_is_fetched(tmp_path, stored, monkeypatch):
    """Copies that arrive before it may have taken its room; the other prompts of the request lose nothing."""
    stored |= {KEYS[0]: value(range(2000)), KEYS[1]: value(range(1, 2000))}
    fetcher, reader = fetcher_of(tmp_path)
    fetcher.fetch({KEYS[0]: 1})
    monkeypatch.setattr(fetcher._copies, "_bound", 12 << 10)
    later = time_ns() + (1 << 40)
    fetcher.fetch({KEYS[1]: later, KEYS[0]: later})
    assert stored[None][1:] == [{KEYS[1]: b"", KEYS[0]: version_of(stored[KEYS[0]])}, {KEYS[0]: b""}]
    assert reader.arrived(KEYS[0], later)
    fetcher.close()


@pytest.mark.parametrize("fault", ["a deleted copy", "a deleted folder", "a full disk"])
def test_a_node_whose_copies_are_lost_fetches_them_again(tmp_path, stored, monkeypatch, fault):
    stored |= {each: value(range(9)) for each in KEYS[:2]}
    fetcher, reader = fetcher_of(tmp_path)
    fetcher.fetch({KEYS[0]: 1})
    folder = fetcher._copies._path
    if fault == "a deleted copy":
        (folder / KEYS[0].hex()).unlink()
    else:
        with monkeypatch.context() as patch:
            if fault == "a full disk":
                patch.setattr(os, "utime", failing(OSError("no space left on device")))
            else:
                shutil.rmtree(folder)
            with pytest.raises(OSError, match=r"no space|No such file"):
                fetcher.fetch({KEYS[1]: 2})
    later = time_ns()
    fetcher.fetch(dict.fromkeys(KEYS[:2], later))
    assert [len(reader.get(each).response(0)) for each in KEYS[:2]] == [9, 9]
    assert all(reader.arrived(each, later) for each in KEYS[:2])
    fetcher.close()
    assert not folder.exists()
