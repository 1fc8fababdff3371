"""The store with a damaged file, a full disk, a killed writer, and concurrent readers in other processes."""

import errno
import itertools
import logging
import multiprocessing
import os
import random
import resource
import shutil
import sys
import time
from functools import partial
from multiprocessing.sharedctypes import RawValue

import pytest
from lmdb import verify

from tests.conftest import examples
from tests.unit.history.stores import NAMESPACE, failing, key, kill, open_store, read, responses, trajectory
from verl_rhyme.history import environment, history_folder
from verl_rhyme.history.environment import HistoryError
from verl_rhyme.history.reader import HistoryReader
from verl_rhyme.history.record import PromptHistory
from verl_rhyme.history.values import Values

pytestmark = pytest.mark.slow  # one process per damage


def start(function, *arguments):
    """Start a process. No environment of the same folder may be open here."""
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    return process


def outcome(capfd, function, path):
    """Return the output and log of a process, which must end well."""

    def logging_to_stdout():
        logging.basicConfig(level=logging.WARNING, stream=sys.stdout, force=True)
        function(path)

    process = start(logging_to_stdout)
    process.join()
    output = "".join(capfd.readouterr())
    assert process.exitcode == 0, output
    return output


# ---- damage ----


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    path = tmp_path_factory.mktemp("sound") / "h"
    with open_store(path) as store:
        for step in range(4):
            store.append([trajectory(i, range(step, step + 300 + 10 * i), epoch=step) for i in range(30)], step)
    [data] = path.glob("env-*/data.mdb")
    return data.read_bytes()


def damaged_copy(path, data):
    with open_store(path):
        pass
    [file] = path.glob("env-*/data.mdb")
    file.write_bytes(data)


def shortened(data, share):
    return data[: int(share * len(data))]


def use(path):
    """Do everything that a run does."""
    reader = HistoryReader(path, NAMESPACE, refresh_interval=0.0)
    first = sum(reader.get(key(i)) is not None for i in range(30))
    with open_store(path) as store:
        for step in range(4, 8):
            stats = store.append([trajectory(i, range(500), epoch=step) for i in range(30)], step)
            assert stats.trajectories == 30, stats
            assert not stats.dropped, stats
        store.snapshot(f"{path}.snapshot")
        assert store.restore(f"{path}.snapshot")
        assert all(reader.get(key(i)).response(0).tolist() == list(range(500)) for i in range(30))
    print("read", first)


@pytest.mark.parametrize("share", [0, 0.5, 1])
def test_a_truncated_file_starts_empty(tmp_path, sound, share, capfd):
    damaged_copy(tmp_path / "h", shortened(sound, share))
    output = outcome(capfd, use, tmp_path / "h")
    assert output.endswith("read 30\n" if share == 1 else "read 0\n")
    assert ("damaged and starts empty" in output) == (share < 1)


