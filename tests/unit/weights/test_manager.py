"""The trainer's side of the relay: relays that die during its calls, and their replacement."""

from types import SimpleNamespace
from typing import ClassVar

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayTaskError

from verl_rhyme.config import WeightsConfig
from verl_rhyme.processes.deaths import WatchedCheckpointManager
from verl_rhyme.weights import manager as managers
from verl_rhyme.weights.engine import register
from verl_rhyme.weights.folder import UnsentError, WeightsError
from verl_rhyme.weights.manager import RelayManager


def raised(error):
    """Return an error of a replica, as it comes out of the relay's method."""
    return RayTaskError("deliver", str(error), error).as_instanceof_cause()


class Result:
    """The result or the error of a call; the caller gets it once it is there."""

    def __init__(self, value=None, error=None, there=True):
        self.value, self.error, self.there = value, error, there


class Relay:
    """The relay of a node; it dies in the calls named in ``dies_at``, and does not answer those in ``hangs_at``."""

    answers: ClassVar = {"folder": "/weights", "expect": "/weights", "has": True}

    def __init__(self, world, node):
        self.world, self.node, self.lives = world, node, True

    def __getattr__(self, name):
        return SimpleNamespace(remote=lambda *arguments: self.call(name, arguments))

    def call(self, name, arguments):
        world = self.world
        if world.dies_at[:1] == [name]:
            world.dies_at.pop(0)
            self.lives = False
        if not self.lives:
            return Result(error=ActorDiedError())
        if name == "has" and world.lost:
            return Result(False)
        if name == "deliver":
            target, version, *_ = arguments
            if error := world.failing.get(target.rank):
                return Result(error=error)
            world.taken.append((target.rank, version))
        return Result(self.answers.get(name), there=name not in world.hangs_at)


class Replica:
    """A replica; its worker does not answer the method ``hangs_at``."""

    def __init__(self, rank, node="n"):
        def remote(method, **_):
            return Result({"node": node} if method == "prepare" else None, self.error, method != self.hangs_at)

        worker = SimpleNamespace(remote=remote)
        self.replica_rank, self.servers, self.error, self.hangs_at = rank, [], None, ""
        self.workers = [SimpleNamespace(execute_checkpoint_engine=worker)]


class World:
    """One node, with the actor and two replicas."""

    def __init__(self, monkeypatch):
        self.dies_at, self.hangs_at, self.failing, self.lost = [], [], {}, False
        self.actor_hangs_at = []  # the method, of its only worker
        self.taken, self.relays, self.written = [], [], []
        ray = SimpleNamespace(
            get=self.get, put=lambda value: value, nodes=lambda: [], wait=lambda calls, **_: (calls, [])
        )
        ray.kill = lambda relay: setattr(relay, "lives", False)
        monkeypatch.setattr(managers, "ray", ray)
        monkeypatch.setattr(managers, "_PAUSE_S", 0)
        monkeypatch.setattr(managers.relay, "start", self.start)
        self.replicas = [Replica(rank) for rank in range(2)]
        actor = SimpleNamespace(
            world_size=1,
            execute_checkpoint_engine=lambda method, **_: [Result({"node": "n"}, there=method != self.actor_hangs_at)],
            update_weights=lambda global_steps, mode: self.written.append(global_steps) or [Result()],
        )
        register()
        config = SimpleNamespace(backend="relay", custom_backend_module=None, engine_kwargs={})
        self.manager = RelayManager(config, actor, self.replicas, WeightsConfig(), {})

    def start(self, node, *_):
        self.relays.append(Relay(self, node))
        return self.relays[-1]

    def get(self, calls, timeout=None):
        if not isinstance(calls, Result):
            return [self.get(call, timeout) for call in calls]
        if not calls.there:
            assert timeout is not None, "the trainer waits for ever"
            raise GetTimeoutError
        if calls.error is not None:
            raise calls.error
        return calls.value


@pytest.fixture
def world(monkeypatch):
    made = World(monkeypatch)
    made.manager.update_weights(1)
    assert made.taken == [(0, 1), (1, 1)]
    made.taken.clear()
    return made


@pytest.fixture
def background(world):
    """The trainer does not wait; one replica is on another node."""
    world.manager.waits = False
    world.manager.replicas.append(Replica(2, "far"))
    return world


@pytest.mark.parametrize("dies_at", [["deliver"], ["deliver", "has"], ["deliver", "deliver"], ["fetch"]])
def test_a_delivery_survives_relays_that_die_meanwhile(world, dies_at):
    world.manager.replicas.append(Replica(2, "far"))
    world.dies_at += dies_at
    world.manager.deliver(world.replicas)
    assert set(world.taken) == {(0, 1), (1, 1), (2, 1)}
    assert not world.dies_at


