"""verl's NCCL engine with a changing set of replicas: the process group is rebuilt only on changes.

There is no NCCL here: ``ray.util.collective`` is a table of group members. Calls that would wait for ever raise.
"""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError
from verl.checkpoint_engine import base
from verl.checkpoint_engine.base import CheckpointEngineManager, CheckpointEngineRegistry

from verl_rhyme.processes.deaths import ReplicaDied
from verl_rhyme.weights.broadcast import KeptGroup


class Groups:
    """The functions of ``ray.util.collective`` that the engine calls, in the process :attr:`here`."""

    def __init__(self):
        self.here, self.built, self.met = None, 0, {}

    def is_group_initialized(self, name):
        return name in self.here.groups

    def init_collective_group(self, world_size, rank, backend, name):
        if name in self.here.groups:
            raise RuntimeError("Trying to initialize a group a second time.")
        if rank == 0:
            self.built += 1
            self.met[self.built] = {}
        members = self.met[self.built]
        assert len(members) < world_size, "more members than the size of the group"
        members[rank] = self.here
        self.here.groups[name] = (self.built, world_size)

    def destroy_collective_group(self, name):
        del self.here.groups[name]

    def barrier(self, name):
        assert name in self.here.groups

    def check(self, workers, name="default"):
        """Check that exactly these workers form one group: else a broadcast never ends."""
        numbers = {worker.groups[name] for worker in workers}
        assert len(numbers) == 1, "in different groups"
        [(number, size)] = numbers
        assert [self.met[number][rank] for rank in range(size)] == workers


class Worker:
    """A process with verl's engine."""

    def __init__(self, groups, engine):
        self.groups, self.world, self.alive, self.stuck = {}, groups, True, False
        self.engine = engine(bucket_size=1 << 20, multi_sender=False)
        self.execute_checkpoint_engine = SimpleNamespace(remote=self.execute)

    def execute(self, method, *args, **kwargs):
        if not self.alive:
            return RayActorError()
        if self.stuck and method == "finalize":
            return GetTimeoutError("not yet")
        self.world.here = self
        return getattr(self.engine, method)(*args, **kwargs)


class WorkerGroup:
    """verl's worker group, with workers in this process."""

    def __init__(self, worker_handles, ray_cls_with_init=None):
        self.workers, self.world_size = worker_handles, len(worker_handles)

    def execute_checkpoint_engine(self, method, *args, **kwargs):
        rows = range(self.world_size)
        return [
            self.workers[row].execute(method[row], *(a[row] for a in args), **{k: v[row] for k, v in kwargs.items()})
            for row in rows
        ]

    def update_weights(self, **_):
        return [None] * self.world_size


class Replica:
    def __init__(self, workers):
        self.workers = workers

    def __getattr__(self, name):
        async def done(**_):
            pass

        return done


def answer(calls, timeout=None):
    for call in calls if isinstance(calls, list) else [calls]:
        if isinstance(call, Exception):
            raise call
    return calls


@pytest.fixture(scope="module")
def nccl():
    """verl's module, with a stub of cupy."""
    cupy = ModuleType("cupy")
    cupy.ndarray = torch.Tensor
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", cupy)
        patch.setattr(CheckpointEngineRegistry, "_registry", dict(CheckpointEngineRegistry._registry))
        patch.delitem(sys.modules, "verl.checkpoint_engine.nccl_checkpoint_engine", raising=False)
        yield importlib.import_module("verl.checkpoint_engine.nccl_checkpoint_engine")
        del sys.modules["verl.checkpoint_engine.nccl_checkpoint_engine"]


@pytest.fixture
def world(nccl, monkeypatch):
    groups, master = Groups(), nccl.MasterMetadata("127.0.0.1", 1, False)
    monkeypatch.setattr(nccl, "collective", groups)
    monkeypatch.setattr(nccl.NCCLCheckpointEngine, "prepare", lambda self: nccl.WorkerMetadata("node", master))
    # garbage collection of its context would wait for a socket that is never closed
    monkeypatch.setattr(nccl.NCCLCheckpointEngine, "_connect_zmq_client", lambda self, metadata: None)
    monkeypatch.setattr(base, "RayWorkerGroup", WorkerGroup)
    monkeypatch.setattr(ray, "get", answer)
    monkeypatch.setattr(ray, "wait", lambda calls, **_: (calls, []))
    return SimpleNamespace(groups=groups, engine=nccl.NCCLCheckpointEngine)


def ours(theirs):
    return KeptGroup(theirs.config, theirs.actor_wg, theirs.replicas)


class Run:
    def __init__(self, world, make):
        self.world = world
        self.actor = [self.worker() for _ in range(2)]
        config = SimpleNamespace(backend="nccl", custom_backend_module=None, engine_kwargs={})
        self.manager = make(CheckpointEngineManager(config, WorkerGroup(self.actor), [self.replica(), self.replica()]))

    def worker(self):
        return Worker(self.world.groups, self.world.engine)

    def replica(self):
        return Replica([self.worker(), self.worker()])

    def sync(self, times=1):
        for step in range(times):
            self.manager.update_weights(step)
            self.check(self.manager.replicas)

    def check(self, replicas):
        self.world.groups.check([self.actor[0], *(worker for replica in replicas for worker in replica.workers)])

    def replace(self):
        dead, *living = self.manager.replicas
        for worker in dead.workers:
            worker.alive = False
        return living, self.replica()


def test_without_a_death_the_group_is_built_once_as_in_stock_verl(world):
    for make in (lambda manager: manager, ours):
        run = Run(world, make)
        before = world.groups.built
        run.sync(5)
        assert world.groups.built - before == 1


def test_stock_verl_fails_after_a_death(world):
    run = Run(world, lambda manager: manager)
    run.sync()
    living, new = run.replace()
    run.manager.replicas = [*living, new]
    with pytest.raises((AssertionError, RuntimeError)):
        run.sync()


def test_after_a_death_the_group_is_built_for_the_new_replica_and_for_all_and_is_kept(world):
    run = Run(world, ours)
    run.sync(3)
    living, new = run.replace()
    run.manager.replicas = living
    run.manager.deliver([new], 3)
    run.check([new])
    run.manager.replicas = [*living, new]
    run.sync(4)
    assert world.groups.built == 3


def test_a_resting_replica_leaves_the_group_and_returns(world):
    run = Run(world, ours)
    run.sync()
    first, second = run.manager.replicas
    run.manager.replicas = [second]
    run.sync(2)
    assert not any(worker.groups for worker in first.workers)
    run.manager.deliver([first], 2)
    run.manager.replicas = [second, first]
    run.sync(2)
    assert world.groups.built == 4


def test_a_worker_that_cannot_leave_ends_the_run_instead_of_a_hang(world, monkeypatch):
    """For example with a communicator that has a dead member."""
    run = Run(world, ours)
    run.sync()
    living, new = run.replace()
    run.manager.replicas = living
    living[0].workers[0].stuck = True
    with pytest.raises(ReplicaDied, match="have not left the process group"):
        run.manager.deliver([new], 1)
