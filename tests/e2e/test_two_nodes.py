"""The trainer's node records, other nodes fetch, and any of it may fail: a local Ray cluster of two."""

import os
import signal
import tempfile
import time
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch
import transfer_queue as tq
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from verl_rhyme.config import HistoryConfig, RhymeConfig
from verl_rhyme.drafting.policy import SOURCES
from verl_rhyme.history.copies import CopyReader
from verl_rhyme.history.inspection import inspect
from verl_rhyme.history.keys import prompt_key
from verl_rhyme.history.reader import HistoryReader
from verl_rhyme.history.record import Trajectory
from verl_rhyme.history_writer import history_service
from verl_rhyme.history_writer.history_copies import HistoryRequests, fetchers, node_copies_dir
from verl_rhyme.history_writer.history_service import HistoryService, HistoryUnavailable
from verl_rhyme.history_writer.history_writer import HistoryWriter, node_history_dir
from verl_rhyme.observability.events import REQUESTS, EventLog, read_requests, read_responses
from verl_rhyme.processes import stored_samples
from verl_rhyme.processes.stored_samples import MissingSamples, StoredSamples, TrainedBatch
from verl_rhyme.trainer.base import RhymeTrainerMixin
from verl_rhyme.trainer.draft_counts import DraftCounts
from verl_rhyme.trainer.observers import Step
from verl_rhyme.trainer.recorder import Recorder

pytestmark = pytest.mark.xdist_group("two_nodes")

NAMESPACE = "test-vocabulary"
ENDED = Step(number=1, seconds=2.0, rollout_s=1.0)