@pytest.mark.parametrize(("lost", "dies_at"), [(False, ["has"] * 100), (True, [])])
def test_weights_that_the_actors_node_has_lost_end_the_run(world, lost, dies_at):
    world.lost = lost
    world.dies_at += ["deliver", *dies_at]
    with pytest.raises(WeightsError, match="from the last checkpoint"):
        world.manager.deliver(world.replicas)
    assert len(world.relays) < 10


@pytest.mark.parametrize("dies_at", ["expect", "has"])
def test_a_relay_that_dies_during_a_publication_is_replaced(world, dies_at):
    world.dies_at.append(dies_at)
    world.manager.update_weights(2)
    assert world.taken[-2:] == [(0, 2), (1, 2)]
    assert world.written == [1, 2]
    assert len(world.relays) == 2


@pytest.mark.parametrize("error", [raised(UnsentError("not yet")), ActorUnavailableError("the network", None)])
def test_a_broken_link_has_time_to_come_back(world, monkeypatch, error):
    world.failing[1] = error
    monkeypatch.setattr(managers.time, "sleep", lambda _: world.failing.clear())
    world.manager.deliver(world.replicas)
    assert set(world.taken) == {(0, 1), (1, 1)}
    world.failing[1] = error
    monkeypatch.setattr(managers.time, "sleep", lambda _: None)
    monkeypatch.setattr(managers, "PATIENCE_S", 0.01)
    with pytest.raises(type(error)):
        world.manager.deliver(world.replicas)


def test_the_trainer_waits_only_for_the_actors_relay(background):
    background.hangs_at += ["fetch", "deliver"]
    background.manager.update_weights(2)
    assert background.written == [1, 2]
    assert background.manager.check() == 3
    background.hangs_at.clear()
    background.manager.finish_deliveries()
    assert background.manager.check() == 0
    assert set(background.taken) == {(0, 2), (1, 2), (2, 2)}
    with pytest.raises(WeightsError, match="version 2 is published after version 2"):
        background.manager.update_weights(2)


def test_a_relay_that_hangs_is_replaced(background, monkeypatch):
    background.hangs_at += ["fetch", "deliver"]
    background.manager.update_weights(2)
    monkeypatch.setattr(managers, "PATIENCE_S", -1.0)
    background.hangs_at.clear()
    assert background.manager.check() == 3  # its deliveries fail now
    assert [relay.lives for relay in background.relays if relay.node == "far"] == [False, True]
    background.manager.finish_deliveries()
    assert (2, 2) in background.taken


def test_other_weights_than_the_actors_are_reported_by_every_check(background):
    background.failing[1] = raised(WeightsError("replica 1 does not have the actor's weights"))
    background.manager.update_weights(2)
    for _ in range(2):
        with pytest.raises(WeightsError, match="replica 1 does not have"):
            background.manager.check()


def test_a_dead_replica_does_not_block_others_and_is_tried_again(background):
    gone = background.manager.replicas[2]
    gone.error = ActorDiedError()
    background.manager.update_weights(2)
    assert background.taken == [(0, 2), (1, 2)]
    assert background.manager.check() == 1
    gone.error = None
    assert [background.manager.check() for _ in range(2)] == [1, 0]
    assert background.taken[2:] == [(2, 2)]


@pytest.mark.parametrize("method", ["prepare", "init_process_group"])
def test_a_replica_whose_worker_hangs_does_not_block_others(background, method):
    background.manager.replicas[2].hangs_at = method
    background.manager.update_weights(2)
    assert background.taken == [(0, 2), (1, 2)]
    assert background.manager.check() == 1
    background.manager.replicas[2].hangs_at = ""
    assert [background.manager.check() for _ in range(2)] == [1, 0]


@pytest.mark.parametrize("method", ["prepare", "init_process_group"])
def test_training_workers_that_hang_end_the_run(world, method):
    world.manager._node, world.manager._actor_arguments = None, {}  # as at the first publication
    world.actor_hangs_at = [method]
    with pytest.raises(WeightsError, match=rf"did not answer {method} within 600 s.*\n.*from the last checkpoint"):
        world.manager.update_weights(2)


def test_a_replica_is_released_after_its_delivery(background):
    background.failing[1] = raised(UnsentError("not yet"))
    background.manager.update_weights(2)
    background.failing.clear()
    resting = background.manager.replicas.pop(1)
    background.manager.release(resting)
    assert (1, 2) in background.taken
    assert background.manager.check() == 0


def test_watched_methods_exist():
    watched = [name for name, value in vars(WatchedCheckpointManager).items() if callable(value) and name[0] != "_"]
    assert "finish_deliveries" in watched
    assert all(hasattr(RelayManager, name) for name in watched)
