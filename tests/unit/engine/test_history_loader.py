"""Background loading of histories."""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from tests.unit.history.stores import NAMESPACE, open_store, trajectory, value
from tests.unit.history.stores import key as key_of
from verl_rhyme.engine import history_loader
from verl_rhyme.engine.history_loader import HistoryLoader
from verl_rhyme.history.copies import Copies, CopyReader
from verl_rhyme.history.reader import HistoryReader

KEYS = [key_of(i) for i in range(60)]


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.002)


def wait_for(loader):
    found = []
    until(lambda: found.extend(loader.ready()) or found)
    return found


@pytest.fixture
def reader(tmp_path):
    rng = np.random.default_rng(0)
    with open_store(tmp_path / "h") as store:
        store.append([trajectory(i, rng.integers(0, 99, 50)) for i in range(59)], 0)
    return HistoryReader(tmp_path / "h", NAMESPACE)


def test_requested_histories_arrive_as_stored(reader, tmp_path):
    loader = HistoryLoader(reader)
    assert [loader.get(key) for key in KEYS] == [None] * len(KEYS)
    found = {}
    while len(found) < len(KEYS):
        found |= dict(wait_for(loader))
    assert loader.pending == 0
    assert loader.errors == 0
    direct = HistoryReader(tmp_path / "h", NAMESPACE)
    blocking = HistoryLoader(reader, wait=True)
    for key, history in found.items():
        expected = direct.get(key)
        assert (history is None) == (expected is None) == (blocking.get(key) is None) == (key == KEYS[-1])
        if history is not None:
            assert (history.tokens == expected.tokens).all()
            assert "first_tokens" in vars(history), "made by the thread"
            loader.release(key, history)
    assert blocking.pending == 0


def test_released_history_is_not_read():
    asked, leave = [], threading.Event()

    def get(key):
        asked.append(key)
        assert leave.wait(20)

    loader = HistoryLoader(SimpleNamespace(get=get, errors=0))
    for key in KEYS[:3]:
        loader.get(key)
    until(lambda: asked == KEYS[:1])
    loader.release(KEYS[0], None)  # while it is read
    loader.release(KEYS[1], None)
    leave.set()
    assert [key for key, _ in wait_for(loader)] == [KEYS[2]]
    assert asked == [KEYS[0], KEYS[2]]
    assert loader.pending == 0


def test_error_gives_no_history_a_count_and_one_warning(caplog):
    loader = HistoryLoader(SimpleNamespace(get=lambda key: 1 / 0, errors=0))
    for turn in (1, 2):
        loader.get(KEYS[3])
        assert wait_for(loader) == [(KEYS[3], None)]
        assert loader.errors == turn
    assert sum("cannot read a prompt's history" in record.message for record in caplog.records) == 1


def test_prompts_beyond_the_memory_wait_until_others_are_released(reader, caplog):
    loader = HistoryLoader(reader, max_bytes=3000)
    for key in KEYS[:9]:
        loader.get(key)
    live, done = {}, []
    while len(done) < 9:
        found = dict(wait_for(loader))
        time.sleep(0.05)
        found |= dict(loader.ready())
        live |= {key: history.nbytes for key, history in found.items()}
        done += found
        assert sum(live.values()) < 3000 + max(live.values())
        loader.release(next(iter(live)), None)
        del live[next(iter(live))]
    assert sorted(done) == KEYS[:9]
    assert loader.pending == 0
    assert sum("decoded histories take" in record.message for record in caplog.records) == 1


def test_a_released_prompt_holds_no_memory_even_while_it_is_read(reader):
    loader = HistoryLoader(reader, max_bytes=1)
    for _ in range(50):
        loader.get(KEYS[0])
        loader.release(KEYS[0], None)
    loader.get(KEYS[1])
    assert [key for key, history in wait_for(loader) if history is not None] == [KEYS[1]]


# ---- copies from another node ----


@pytest.fixture
def copies(tmp_path):
    opened = Copies(tmp_path / "copies", 1 << 24)
    yield opened
    opened.close()


@pytest.fixture
def copy_reader(tmp_path):
    return CopyReader(tmp_path / "copies")


def test_missing_copy_stays_pending_and_does_not_delay_others(reader, copies, copy_reader):
    loader = HistoryLoader(reader, copies=copy_reader)
    copies.put(KEYS[0], value([7]), 10)
    loader.expect(KEYS[0], 20)  # the present copy is older
    assert loader.get(KEYS[0]) is None
    assert loader.get(KEYS[1]) is None  # recorded here
    assert [(key, len(found.response(0))) for key, found in wait_for(loader)] == [(KEYS[1], 50)]
    loader.expect(KEYS[2], 20)
    assert loader.get(KEYS[2]) is None
    copies.put(KEYS[2], b"", 25)
    assert wait_for(loader) == [(KEYS[2], None)]
    assert loader.pending == 1
    copies.put(KEYS[0], value([8]), 20)
    assert [(key, found.response(0).tolist()) for key, found in wait_for(loader)] == [(KEYS[0], [8])]
    assert loader.errors == 0
    loader.expect(KEYS[3], 20)
    loader.get(KEYS[3])
    loader.release(KEYS[3], None)
    assert not loader.pending
    assert loader.get(KEYS[3]) is None, "a later request may find it on its own node"
    assert len(wait_for(loader)[0][1].response(0)) == 50


def test_blocking_mode_waits_for_a_copy_until_the_timeout(reader, copies, copy_reader, monkeypatch):
    loader = HistoryLoader(reader, wait=True, copies=copy_reader)
    loader.expect(KEYS[0], 20)
    late = threading.Timer(0.2, copies.put, (KEYS[0], value([8]), 20))
    late.start()
    assert loader.get(KEYS[0]).response(0).tolist() == [8]
    late.join()
    monkeypatch.setattr(history_loader, "_COPY_TIMEOUT_S", 0.1)
    loader.expect(KEYS[1], 20)
    assert loader.get(KEYS[1]) is None
