"""The history is present on every node: a local Ray cluster of two."""

import numpy as np
import pytest

from verl_rhyme.config import HistoryConfig
from verl_rhyme.history.keys import prompt_key
from verl_rhyme.history.reader import HistoryReader
from verl_rhyme.history.record import Trajectory
from verl_rhyme.workers.history_service import HistoryService, node_history_dir, pack, unpack

# Not among the whole runs: Ray records the address of a cluster made here, and a run that starts beside it would join.
pytestmark = pytest.mark.xdist_group("two_nodes")

NAMESPACE = "test-vocabulary"


@pytest.fixture(scope="module")
def cluster():
    import ray
    from ray.cluster_utils import Cluster

    options = {"num_cpus": 1, "object_store_memory": 80_000_000, "include_dashboard": False}
    built = Cluster(initialize_head=True, connect=True, head_node_args=options)
    try:
        yield built, options
    finally:
        ray.shutdown()
        built.shutdown()


def trajectories(n, length=20, epoch=0):
    rng = np.random.default_rng(epoch)
    return [
        Trajectory(prompt_key([i]), rng.integers(0, 50, length, dtype=np.int32), float(i), 3, epoch, i)
        for i in range(n)
    ]


def on_each_node(folder, key):
    """Number of responses that a reader on each node sees for a key."""
    import ray

    found = {}
    for node in ray.nodes():
        if node["Alive"]:
            reader = HistoryReader(node_history_dir(str(folder), node["NodeID"]), NAMESPACE)
            history = reader.get(key)
            found[node["NodeID"]] = 0 if history is None else len(history)
            reader.close()
    return found


def test_packing_keeps_everything():
    before = trajectories(5)
    for one, other in zip(before, unpack(pack(before)), strict=True):
        assert (one.key, one.reward, one.policy_version, one.epoch, one.sample) == (
            other.key,
            other.reward,
            other.policy_version,
            other.epoch,
            other.sample,
        )
        np.testing.assert_array_equal(one.tokens, other.tokens)
    assert unpack(pack([])) == []


def test_every_node_has_the_history_also_after_restore_and_growth(cluster, tmp_path):
    import ray

    built, options = cluster
    built.add_node(**options)
    built.wait_for_nodes()
    folder = tmp_path / "history"
    service = HistoryService(HistoryConfig(dir=str(folder), max_bytes=1 << 24), NAMESPACE)
    stats = service.append(trajectories(4), step=1)
    assert (stats["prompts"], stats["dropped"]) == (4, 0)
    assert list(on_each_node(folder, prompt_key([2])).values()) == [1, 1]

    checkpoint = tmp_path / "global_step_1"
    service.snapshot(str(checkpoint))
    service.append(trajectories(4, epoch=1), step=2)
    assert list(on_each_node(folder, prompt_key([2])).values()) == [2, 2]

    restored = service.restore(str(checkpoint))
    assert restored is not None
    assert restored["responses"] == 4
    assert list(on_each_node(folder, prompt_key([2])).values()) == [1, 1]
    assert service.restore(str(tmp_path / "global_step_9")) is None

    third = built.add_node(**options)
    built.wait_for_nodes()
    service.add_nodes()
    service.append(trajectories(4, epoch=1), step=2)
    assert sorted(on_each_node(folder, prompt_key([2])).values()) == [1, 2, 2]

    built.remove_node(third)
    service.add_nodes()
    service.append(trajectories(4, epoch=2), step=3)
    service.close()
    assert not [path for path in folder.iterdir() if path.name in {n["NodeID"][:16] for n in ray.nodes() if n["Alive"]}]
