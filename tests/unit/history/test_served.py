"""``history.keep=served``: who keeps what, and what goes where others answer."""

import dataclasses
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_rhyme.config import HistoryConfig
from verl_rhyme.history import environment
from verl_rhyme.history.record import Trajectory
from verl_rhyme.history.store import HistoryReader, HistoryStore
from verl_rhyme.workers.history_writer import HistoryWriter
from verl_rhyme.workers.stored_samples import StoredSamples, TrainedBatch


def key(i):
    return int(i).to_bytes(16, "big")


def batch(prompts, nodes, epoch=0):
    """A sample of each prompt, answered by these nodes."""
    count = len(prompts)
    stored = StoredSamples("train", [f"{i}_0_0" for i in range(count)], np.arange(1, count + 1))
    return TrainedBatch(
        stored,
        [key(p) for p in prompts],
        [epoch] * count,
        np.arange(count) / 2,
        list(range(count)),
        [7] * count,
        epoch,
        nodes=[frozenset(each) for each in nodes],
    )


def test_a_node_gets_whole_groups_of_which_it_answered_any():
    whole = batch([1, 2, 1, 3, 2], [{"a"}, {"b"}, {"b"}, set(), {"b"}])
    mine, elsewhere = whole.served_by("a")
    assert mine.prompts == [key(1), key(1), key(3)], "of the last nobody told who answered"
    assert elsewhere == {key(2): 0}
    assert mine.stored.keys == ["0_0_0", "2_0_0", "3_0_0"]
    assert mine.stored.lengths.tolist() == [1, 3, 4]
    assert (mine.rewards.tolist(), mine.numbers, mine.versions) == ([0.0, 1.0, 1.5], [0, 2, 3], [7] * 3)
    assert (mine.epoch, mine.stored.partition) == (0, "train")
    none, all_of_them = whole.served_by("c")
    assert (none.prompts, all_of_them) == ([key(3)], {key(1): 0, key(2): 0})


@pytest.fixture
def store(tmp_path):
    with HistoryStore(tmp_path / "h", "vocabulary", max_bytes=1 << 24, epochs=4) as opened:
        yield opened


def recorded(store, prompts, epoch):
    made = [Trajectory(key(p), np.arange(p, p + 9, dtype=np.int32), 1.0, 0, epoch, 0) for p in prompts]
    store.append(made, epoch)


def test_what_others_answer_goes_unless_it_was_recorded_in_that_visit(store, tmp_path):
    recorded(store, [1, 2, 3], epoch=0)
    recorded(store, [1], epoch=1)
    assert store.leave({key(1): 1, key(2): 1, key(9): 1}) == 1
    assert store.stats()["prompts"] == 2
    reader = HistoryReader(tmp_path / "h", "vocabulary", refresh_interval=0.0)
    assert reader.get(key(2)) is None
    assert (len(reader.get(key(1))), len(reader.get(key(3)))) == (2, 1)
    reader.close()
    recorded(store, [2], epoch=2)
    assert store.stats()["prompts"] == 3
    store.close()
    with HistoryStore(tmp_path / "h", "vocabulary", max_bytes=1 << 20, epochs=4) as again:
        assert again.stats()["prompts"] == 3
        assert again.leave({key(2): 9, key(3): 9}) == 2
        assert again.stats()["kept_share"] == 1.0, "what others answer is not what there is no room for"


def test_what_is_left_is_there_for_the_next_writer(store, tmp_path):
    """LMDB gives pages back that it never wrote: the file is shorter than it says, and would be taken for damaged."""
    rng = random.Random(51)
    lengths = [rng.choice([9, 900]) for _ in range(300)]
    store.append([Trajectory(key(p), np.arange(n, dtype=np.int32), 1.0, 0, 0, 0) for p, n in enumerate(lengths)], 0)
    others = list(range(300))
    rng.shuffle(others)
    assert store.leave({key(p): 1 for p in others[:280]}) == 280
    environment.check(store._values.opened.folder)
    store.close()
    with HistoryStore(tmp_path / "h", "vocabulary", max_bytes=1 << 20, epochs=4) as again:
        assert again.stats()["prompts"] == 20


def test_a_disk_that_takes_nothing_keeps_all(store, monkeypatch):
    recorded(store, [1, 2], epoch=0)
    monkeypatch.setattr(type(store._values), "drop", lambda *_: (_ for _ in ()).throw(OSError("no space")))
    assert store.leave({key(1): 1}) == 0
    assert store.stats()["prompts"] == 2


class FromMemory(TrainedBatch):
    """Whose samples need no queue."""

    def trajectories(self):
        for prompt in dict.fromkeys(self.prompts):
            yield [
                Trajectory(other, np.array([number], np.int32), 0.0, 0, self.epoch, number)
                for other, number in zip(self.prompts, self.numbers, strict=True)
                if other == prompt
            ]


@settings(deadline=None, max_examples=25)
@given(st.lists(st.lists(st.tuples(st.integers(0, 5), st.sets(st.sampled_from("ab"))), max_size=6), max_size=6))
def test_each_node_has_what_it_answered_last(tmp_path_factory, epochs):
    """Steps of one epoch each: all that a node answered, and nothing that the other alone answered since."""
    folder = tmp_path_factory.mktemp("served")
    config = HistoryConfig(max_bytes=1 << 20, epochs=9, keep="served")
    writers = {
        node: HistoryWriter(str(folder / node), {str(folder / other) for other in "ab"}, "v", config, "run", node)
        for node in "ab"
    }
    expected = {node: Counter() for node in "ab"}
    for epoch, samples in enumerate(epochs):
        step = batch([prompt for prompt, _ in samples], [nodes for _, nodes in samples], epoch)
        for node, writer in writers.items():
            mine, elsewhere = step.served_by(node)
            for gone in elsewhere:
                expected[node].pop(gone, None)
            expected[node].update(mine.prompts)
            fetched = FromMemory(**{f.name: getattr(step, f.name) for f in dataclasses.fields(step)})
            assert writer.append(fetched, epoch)["prompts"] == len(expected[node])
    for node, writer in writers.items():
        if any(epochs):
            reader = HistoryReader(folder / node, "v", refresh_interval=0.0)
            there = {k: len(reader.get(k)) for k in map(key, range(6)) if reader.get(k) is not None}
            assert there == dict(expected[node])
            reader.close()
        writer.close()