@pytest.fixture(scope="module")
def cluster():
    options = {"num_cpus": 1, "object_store_memory": 80_000_000, "include_dashboard": False}
    with (
        # Ray records the address of a cluster made here; in its usual folder, a run that starts beside it would join.
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("RAY_TMPDIR", folder)
        built = Cluster(initialize_head=True, connect=True, head_node_args={**options, "num_cpus": 3})
        try:
            tq.init()  # as verl's main process does
            yield built, options
        finally:
            tq.close()
            ray.shutdown()
            built.shutdown()


def trajectories(n, length=20, epoch=0):
    rng = np.random.default_rng(epoch)
    return [
        Trajectory(prompt_key([i]), rng.integers(0, 50, length, dtype=np.int32), float(i), 3, epoch, i)
        for i in range(n)
    ]


def stored(n, length=20, epoch=0, logprobs=True):
    """The same in TransferQueue, as verl's agent loops put it there."""
    made = trajectories(n, length, epoch)
    now = time.time()
    words = {"node": "n", "stop_reason": "completed", "reason": ""}
    record = (
        dict.fromkeys(REQUESTS.names, 0) | words | {"by_source": [[0, 0]] * len(SOURCES)} | {"response_tokens": length}
    )
    record |= {"queued_at": now - 1, "started_at": now - 1, "finished_at": now}
    fields = [
        {
            "prompts": torch.tensor([t.sample]),
            "responses": torch.from_numpy(t.tokens).long(),
            "response_mask": torch.ones(length, dtype=torch.long),
            "rm_scores": torch.tensor([0.0] * (length - 2) + [t.reward - 1, 1.0]),  # some are given on the way
            **({"rollout_log_probs": torch.full((length,), -0.5)} if logprobs else {}),
            # The servers reported nothing of the last one.
            "extra_fields": {"rhyme": [{**record, "id": str(t.sample), "prompt_key": t.key.hex()}]} if t.sample else {},
        }
        for t in made
    ]
    tags = [{"response_len": length, "seq_len": length + 1, "max_global_steps": t.policy_version} for t in made]
    keys = [f"e{epoch}p{t.sample}_{t.sample}_0" for t in made]
    put = tq.kv_batch_put(keys=keys, partition_id="train", fields=list_of_dict_to_tensordict(fields), tags=tags)
    return KVBatchMeta(partition_id="train", keys=keys, tags=tags, fields=put.fields)


def named(n, length=20, epoch=0):
    """What the recorder reports to the writer of it."""
    made = trajectories(n, length, epoch)
    batch = stored(n, length, epoch)
    return TrainedBatch(
        StoredSamples(batch.partition_id, batch.keys, np.full(n, length)),
        [t.key for t in made],
        [t.visit for t in made],
        np.array([t.reward for t in made]),
        [t.sample for t in made],
        [t.policy_version for t in made],
        [False] * n,
        epoch,
    )


def on_each_node(folder, key):
    """Number of responses that a reader on each node sees for a key."""
    found = {}
    for node in ray.nodes():
        if node["Alive"]:
            reader = HistoryReader(node_history_dir(str(folder), node["NodeID"]), NAMESPACE)
            history = reader.get(key)
            found[node["NodeID"]] = 0 if history is None else len(history)
            reader.close()
    return found


def test_cleared_samples_are_reported_and_never_taken_for_others(cluster, tmp_path):
    service = HistoryService(HistoryConfig(dir=str(tmp_path / "history"), max_bytes=1 << 24), NAMESPACE)
    batch = named(4)
    tq.kv_clear(keys=batch.stored.keys[:2], partition_id="train")
    with pytest.raises(MissingSamples, match="2 of 4"):
        service.append(batch, step=1)
    with pytest.raises(HistoryUnavailable, match="2 of 4"):
        service.rewards(batch.stored)
    batch = named(4)
    stored(4, length=19)  # under the same keys
    with pytest.raises(MissingSamples, match="replaced by others"):
        service.append(batch, step=1)
    assert service.append(named(4), step=1)["responses"] == 4  # the writer is none the worse for it
    assert service.restarts == 0
    service.close()


# ---- other nodes ----


@pytest.fixture
def second_node(cluster):
    """Its id; it is there for one test."""
    built, options = cluster
    before = {node["NodeID"] for node in ray.nodes()}
    added = built.add_node(**options)
    built.wait_for_nodes()
    [there] = {node["NodeID"] for node in ray.nodes()} - before
    yield there
    built.remove_node(added)


def test_the_trainers_node_records_and_restores_alone(cluster, second_node, tmp_path):
    folder, checkpoint = tmp_path / "history", tmp_path / "global_step_1"
    service = started(folder)
    assert service.append(named(4), step=1)["responses"] == 4
    assert sorted(on_each_node(folder, prompt_key([2])).values()) == [0, 1]
    service.snapshot(str(checkpoint))
    assert service.append(named(4, epoch=1), step=2)["responses"] == 8
    assert service.restore(str(checkpoint))["responses"] == 4
    assert sorted(on_each_node(folder, prompt_key([2])).values()) == [0, 1]
    assert service.restore(str(tmp_path / "global_step_9")) is None
    assert len(list(folder.iterdir())) == 1
    service.close()


def server_on(node, folder):
    """As much of an engine's server, on a node, as asks for histories."""

    class Server:
        def __init__(self, node, config):
            self.requests = HistoryRequests(node, config)
            self.requests.start()

        async def ask(self, keys):
            return [self.requests.ask(key) for key in keys]

        async def errors(self):
            return self.requests.take_errors()

    where = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    config = HistoryConfig(dir=str(folder), max_bytes=1 << 26)
    return ray.remote(Server).options(num_cpus=0, scheduling_strategy=where).remote(node, config)


def fetched(server, reader, keys, seconds=120.0):
    """Number of responses of each prompt's copy, once all have arrived."""
    asked = ray.get(server.ask.remote(keys), timeout=120)
    end = time.monotonic() + seconds
    while not all(reader.arrived(key, since) for key, since in zip(keys, asked, strict=True)):
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.01)
    found = [reader.get(key) for key in keys]
    return [0 if history is None else len(history) for history in found]


KEYS = [prompt_key([i]) for i in range(4)]


def test_a_node_fetches_what_its_requests_need_and_nothing_twice(cluster, one_node, second_node, tmp_path):
    folder = tmp_path / "history"
    service = started(folder)
    here, there, sibling = (server_on(node, folder) for node in (one_node, second_node, second_node))
    reader = CopyReader(node_copies_dir(str(folder), second_node))
    try:
        service.append(named(3), step=1)
        assert ray.get(here.ask.remote(KEYS)) == [0] * 4, "its engines read the store"
        assert fetched(there, reader, KEYS[1:]) == [1, 1, 0]
        assert fetched(sibling, reader, KEYS[1:]) == [1, 1, 0]
        once = service.append(named(2, epoch=1), step=2)["sent_bytes"]
        assert once == 2 * os.path.getsize(node_copies_dir(str(folder), second_node) + "/" + KEYS[1].hex())
        assert fetched(there, reader, KEYS[1:]) == [2, 1, 0]
        assert 0 < service.append(named(2, epoch=2), step=3)["sent_bytes"] < once, "one of them has changed"
        assert len(fetchers(str(folder))) == 1
    finally:
        service.close()
    assert not list(folder.iterdir())
    assert ray.get([server.errors.remote() for server in (here, there, sibling)]) == [0, 0, 0]