def flips(seed, sound):
    rng = random.Random(seed)
    data = bytearray(sound)
    # Many or few bytes, anywhere or in the tree structure: the first pages and each page's header.
    for _ in range(rng.choice([1, 3, 100])):
        page = rng.randrange(len(data) // 4096)
        where = rng.choice([rng.randrange(len(data)), page * 4096 + rng.randrange(32), rng.randrange(8192)])
        data[where] ^= rng.randrange(1, 256)
    return bytes(data)


def test_a_file_without_the_end_of_a_large_value_does_not_crash_a_run(tmp_path, capfd):
    """The page verification does not see it, and LMDB would map pages beyond the end of the file."""
    with open_store(tmp_path / "h") as store:
        for step in range(30):
            store.append([trajectory(step, range(9000))], step)
            [file] = (tmp_path / "h").glob("env-*/data.mdb")
            (tmp_path / "cut").write_bytes(file.read_bytes()[:-20_480])
            if not verify.verify(str(tmp_path / "cut")):
                break
    file.write_bytes((tmp_path / "cut").read_bytes())
    assert outcome(capfd, use, tmp_path / "h").endswith(f"read {step}\n"), "all but one"


@pytest.mark.parametrize("seed", range(examples(6, slow=12)))
def test_flipped_bytes_never_crash_a_run(tmp_path, sound, seed, capfd):
    damaged_copy(tmp_path / "h", flips(seed, sound))
    outcome(capfd, use, tmp_path / "h")


def test_a_damaged_value_reads_as_no_history_and_is_counted(tmp_path, caplog):
    """The page verification cannot see damage inside a value; the value's checksum does."""
    with open_store(tmp_path / "h") as store:
        for epoch in (0, 1):
            store.append([trajectory(i, range(8000), epoch) for i in range(30)], step=epoch)
        env = store._values.opened
        with env.env.begin(write=True, db=env.prompts) as txn:
            for i in range(30):
                value = bytearray(txn.get(key(i)))
                value[-1] ^= 1
                txn.put(key(i), bytes(value))
        reader = HistoryReader(tmp_path / "h", NAMESPACE)
        assert all(reader.get(key(i)) is None for i in range(30))
        assert reader.errors == 30
        assert [record.name for record in caplog.records] == ["verl_rhyme.history.reader"]
        assert store.append([trajectory(1, [7], epoch=9)], step=9).trajectories == 1
        assert responses(reader.get(key(1))) == [[7]]
        for step in range(10, 14):  # eviction deletes them
            new = [trajectory(i, range(8000), 2) for i in range(30 * step, 30 * step + 30)]
            assert store.append(new, step).dropped == 0
        assert 0 < store.stats()["bytes"] <= 0.7 * (8 << 20)
        reader.close()


@pytest.mark.parametrize("share", [None, 0.0, 0.5], ids=["missing", "empty", "truncated"])
def test_a_damaged_snapshot_keeps_the_present_history(tmp_path, sound, share, caplog):
    snapshot = tmp_path / "snapshot"
    if share is not None:
        snapshot.mkdir()
        (snapshot / "data.mdb").write_bytes(shortened(sound, share))
    with open_store(tmp_path / "h") as store:
        store.append([trajectory(1, [5])], step=1)
        assert not store.restore(snapshot)
        assert store.append([trajectory(1, [6], epoch=1)], step=2).trajectories == 1
    assert read(tmp_path / "h") == [[5], [6]]
    assert len(list((tmp_path / "h").glob("env-*"))) == 1
    assert f"the history in {snapshot} is not restored" in caplog.text


# ---- a full disk ----


def fill_the_disk(path):
    """A resource limit stops all files of the writer at 400 kB."""

    def step(number):
        return store.append([trajectory(i, range(9000)) for i in range(100)], number)

    store, reader = open_store(path, 64 << 20), HistoryReader(path, NAMESPACE)
    store.append([trajectory(i, range(1000)) for i in range(10)], 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, resource.RLIM_INFINITY))
    for number in range(2, 5):
        assert (step(number).dropped, store.stats()["prompts"]) == (100, 10)
    assert all(len(reader.get(key(i))) == 1 for i in range(10))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert step(5).trajectories == 100
    assert (len(reader.get(key(0))), reader.errors) == (2, 0)


def test_a_full_disk_is_a_warning_and_loses_nothing(tmp_path, capfd):
    assert outcome(capfd, fill_the_disk, tmp_path / "h").count("a step is not recorded") == 1


