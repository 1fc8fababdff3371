"""The weight sockets of a run connect its workers to its own engines, whatever else runs on the machine."""

from types import SimpleNamespace

import pytest
import ray
from verl.workers.rollout.vllm_rollout import ServerAdapter
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from verl_rhyme.engine import weight_socket
from verl_rhyme.engine.weight_socket import RhymeServerAdapter


@pytest.fixture
def sockets(monkeypatch):
    """Sockets of the worker and of the engine of a run on a Ray cluster."""

    def begin(self, config):
        self.config = config
        self.zmq_handle = "ipc:///tmp/rl-colocate-zmq-01000000-replica-0-rank-0.sock"

    def call(cluster, rhyme=True):
        context = SimpleNamespace(gcs_address=cluster, get_job_id=lambda: "01000000")
        monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
        monkeypatch.setattr(weight_socket.config_tree, "from_rollout", lambda config: config)
        monkeypatch.setattr(ServerAdapter, "__init__", begin)
        monkeypatch.setenv("VERL_RAY_JOB_ID", "01000000")
        monkeypatch.setenv("VERL_REPLICA_RANK", "0")
        if rhyme:
            weight_socket.receive_here()
        engine = object.__new__(vLLMColocateWorkerExtension)
        engine.model_runner, engine.local_rank = None, 0
        return RhymeServerAdapter("rhyme" if rhyme else None).zmq_handle, engine._get_zmq_handle()

    return call


@pytest.mark.parametrize("rhyme", [True, False])
def test_worker_and_engine_share_a_socket(sockets, rhyme):
    worker, engine = sockets("10.0.0.1:6379", rhyme)
    assert worker == engine
    assert len(worker.removeprefix("ipc://")) < 108, "the path is longer than a Unix socket allows"
    assert (worker != sockets("10.0.0.1:6380", rhyme)[0]) == rhyme, "two runs on different clusters"
