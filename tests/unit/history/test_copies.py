"""Copies of histories on nodes without the store."""

import logging
import os
import shutil
from time import time_ns
from types import SimpleNamespace

import numpy as np
import pytest

from verl_rhyme.config import HistoryConfig
from verl_rhyme.history import history_folder, share
from verl_rhyme.history.copies import Copies, CopyReader
from verl_rhyme.history.environment import HistoryError
from verl_rhyme.history.record import PromptHistory, Trajectory, version_of
from verl_rhyme.history_writer import history_copies
from verl_rhyme.history_writer.history_copies import HistoryFetcher

KEYS = [bytes([i]) * 16 for i in range(6)]


def value(length, start=0):
    tokens = np.arange(start, start + length, dtype=np.int32)
    return PromptHistory.build([Trajectory(KEYS[0], tokens, 1.0, 0, 0, 0)]).encode()


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
    first = value(9)
    copies.put(KEYS[0], np.frombuffer(first, np.uint8), 5)
    assert reader.arrived(KEYS[0], 5)
    assert reader.get(KEYS[0]).response(0).tolist() == list(range(9))
    assert copies.outdated({KEYS[0]: 5}) == {}
    assert not reader.arrived(KEYS[0], 6)
    assert copies.outdated({KEYS[0]: 6}) == {KEYS[0]: version_of(first)}
    copies.confirm(KEYS[0], 7)
    assert reader.arrived(KEYS[0], 7)
    assert copies.outdated({KEYS[0]: 7}) == {}
    copies.put(KEYS[0], value(3, start=40), 8)
    assert reader.get(KEYS[0]).response(0).tolist() == [40, 41, 42]
    copies.put(KEYS[0], b"", 9)
    assert reader.arrived(KEYS[0], 9)
    assert reader.get(KEYS[0]) is None, "the history was deleted"
    assert copies.outdated({KEYS[0]: 10}) == {KEYS[0]: b""}


