"""The store: transactions, bounds, namespace, snapshot and restore, readers."""

import logging
import os

import numpy as np
import pytest

from tests.unit.history.stores import NAMESPACE, failing, key, kill, open_store, responses, trajectory
from verl_rhyme.history import environment, values
from verl_rhyme.history.environment import HistoryMismatch
from verl_rhyme.history.inspection import inspect
from verl_rhyme.history.reader import HistoryReader
from verl_rhyme.history.record import encoded_bytes
from verl_rhyme.history.store import AppendStats, HistoryStore
from verl_rhyme.history.values import stored_bytes


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path / "h") as opened:
        yield opened


@pytest.fixture
def reader(tmp_path):
    opened = HistoryReader(tmp_path / "h", NAMESPACE, refresh_interval=0.0)
    yield opened
    opened.close()


def test_appended_responses_are_read(store, reader):
    stats = store.append([trajectory(1, [5, 6], sample=0), trajectory(2, [7]), trajectory(1, [8], sample=1)], step=1)
    assert stats == AppendStats(prompts=2, trajectories=3)
    assert responses(reader.get(key(1))) == [[5, 6], [8]]
    assert reader.get(key(1)).policy_version.tolist() == [3, 3]
    assert reader.get(key(3)) is None
    assert [store.stats()[name] for name in ("prompts", "responses", "tokens", "epochs")] == [2, 3, 4, 1]
    for epoch in range(1, 4):
        for _ in range(2):  # a repeated step replaces
            store.append([trajectory(1, [epoch, 9], epoch)], step=epoch)
    assert responses(reader.get(key(1))) == [[2, 9], [3, 9]]
    assert [store.stats()[name] for name in ("responses", "epochs")] == [3, 2]
    assert reader.errors == 0