@pytest.mark.parametrize(
    ("owner", "call", "error"),
    [(Values, "_copy", OSError(errno.ENOSPC, "No space left on device")), (PromptHistory, "encode", MemoryError())],
)
def test_a_step_that_fails_is_lost_alone(tmp_path, monkeypatch, owner, call, error):
    """The map is full: the step needs a copy of the history, which may not fit on the disk."""

    def batch(i, n, epoch):
        return [trajectory(j, range(7000), epoch) for j in range(i, i + n)]

    with open_store(tmp_path / "h", 2 << 20, epochs=1) as store:
        for step in range(8):  # the second epoch takes new pages before it frees the first one's
            assert store.append(batch(step % 4 * 10, 10, step // 4), step).trajectories == 10
        before = store.stats()
        with monkeypatch.context() as full:
            full.setattr(owner, call, failing(error))
            stats = store.append(batch(0, 20, 2), 8)
        assert (stats.lost_steps, stats.trajectories, stats.evicted, stats.dropped) == (1, 0, 0, 20)
        assert store.stats() == before
        assert len(list((tmp_path / "h").glob("env-*"))) == 1, "no partial copy"
        assert store.append(batch(0, 20, 3), 9).trajectories == 20


# ---- other processes ----


def tokens(step, i):
    return [step] * (500 + 37 * i % 900)


def write_forever(path, first, max_bytes, recorded):
    with open_store(path, max_bytes) as store:
        for step in itertools.count(first):
            store.append([trajectory(i, tokens(step, i), epoch=step) for i in range(50)], step)
            recorded.value = step


@pytest.mark.parametrize("max_bytes", [8 << 20, 1 << 20], ids=["roomy", "full, so that it is rewritten all the time"])
def test_a_writer_killed_at_any_moment_leaves_complete_steps(tmp_path, caplog, max_bytes):
    rng = random.Random(0)
    path, recorded, last = tmp_path / "h", RawValue("l", 0), 0
    for _ in range(examples(4, slow=8)):
        process = start(write_forever, path, last + 1, max_bytes, recorded)
        while recorded.value <= last:
            assert process.is_alive()
        time.sleep(rng.random() * 0.2)
        process.kill()
        process.join()
        steps = []
        with open_store(path, max_bytes) as store:
            reader = HistoryReader(path, NAMESPACE)
            for history in filter(None, (reader.get(key(i)) for i in range(50))):
                steps.append(int(history.step[-1]))
                assert set(history.response(len(history) - 1).tolist()) == {steps[-1]}
            assert reader.errors == 0
            assert len(steps) == store.stats()["prompts"]
            reader.close()
        last = max(steps)
        assert last >= recorded.value
        assert max_bytes < 8 << 20 or steps == [last] * 50
    assert "damaged" not in caplog.text


def read_changes(path):
    reader = HistoryReader(path, NAMESPACE, refresh_interval=0.01)
    last, changes = dict.fromkeys(range(20), 0), 0
    while changes < 1000:
        for i in last:
            history = reader.get(key(i))
            if history is not None:
                newest = history.response(len(history) - 1).tolist()
                assert newest == tokens(newest[0], i)
                assert history.step[-1] == newest[0] >= last[i]
                changes += newest[0] > last[i]
                last[i] = newest[0]
    assert reader.errors == 0


def test_processes_read_while_one_writes(tmp_path):
    path = tmp_path / "h"
    readers = [start(read_changes, path) for _ in range(3)]
    with open_store(path, max_bytes=1 << 20) as store:
        deadline = time.monotonic() + 120
        for step in itertools.count(1):
            batch = [trajectory(i, tokens(step, i), epoch=step) for i in range(20)]
            assert store.append(batch, step).trajectories == 20
            if step % 40 == 0:  # replace the environment while others read
                store.snapshot(tmp_path / "snapshot")
                assert store.restore(tmp_path / "snapshot")
            if time.monotonic() > deadline or not any(process.is_alive() for process in readers):
                break
    for process in readers:
        process.kill()
        process.join()
    assert [process.exitcode for process in readers] == [0, 0, 0]


def hold_a_view(path, holding):
    reader = HistoryReader(path, NAMESPACE, refresh_interval=0.0)
    while reader.get(key(0)) is None:
        time.sleep(0.01)
    view = reader._environment.env.begin()
    holding.value = view.id()
    time.sleep(600)


def test_killed_readers_do_not_make_the_file_grow(tmp_path):
    path, holding = tmp_path / "h", RawValue("l", 0)
    process = start(hold_a_view, path, holding)
    with open_store(path, max_bytes=64 << 20) as store:
        store.append([trajectory(i, range(2000)) for i in range(20)], 0)
        while not holding.value:
            assert process.is_alive()
        process.kill()
        process.join()
        sizes = []
        for step in range(1, 40):
            store.append([trajectory(i, range(2000), epoch=step) for i in range(20)], step)
            sizes.append(store.stats()["file_bytes"])
    assert sizes[-1] == sizes[10]


@pytest.mark.parametrize("gone", ["", "*", "env-*", "env-*/data.mdb", "env-*/lock.mdb", "current", "*.lock", "owner*"])
def test_a_history_whose_files_a_cleaner_deleted_starts_empty(tmp_path, gone, caplog):
    path = tmp_path / "base" / "h"

    def clean():
        for entry in sorted(path.glob(gone)) if gone else [path.parent]:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    store, reader = open_store(path, run="run"), HistoryReader(path, NAMESPACE, refresh_interval=0.0)
    store.append([trajectory(i, [i, 1]) for i in range(5)], step=1)
    store.snapshot(tmp_path / "snapshot")
    assert responses(reader.get(key(3))) == [[3, 1]]
    for step in (2, 3):
        clean()
        assert responses(reader.get(key(3)))[0][0] == 3, "from the map"
        assert store.append([trajectory(3, [3, step])], step=step).trajectories == 1
        assert responses(reader.get(key(3))) == [[3, step]]
    assert caplog.text.count("it starts empty") == 2
    with pytest.raises(HistoryError, match="another process writes"):
        history_folder.acquire(path, None, timeout=0)
    clean()
    assert store.restore(tmp_path / "snapshot")
    assert len(list(path.glob("env-*"))) == 1
    assert responses(reader.get(key(3))) == [[3, 1]]
    assert reader.errors == 0
    reader.close()
    kill(store)
    with open_store(path, run="run") as again:
        assert again.stats()["responses"] == 5


def test_a_cleaner_takes_the_files_of_a_live_store_for_new_ones(tmp_path):
    path = tmp_path / "h"
    with open_store(path, run="run") as store:
        files = [file for file in path.rglob("*") if file.is_file()]
        for file in files:
            os.utime(file, (0, 0))
        store.append([trajectory(1, [5])], step=1)
        assert all(file.stat().st_mtime > 0 for file in files)
        assert len(files) == 6


@pytest.mark.parametrize("taken", ["by a file", "by another run"])
def test_a_folder_taken_by_others_is_left_alone_and_each_lost_step_counted(tmp_path, caplog, monkeypatch, taken):
    monkeypatch.setattr("verl_rhyme.history.store._LOCK_TIMEOUT_S", 0.1)
    path = tmp_path / "base" / "h"
    with open_store(path, run="first") as store:
        store.append([trajectory(1, [1])], step=1)
        shutil.rmtree(path.parent)
        if taken == "by a file":
            path.parent.write_text("")
            free = path.parent.unlink
        else:
            other = open_store(path, run="second")
            other.append([trajectory(1, [9])], step=1)
            free = partial(other.close, delete=True)
        for step in (2, 3):
            stats = store.append([trajectory(1, [step])], step=step)
            assert (stats.lost_steps, stats.dropped) == (1, 1)
            assert not store.restore(tmp_path / "snapshot")
            assert taken == "by a file" or read(path) == [[9]]
        assert caplog.text.count("a step is not recorded") == 1
        free()
        assert store.append([trajectory(1, [4])], step=4).lost_steps == 0
        assert read(path) == [[4]]


def test_a_reader_that_fails_to_open_tries_again(tmp_path, monkeypatch):
    """As without free file descriptors for a while."""
    with open_store(tmp_path / "h") as store:
        store.append([trajectory(1, [1])], step=1)
        reader = HistoryReader(tmp_path / "h", NAMESPACE, refresh_interval=0.0)
        with monkeypatch.context() as patch:
            patch.setattr(environment, "acquire", failing(OSError(errno.EMFILE, "Too many open files")))
            assert [reader.get(key(1)) for _ in range(2)] == [None] * 2
            assert reader.errors == 2
        assert responses(reader.get(key(1))) == [[1]]
        reader.close()