def test_least_recently_used_copies_go_first_and_the_bound_holds(copies, reader, tmp_path):
    for step, key in enumerate(KEYS[:4]):
        copies.put(key, value(2000), step)  # 2 pages each, of 8
    copies.confirm(KEYS[0], 9)
    copies.put(KEYS[4], value(2000), 9)
    assert [reader.get(key) is not None for key in KEYS[:5]] == [True, False, True, True, True]
    copies.put(KEYS[2], value(4000), 10)
    assert [reader.get(key) is not None for key in KEYS[:5]] == [True, False, True, False, True]
    held = sum(-(-os.path.getsize(tmp_path / "c" / key.hex()) // 4096) * 4096 for key in (KEYS[0], KEYS[2], KEYS[4]))
    assert held == copies._bytes == 1 << 15


def test_a_copy_removed_from_tmp_is_fetched_again(copies, tmp_path):
    copies.put(KEYS[0], value(9), 1)
    (tmp_path / "c" / KEYS[0].hex()).unlink()
    assert copies.outdated({KEYS[0]: 1}) == {KEYS[0]: b""}
    assert copies._bytes == 0
    copies.put(KEYS[0], value(9), 1)
    (tmp_path / "c" / KEYS[0].hex()).unlink()  # after it was found to be the latest
    assert not copies.confirm(KEYS[0], 2)
    assert copies._bytes == 0
    assert not copies.confirm(KEYS[0], 2), "it made room for another one before"


def test_a_folder_removed_from_tmp_is_made_again(copies, reader, tmp_path):
    for time in (1, 2):
        copies.put(KEYS[0], value(9), time)
        assert reader.get(KEYS[0]) is not None
        shutil.rmtree(tmp_path / "c")
    assert copies.outdated({KEYS[0]: 2}) == {KEYS[0]: b""}
    copies.put(KEYS[0], value(9), 3)
    assert copies.outdated({KEYS[0]: 3}) == {}
    with pytest.raises(HistoryError, match="another process writes"):
        history_folder.acquire(tmp_path / "c", None, timeout=0)


def test_a_folder_in_use_by_another_process_is_tried_again(copies, reader, tmp_path, monkeypatch):
    monkeypatch.setattr("verl_rhyme.history.copies._LOCK_TIMEOUT_S", 0.1)
    copies.put(KEYS[0], value(9), 1)
    shutil.rmtree(tmp_path / "c")
    other = Copies(tmp_path / "c", 1 << 15)
    for time in (2, 3):
        with pytest.raises(HistoryError, match="another process writes"):
            copies.put(KEYS[0], value(9), time)
    other.put(KEYS[1], value(9), 3)
    assert reader.arrived(KEYS[1], 3), "not deleted by the other one"
    other.close()
    copies.put(KEYS[0], value(9), 4)
    assert reader.arrived(KEYS[0], 4)


def test_a_lost_mark_deletes_no_copies(copies, reader, tmp_path):
    copies.put(KEYS[0], value(9), 1)
    (tmp_path / "c" / "owner.json").unlink()
    copies.put(KEYS[1], value(9), 1)
    assert reader.get(KEYS[0]) is not None


def test_a_bound_that_cannot_be_chosen_leaves_the_folder_free(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(share.shutil, "disk_usage", lambda _: (_ for _ in ()).throw(OSError("input/output error")))
        with pytest.raises(OSError, match="input/output"):
            Copies(tmp_path / "c", None)
    os.close(history_folder.acquire(tmp_path / "c", None, timeout=0))


def test_a_copy_that_is_gone_when_it_is_confirmed_is_fetched(tmp_path, monkeypatch):
    """Copies that arrive before it may have taken its room; the other prompts of the request lose nothing."""
    first, second = value(2000), value(2000, start=1)
    asked = []

    def answer(known):
        asked.append(known)
        stored = {KEYS[0]: first, KEYS[1]: second}
        return {key: None if version_of(stored[key]) == version else stored[key] for key, version in known.items()}

    monkeypatch.setattr(history_copies, "ray", SimpleNamespace(get=lambda answers, timeout: answers))
    fetcher = HistoryFetcher("node", HistoryConfig(dir=str(tmp_path), max_bytes=1 << 20))
    fetcher._writer = SimpleNamespace(values=SimpleNamespace(options=lambda **_: SimpleNamespace(remote=answer)))
    fetcher.fetch({KEYS[0]: 1})
    monkeypatch.setattr(fetcher._copies, "_bound", 12 << 10)
    later = time_ns() + (1 << 40)
    fetcher.fetch({KEYS[1]: later, KEYS[0]: later})
    assert asked[1:] == [{KEYS[1]: b"", KEYS[0]: version_of(first)}, {KEYS[0]: b""}]
    assert CopyReader(fetcher._copies._path).arrived(KEYS[0], later)
    fetcher.close()


def test_a_value_larger_than_the_bound_counts_as_no_history(copies, reader, caplog):
    copies.put(KEYS[0], value(9), 1)
    with caplog.at_level(logging.WARNING):
        copies.put(KEYS[1], bytes((1 << 15) + 1), 2)
    assert reader.arrived(KEYS[1], 2)
    assert reader.get(KEYS[1]) is None
    assert reader.get(KEYS[0]) is not None
    assert "larger than" in caplog.text


def test_a_full_disk_leaves_the_copy_unchanged(copies, reader, monkeypatch, tmp_path):
    copies.put(KEYS[0], value(9), 1)
    with monkeypatch.context() as full:
        full.setattr(os, "utime", lambda *_, **__: (_ for _ in ()).throw(OSError("no space left on device")))
        with pytest.raises(OSError, match="no space"):
            copies.put(KEYS[0], value(5), 2)
    assert not reader.arrived(KEYS[0], 2)
    assert len(reader.get(KEYS[0]).response(0)) == 9
    assert not [file for file in (tmp_path / "c").iterdir() if file.name.startswith(f".{KEYS[0].hex()}")]
    copies.put(KEYS[0], value(5), 2)
    assert copies.outdated({KEYS[0]: 2}) == {}


@pytest.mark.parametrize("harm", [lambda v: v[:-1], lambda v: v[:40] + b"?" + v[41:], lambda v: b"?"])
def test_a_damaged_copy_counts_as_no_history_and_warns_once(copies, reader, caplog, harm):
    with caplog.at_level(logging.WARNING):
        for turn in (1, 2):
            copies.put(KEYS[0], harm(value(9)), turn)
            assert reader.get(KEYS[0]) is None
            assert reader.errors == turn
    assert caplog.text.count("logged once") == 1


def test_one_writer_and_files_of_a_dead_writer_are_deleted(copies, reader, tmp_path, monkeypatch):
    monkeypatch.setattr("verl_rhyme.history.copies._LOCK_TIMEOUT_S", 0.1)
    with pytest.raises(HistoryError, match="another process writes"):
        Copies(tmp_path / "c", 1 << 15)
    copies.put(KEYS[0], value(9), 1)
    os.close(copies._lock)  # like the death of the process
    copies._lock = None
    again = Copies(tmp_path / "c", None)
    assert reader.get(KEYS[0]) is None
    assert again.outdated({KEYS[0]: 1}) == {KEYS[0]: b""}
    again.close()
    assert not (tmp_path / "c").exists()