def test_several_threads_record_the_same_as_one(tmp_path):
    rng = np.random.default_rng(0)
    stores = [open_store(tmp_path / str(threads), threads=threads) for threads in (1, 3)]
    for epoch in range(4):
        made = [trajectory(i % 7, rng.integers(0, 9, 50 * (1 + i % 7)), epoch, i // 7) for i in range(28)]
        one, several = (store.append(made, step=epoch) for store in stores)
        assert one == several
    one, several = (HistoryReader(tmp_path / str(threads), NAMESPACE) for threads in (1, 3))
    assert all(one.get(key(i)).encode() == several.get(key(i)).encode() for i in range(7))
    for opened in (*stores, one, several):
        opened.close()


def test_a_reader_may_exist_before_the_store_and_follows_it(tmp_path, reader):
    assert reader.get(key(1)) is None
    slow = HistoryReader(tmp_path / "h", NAMESPACE, refresh_interval=3600.0)
    with open_store(tmp_path / "h", 1 << 20) as store:
        assert reader.get(key(1)) is None
        for response in ([5], [6]):  # an append needs no check for a replaced store
            store.append([trajectory(1, response)], step=1)
            assert responses(reader.get(key(1))) == responses(slow.get(key(1))) == [response]
        store.clear()
        assert reader.get(key(1)) is None
        assert responses(slow.get(key(1))) == [[6]]
        slow.refresh()
        assert slow.get(key(1)) is None
        store.append([trajectory(1, [7])], step=1)
    assert responses(reader.get(key(1))) == [[7]], "a closed store is still read"
    assert reader.errors == 0
    slow.close()


def test_an_environment_with_the_inode_of_a_deleted_one_is_another_one(tmp_path, store):
    """File systems use the inode of a deleted file again."""
    before = environment.identity(tmp_path / "h")
    (tmp_path / "h" / "env-0001").rename(tmp_path / "h" / "env-0002")
    environment.publish(tmp_path / "h", tmp_path / "h" / "env-0002")
    after = environment.identity(tmp_path / "h")
    assert before[1:] == after[1:]
    assert before != after


def test_another_vocabulary_is_refused(tmp_path, caplog):
    store = open_store(tmp_path / "h", run="run")
    store.append([trajectory(1, [5])], step=1)
    store.snapshot(tmp_path / "snapshot")
    kill(store)
    with pytest.raises(HistoryMismatch, match=r"tokenizer-a.*tokenizer-b.*history\.dir"):
        HistoryStore(tmp_path / "h", "tokenizer-b", 1 << 20, 2, run="run")
    with HistoryStore(tmp_path / "other", "tokenizer-b", 1 << 20, 2) as other:
        assert not other.restore(tmp_path / "snapshot")
    assert "belongs to vocabulary tokenizer-a" in caplog.text
    stranger = HistoryReader(tmp_path / "h", "tokenizer-b", refresh_interval=0.0)
    assert [stranger.get(key(1)) for _ in range(3)] == [None] * 3
    assert stranger.errors == 3
    assert caplog.text.count("drafting continues without it") == 1
    with open_store(tmp_path / "h", 1 << 20, run="run") as again:
        assert again.stats()["prompts"] == 1, "the refusal deleted nothing"


def test_bad_trajectories_are_dropped_and_the_rest_recorded(store, reader, caplog):
    good = trajectory(1, [5])
    bad = [
        trajectory(2, [5, -1]),
        type(good)(b"short", np.array([1], np.int32), 0.0, 0, 0, 0),
        type(good)(key(3), np.array([2**31]), 0.0, 0, 0, 0),
    ]
    with caplog.at_level(logging.WARNING):
        assert store.append([*bad, trajectory(4, []), good], step=1) == AppendStats(1, 1, dropped=3)
    assert len(caplog.records) == 1
    assert responses(reader.get(key(1))) == [[5]]
    assert store.append([], step=2) == AppendStats()


# ---- the byte bound ----


def file_bytes(path):
    return sum(file.stat().st_size for file in path.glob("env-*/data.mdb"))


@pytest.mark.parametrize(("share", "epochs"), [(0.2, 1), (0.8, 1), (1.5, 4)])
def test_the_hit_rate_equals_the_share_of_kept_prompts(tmp_path, reader, share, epochs, caplog):
    """No prompt is written and then evicted: the same ones stay in all epochs. Their older visits go before any."""
    rng = np.random.default_rng(1)
    bound = int(share * 120 * stored_bytes(encoded_bytes(7000, 1, 98)) / 0.7) + 4096
    hits, stats = [], []
    with open_store(tmp_path / "h", bound, epochs) as store:
        for epoch in range(5):
            for batch in rng.permutation(120).reshape(-1, 10):
                hits += [reader.get(key(i)) is not None for i in batch]
                stats.append(store.append([trajectory(i, rng.integers(0, 99, 7000), epoch) for i in batch], len(stats)))
                assert store.stats()["bytes"] <= 0.7 * bound
        totals = store.stats()
    kept = pytest.approx(min(1, share), abs=0.02)
    assert (np.mean(hits[120:]), totals["kept_share"]) == (kept, kept)
    assert sum(each.evicted for each in stats[12:]) == 0
    assert sum(each.prompts for each in stats[12:]) == 4 * totals["prompts"]
    assert totals["epochs"] == np.ceil(share)
    assert totals["responses"] == pytest.approx(share * 120, rel=0.1)
    if share > 1:
        assert sum(each.shed_epochs for each in stats) == 5 * 120 - totals["responses"]
    assert caplog.text.count("evicting prompts") == (share < 1)


@pytest.mark.parametrize(("mib", "new"), [(1, 10), (8, 48)], ids=["by a rewrite", "in the transaction"])
def test_visits_that_make_room_for_new_prompts_are_counted(tmp_path, mib, new):
    with open_store(tmp_path / "h", mib << 20) as store:
        for epoch in range(2):
            store.append([trajectory(i, range(7000), epoch) for i in range(9 * mib)], step=epoch)
        stats = store.append([trajectory(i, range(7000), 1) for i in range(100, 100 + new)], step=2)
        assert (stats.dropped, stats.evicted, store.stats()["prompts"]) == (0, 0, 9 * mib + new)
        assert stats.shed_epochs == 18 * mib + new - store.stats()["responses"] > 0


def test_evicted_prompts_are_known_after_a_restart(tmp_path):
    """Also their last step: a writer may die after it has recorded a step, and its successor gets the step again."""

    def opened():
        return open_store(tmp_path / "h", 1 << 20, epochs=1)

    def append(store, step, epoch=0):
        return store.append([trajectory(i, range(8000), epoch) for i in range(40)], step)

    with opened() as store:
        for step in range(2):
            append(store, step)
        before, largest = store.stats(), max(entry.size for _, entry in store._values.ledger.entries())
    with opened() as store:
        assert store.stats() == before
        append(store, step=1)
        assert max(entry.size for _, entry in store._values.ledger.entries()) == largest
        again = append(store, step=2, epoch=1)
        assert (again.evicted, again.unkept) == (0, 40 - store.stats()["prompts"])
        assert again.unkept > 0


def test_the_file_never_exceeds_its_bound(tmp_path, reader):
    rng = np.random.default_rng(0)
    bound = 4 << 20
    with open_store(tmp_path / "h", bound, epochs=2) as store:
        for step in range(75):
            prompts = rng.integers(0, 200, 8)
            batch = [trajectory(i, rng.integers(0, 99, rng.integers(1, 6000)), epoch=step // 10) for i in prompts]
            before = {i for i in range(200) if reader.get(key(i)) is not None}
            stats = store.append(batch, step)
            after = {i for i in range(200) if reader.get(key(i)) is not None}
            assert (stats.dropped, store.stats()["prompts"]) == (0, len(after))
            assert len(before - after) <= stats.evicted
            assert file_bytes(tmp_path / "h") <= bound
            assert store.stats()["bytes"] <= 0.7 * bound
        assert store.stats()["bytes"] > bound / 4, "the store uses its bound"
    assert reader.errors == 0


def test_a_rewrite_commits_in_parts(store, monkeypatch):
    """LMDB holds the pages of a transaction in memory until the commit, and a store may be larger than the memory."""
    monkeypatch.setattr(values, "_COMMIT_BYTES", 1 << 18)
    store.append([trajectory(i, range(9000)) for i in range(100)], step=1)
    store._rewrite(1 << 40)
    assert store.stats()["bytes"] / store._values.opened.env.info()["last_txnid"] < 1 << 19
    assert store.stats()["prompts"] == 100


def test_a_step_larger_than_the_bound_is_kept_in_part(tmp_path, reader):
    with open_store(tmp_path / "h", 1 << 20) as store:
        stats = store.append([trajectory(i, range(20_000)) for i in range(10)], step=1)
        assert 0 < stats.trajectories == 10 - stats.unkept - stats.dropped < 10
        assert sum(reader.get(key(i)) is not None for i in range(10)) == stats.trajectories
        assert store.append([trajectory(1, [5])], step=2).dropped == 0


def test_a_lower_bound_is_obeyed_at_the_next_restore(tmp_path, reader):
    with open_store(tmp_path / "first") as store:
        store.append([trajectory(i, range(8000)) for i in range(40)], step=1)
        store.snapshot(tmp_path / "snapshot")
        assert store.stats()["prompts"] == 40
    with open_store(tmp_path / "h", 1 << 20) as store:
        assert store.restore(tmp_path / "snapshot")
        left = store.stats()["prompts"]
        assert left == int(0.7 * (1 << 20) / stored_bytes(encoded_bytes(8000, 1, 7999)))
        assert left == sum(reader.get(key(i)) is not None for i in range(40))
        assert file_bytes(tmp_path / "h") <= 1 << 20


# ---- snapshot and restore ----


def test_snapshot_and_restore(tmp_path, store, reader):
    store.append([trajectory(1, [5]), trajectory(2, [6])], step=1)
    store.snapshot(tmp_path / "global_step_1" / "history")
    assert os.listdir(tmp_path / "global_step_1" / "history") == ["data.mdb"]
    store.append([trajectory(1, [7], epoch=1), trajectory(3, [8])], step=2)
    before = reader.get(key(1))
    assert store.restore(tmp_path / "global_step_1" / "history")
    assert responses(before) == [[5], [7]]
    assert responses(reader.get(key(1))) == [[5]]
    assert reader.get(key(3)) is None
    assert store.stats()["prompts"] == 2
    store.append([trajectory(1, [9], epoch=1)], step=2)
    assert responses(reader.get(key(1))) == [[5], [9]]
    assert len(list((tmp_path / "h").glob("env-*"))) == 1
    assert reader.errors == 0


def test_a_snapshot_replaces_an_older_one_and_leaves_nothing_else(tmp_path, store, monkeypatch):
    (tmp_path / "s" / ".new").mkdir(parents=True)
    (tmp_path / "s" / ".new" / "data.mdb").write_text("left by a killed writer")
    for step in range(2):
        store.append([trajectory(step, [5])], step=step)
        store.snapshot(tmp_path / "s")
    store.append([trajectory(2, [5])], step=2)
    monkeypatch.setattr(os, "fsync", failing(OSError("no space left on device")))
    with pytest.raises(OSError, match="no space"):
        store.snapshot(tmp_path / "s")
    assert os.listdir(tmp_path / "s") == ["data.mdb"]
    assert inspect(tmp_path / "s").prompts == 2, "the latest one that was written"


def test_after_close_an_append_is_dropped_not_raised(store):
    store.close()
    assert store.append([trajectory(1, [5])], step=1).dropped == 1


@pytest.mark.parametrize(("room", "depths"), [(1 << 26, {4}), (3 << 20, {2, 3})])
def test_a_prompt_repeated_within_an_epoch_keeps_its_latest_visits(tmp_path, room, depths):
    """64 prompts, 4 responses per visit, 16 visits in random order within one epoch.

    One bound fits four visits of each prompt; the other fits fewer, and each prompt keeps as many as fit.
    """
    order = np.repeat(np.arange(64), 16)
    np.random.default_rng(3).shuffle(order)
    with open_store(tmp_path / "h", room, epochs=4) as store:
        for step, prompts in enumerate(order.reshape(-1, 8).tolist()):
            visits = [(i, 8 * step + at) for at, i in enumerate(prompts)]
            made = [trajectory(i, [visit] * 700, sample=n, visit=visit) for i, visit in visits for n in range(4)]
            store.append(made, step)
        reader = HistoryReader(tmp_path / "h", NAMESPACE)
        found = {i: reader.get(key(i)).visit.tolist() for i in range(64)}
        reader.close()
        assert {len(kept) // 4 for kept in found.values()} == depths
        for i, kept in found.items():
            assert kept == np.repeat(np.flatnonzero(order == i)[-len(kept) // 4 :], 4).tolist()
        assert store.stats()["epochs"] == max(depths)