def test_others_go_on_when_fetcher_or_writer_die(cluster, one_node, second_node, tmp_path):
    folder = tmp_path / "history"
    service = started(folder)
    server = server_on(second_node, folder)
    reader = CopyReader(node_copies_dir(str(folder), second_node))
    try:
        service.append(named(3), step=1)
        assert fetched(server, reader, KEYS[:2]) == [1, 1]
        ray.kill(*fetchers(str(folder)))
        while not ray.get(server.errors.remote()):  # until the fetcher is dead
            ray.get(server.ask.remote(KEYS[:2]))
            time.sleep(0.1)
        assert fetched(server, reader, KEYS[:2]) == [1, 1]
        os.kill(pid_of(service), signal.SIGKILL)
        assert fetched(server, reader, KEYS[:3]) == [1, 1, 1]
        assert service.append(named(3, epoch=1), step=2)["responses"] == 6
        assert fetched(server, reader, KEYS[:3]) == [2, 2, 2]
    finally:
        service.close()


# ---- a writer that fails ----


@pytest.fixture
def one_node(cluster):
    """The trainer's node."""
    return ray.get_runtime_context().get_node_id()


def started(folder):
    service = HistoryService(HistoryConfig(dir=str(folder), max_bytes=1 << 24), NAMESPACE)
    service.ready()
    return service


def pid_of(service):
    return ray.get(service._writer.open.remote(), timeout=120)


def test_a_killed_writer_is_started_anew_and_loses_nothing(one_node, tmp_path, caplog):
    service = started(tmp_path / "history")
    service.append(named(4), step=1)
    os.kill(pid_of(service), signal.SIGKILL)
    stats = service.append(named(4, epoch=1), step=2)
    assert (stats["prompts"], stats["responses"], service.restarts) == (4, 8, 1)
    assert "died and was started again" in caplog.text
    os.kill(pid_of(service), signal.SIGKILL)
    service.snapshot(str(tmp_path / "global_step_2"))  # where nobody noticed before
    assert inspect(tmp_path / "global_step_2" / "history").responses == 8
    service.close()
    assert not list((tmp_path / "history").iterdir())


def test_a_writer_that_hangs_holds_nobody_up(one_node, tmp_path, caplog, monkeypatch):
    service = started(tmp_path / "history")  # patient: beside other tests a process may take long to start
    service.append(named(4), step=1)
    with monkeypatch.context() as impatient:
        impatient.setattr(history_service, "_TIMEOUT_S", 6.0)
        os.kill(pid_of(service), signal.SIGSTOP)
        with pytest.raises(HistoryUnavailable, match="did not answer within 6 s"):
            service.append(named(4, epoch=2), step=2)
    assert service.append(named(4, epoch=3), step=3)["responses"] >= 8
    assert service.restarts == 1
    monkeypatch.setattr(history_service, "_SHORT_TIMEOUT_S", 3.0)
    os.kill(pid_of(service), signal.SIGSTOP)
    service.close()


def test_only_the_piece_in_which_the_writer_died_is_recorded_again(one_node, tmp_path, monkeypatch):
    log = tmp_path / "log"

    class Slow(HistoryWriter):
        def record(self, pieces, step):
            pieces = list(pieces)
            said = log.read_text() if log.exists() else ""
            log.write_text(said + "".join(str(t.sample) for piece in pieces for t in piece) + "\n")
            if said.count("\n") == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().record(pieces, step)

    monkeypatch.setattr(history_service, "HistoryWriter", Slow)
    monkeypatch.setattr(stored_samples, "PIECE_BYTES", 2 * 20 * 12)
    service = started(tmp_path / "history")
    for piece in named(8).pieces():
        stats = service.append(piece, step=1)
        assert stats["dropped"] == 0
    assert (stats["prompts"], stats["responses"], service.restarts) == (8, 8, 1)
    assert log.read_text().split() == ["01", "23", "45", "45", "67"]
    service.close()


