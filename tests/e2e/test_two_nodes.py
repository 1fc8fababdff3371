"""The history is present on every node, and its writers may fail: a local Ray cluster of two."""

import os
import signal
import time
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest

from verl_rhyme.config import HistoryConfig
from verl_rhyme.history.environment import HistoryError
from verl_rhyme.history.inspection import inspect
from verl_rhyme.history.keys import prompt_key
from verl_rhyme.history.reader import HistoryReader
from verl_rhyme.history.record import Trajectory
from verl_rhyme.observability.events import REQUESTS, EventLog, read_requests
from verl_rhyme.trainer import recorder as recorder_module
from verl_rhyme.trainer.draft_counts import DraftCounts
from verl_rhyme.trainer.recorder import Recorder
from verl_rhyme.workers.history_service import (
    HistoryService,
    HistoryUnavailable,
    node_history_dir,
    pack,
    unpack,
)

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


# ---- a writer that fails ----


@pytest.fixture
def one_node(cluster):
    """Services on the cluster's first node alone: a local one, as most runs have."""
    import ray

    here, nodes = ray.get_runtime_context().get_node_id(), ray.nodes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "nodes", lambda: [node for node in nodes() if node["NodeID"] == here])
        yield here


def started(folder, timeout=60.0):
    service = HistoryService(HistoryConfig(dir=str(folder), max_bytes=1 << 24, timeout=timeout), NAMESPACE)
    service.ready()
    return service


def pid_of(service, node):
    import ray

    return ray.get(service._opening[node], timeout=60)


def test_a_killed_writer_is_started_anew_and_loses_nothing(one_node, tmp_path, caplog):
    service = started(tmp_path / "history")
    service.append(trajectories(4), step=1)
    os.kill(pid_of(service, one_node), signal.SIGKILL)
    stats = service.append(trajectories(4, epoch=1), step=2)
    assert (stats["prompts"], stats["responses"], service.restarts) == (4, 8, 1)
    assert "started anew" in caplog.text
    os.kill(pid_of(service, one_node), signal.SIGKILL)
    service.snapshot(str(tmp_path / "global_step_2"))  # where nobody noticed before
    assert inspect(tmp_path / "global_step_2" / "history").responses == 8
    service.close()
    assert not list((tmp_path / "history").iterdir())


def test_a_writer_that_hangs_holds_nobody_up(one_node, tmp_path, caplog):
    service = started(tmp_path / "history", timeout=8.0)
    service.append(trajectories(4), step=1)
    os.kill(pid_of(service, one_node), signal.SIGSTOP)
    began = time.monotonic()
    for step in (2, 3, 4):
        with suppress(HistoryUnavailable):
            service.append(trajectories(4, epoch=step), step=step)
    assert time.monotonic() - began < 60
    assert "did not answer within 8 s" in caplog.text
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        with suppress(HistoryUnavailable):
            stats = service.append(trajectories(4, epoch=9), step=9)
            break
        time.sleep(1)
    assert stats["responses"] >= 8
    os.kill(pid_of(service, one_node), signal.SIGSTOP)
    began = time.monotonic()
    with suppress(HistoryUnavailable):
        service.snapshot(str(tmp_path / "global_step_9"))
    service.close()
    assert time.monotonic() - began < 60


def test_a_second_run_in_one_folder_is_refused_and_deletes_nothing(one_node, tmp_path):
    folder = tmp_path / "history"
    first = started(folder)
    first.append(trajectories(4), step=1)
    second = HistoryService(HistoryConfig(dir=str(folder), max_bytes=1 << 24), NAMESPACE)
    with pytest.raises(HistoryError, match=r"another process writes .*history\.dir"):
        second.ready()
    second.close()
    assert on_each_node(folder, prompt_key([2]))[one_node] == 1
    assert first.append(trajectories(4, epoch=1), step=2)["responses"] == 8
    first.close()


def sample(trajectory):
    """What the recorder fetches of one finished sample."""
    now = time.time()
    row = dict.fromkeys(REQUESTS.names, 0) | {
        "uid": "u",
        "id": f"request {trajectory.key.hex()}",
        "prompt_key": trajectory.key.hex(),
        "node": "n",
        "stop_reason": "completed",
        "response_tokens": len(trajectory.tokens),
        "started_at": now - 1,
        "queued_at": now - 1,
        "finished_at": now,
        "validate": False,
        "trained": True,
    }
    return {"trajectory": trajectory, "prompt": np.arange(3), "requests": [row]}


def test_event_log_and_metrics_do_not_wait_for_a_dead_writer(one_node, tmp_path, monkeypatch):
    monkeypatch.setattr(recorder_module, "_fetch", lambda *args, **kwargs: [sample(t) for t in trajectories(4)])
    service = started(tmp_path / "history")
    events = EventLog(tmp_path / "events")
    recorder = Recorder(service, events, lambda: 4, DraftCounts(dict))
    monkeypatch.setattr(service, "add_nodes", lambda: None)  # a node on which no writer starts again
    for step in (1, 2):
        recorder.start(None, step=step, part=step, epoch=0)
        recorder.join()
        metrics = recorder.take_metrics(rollout_s=1.0)
        assert metrics["rollout/requests"] == 4
        assert metrics["rollout/history/errors"] == step - 1
        if step == 1:
            assert metrics["rollout/history/evicted"] == 0
            assert metrics["rollout/history/kept_share"] == 1
            os.kill(pid_of(service, one_node), signal.SIGKILL)
    recorder.close()
    assert len(read_requests(tmp_path / "events")) == 8
    service.close()


def test_a_finished_run_ends_well_and_stops_its_engines_with_a_dead_writer(one_node, tmp_path):
    import ray
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    from verl_rhyme.config import RhymeConfig
    from verl_rhyme.trainer.base import RhymeTrainerMixin

    class Engine:
        stopped = False

        def stop_engine(self):
            self.stopped = True

        def was_stopped(self):
            return self.stopped

    class Finished(PPOTrainer):
        def fit(self, agent_loop_manager):
            pass

        def on_sample_end(self):
            pass

    class Trainer(RhymeTrainerMixin, Finished):
        def _rollout_server_managers(self):
            return [SimpleNamespace(get_replicas=lambda: [SimpleNamespace(servers=[engine])])]

    engine = ray.remote(Engine).options(num_cpus=0).remote()
    trainer = object.__new__(Trainer)
    trainer._history = started(tmp_path / "history")
    trainer._rhyme = RhymeConfig()
    trainer._recorder = Recorder(trainer._history, None, lambda: 4, DraftCounts(dict))
    os.kill(pid_of(trainer._history, one_node), signal.SIGKILL)
    trainer.fit(None)
    assert ray.get(engine.was_stopped.remote(), timeout=60)