@pytest.mark.parametrize("logprobs", [True, False])
def test_recorded_are_tokens_rewards_and_requests_without_the_padding(one_node, tmp_path, logprobs):
    service = started(tmp_path / "history")
    events = EventLog(tmp_path / "events")
    recorder = Recorder(service, events, lambda: 4, DraftCounts(dict), logprobs=logprobs, log_responses=True)
    batch = stored(4, logprobs=logprobs)
    batch.tags[3] = {**batch.tags[3], "is_padding": True}
    recorder.start(batch, step=2, part=2, epoch=0)
    batch.keys.reverse()  # verl reorders it meanwhile
    recorder.drain()
    metrics = recorder.on_step(ENDED)
    recorder.close()
    assert metrics["rollout/history/errors"] == 0
    assert (metrics["rollout/history/responses"], metrics["rollout/requests"]) == (3, 2)
    reader = HistoryReader(node_history_dir(str(tmp_path / "history"), one_node), NAMESPACE)
    for trajectory in trajectories(3):
        history = reader.get(trajectory.key)
        np.testing.assert_array_equal(history.response(0), trajectory.tokens)
        assert (history.reward.tolist(), history.policy_version.tolist()) == ([trajectory.reward], [3])
        assert (history.confidence[1:-1] > 0).all() == logprobs
    reader.close()
    requests = read_requests(tmp_path / "events").to_pydict()
    assert (requests["uid"], requests["sample"], requests["reward"]) == (["e0p1", "e0p2"], [1, 2], [1.0, 2.0])
    responses = read_responses(tmp_path / "events").to_pydict()
    assert responses["tokens"] == [t.tokens.tolist() for t in trajectories(3)]
    assert (responses["prompt"], responses["reward"]) == ([[0], [1], [2]], [0.0, 1.0, 2.0])
    assert (responses["logprobs"][0] is not None) == logprobs
    service.close()


def test_event_log_and_metrics_do_not_wait_for_a_dead_writer(one_node, tmp_path, caplog):
    service = started(tmp_path / "history")
    events = EventLog(tmp_path / "events")
    recorder = Recorder(service, events, lambda: 4, DraftCounts(dict))
    for step in (1, 2, 3):
        recorder.start(stored(4), step=step, part=step, epoch=0)
        recorder.drain()
        metrics = recorder.on_step(ENDED)
        assert metrics["rollout/requests"] == 3
        assert metrics["rollout/history/errors"] == step - 1
        if step == 1:
            assert metrics["rollout/history/evicted"] == 0
            assert metrics["rollout/history/kept_share"] == 1
            ray.kill(service._writer)  # for good, as after many deaths
    recorder.close()
    assert read_requests(tmp_path / "events")["reward"].to_pylist() == [1.0, 2.0, 3.0] * 3
    assert caplog.text.count("the trainer fetches rewards") == 1
    service.close()


def test_a_finished_run_ends_well_and_stops_its_engines_with_a_dead_writer(one_node, tmp_path, monkeypatch):
    class Engine:
        stopped = False

        def stop_engine(self):
            self.stopped = True

        def was_stopped(self):
            return self.stopped

    class Trainer(RhymeTrainerMixin):
        on_sample_end = None

        def _rollout_server_managers(self):
            return [SimpleNamespace(get_replicas=lambda: [SimpleNamespace(servers=[engine])])]

    monkeypatch.setattr(PPOTrainer, "fit", lambda self, agent_loop_manager: None)
    engine = ray.remote(Engine).options(num_cpus=0).remote()
    trainer = object.__new__(Trainer)
    trainer._history = started(tmp_path / "history")
    trainer._rhyme = RhymeConfig()
    trainer.observers = [Recorder(trainer._history, None, lambda: 4, DraftCounts(dict))]
    os.kill(pid_of(trainer._history), signal.SIGKILL)
    trainer.fit(None)
    assert ray.get(engine.was_stopped.remote(), timeout=60)
