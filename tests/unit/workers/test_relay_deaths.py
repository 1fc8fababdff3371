"""Relays that die while the trainer asks them for something, and who does it in their place."""

import threading
from types import SimpleNamespace
from typing import ClassVar

import pytest
from ray.exceptions import ActorDiedError, RayActorError

from verl_rhyme.weights import manager as managers
from verl_rhyme.weights.engine import register
from verl_rhyme.weights.folder import WeightsError
from verl_rhyme.weights.manager import RelayManager


class Told:
    """What a call gives, or raises."""

    def __init__(self, value=None, error=None):
        self.value, self.error = value, error


class Relay:
    """Of a node; it dies when it is asked for what ``dies_at`` names."""

    answers: ClassVar = {"folder": "/weights", "written": "identity", "revive": True}

    def __init__(self, world):
        self.world, self.lives = world, True

    def __getattr__(self, name):
        return SimpleNamespace(remote=lambda *arguments: self.asked(name, arguments))

    def asked(self, name, arguments):
        if name == self.world.hangs_at:
            assert self.world.goes_on.wait(10)
        if self.world.dies_at[:1] == [name]:
            self.world.dies_at.pop(0)
            self.lives = False
        if not self.lives:
            return Told(error=ActorDiedError())
        if name == "deliver":
            target, version, *_ = arguments
            if target.rank in self.world.dead:
                return Told(error=ActorDiedError())
            self.world.taken.append((target.rank, version))
        return Told(self.answers.get(name))


class Replica:
    def __init__(self, rank, node="n", error=None):
        worker = SimpleNamespace(
            remote=lambda method, **_: Told({"node": node} if method == "prepare" else None, error)
        )
        self.replica_rank, self.servers = rank, []
        self.workers = [SimpleNamespace(execute_checkpoint_engine=worker)]


class World:
    """One node, with the actor and two replicas."""

    def __init__(self, monkeypatch):
        self.dies_at, self.dead, self.taken, self.relays, self.written = [], [], [], [], []
        self.hangs_at, self.goes_on = None, threading.Event()
        done = lambda calls, **_: (calls, [])  # noqa: E731
        ray = SimpleNamespace(get=self.get, nodes=lambda: [], wait=done, kill=lambda relay: None)
        monkeypatch.setattr(managers, "ray", ray)
        monkeypatch.setattr(managers, "_PAUSE_S", 0)
        monkeypatch.setattr(managers.relay, "start", lambda *_: self.relays.append(Relay(self)) or self.relays[-1])
        self.replicas = [Replica(rank) for rank in range(2)]
        actor = SimpleNamespace(
            world_size=1,
            execute_checkpoint_engine=lambda method, **_: [Told({"node": "n"})],
            update_weights=lambda global_steps, mode: self.written.append(global_steps) or [Told()],
        )
        register()
        config = SimpleNamespace(backend="relay", custom_backend_module=None, engine_kwargs={})
        self.manager = RelayManager(config, actor, self.replicas)

    def get(self, calls, timeout=None):
        if not isinstance(calls, Told):
            return [self.get(call) for call in calls]
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


def test_a_new_replica_gets_its_weights_though_the_relay_died_before(world):
    """As one that takes a dead one's place does."""
    world.relays[0].lives = False
    world.manager.deliver([Replica(2)])
    assert world.taken == [(2, 1)]
    assert len(world.relays) == 2


@pytest.mark.parametrize("dies_at", [["deliver"], ["deliver", "revive"], ["deliver", "deliver"]])
def test_or_dies_meanwhile(world, dies_at):
    world.dies_at += dies_at
    world.manager.deliver(world.replicas)
    assert world.taken[-2:] == [(0, 1), (1, 1)]


def test_heirs_that_die_one_after_another_are_not_tried_for_ever(world):
    world.dies_at += ["deliver", *["revive"] * 100]
    with pytest.raises(managers.WeightsError, match="from the last checkpoint"):
        world.manager.deliver(world.replicas)
    assert len(world.relays) < 10


@pytest.mark.parametrize("dies_at", ["expect", "folder", "written"])
def test_a_version_is_written_once_more(world, dies_at):
    world.dies_at.append(dies_at)
    world.manager.update_weights(2)
    assert world.taken[-2:] == [(0, 2), (1, 2)]
    assert world.written in ([1, 2], [1, 2, 2])
    assert len(world.relays) == 2


def test_another_death_is_told(world):
    world.dead.append(1)
    with pytest.raises(RayActorError):
        world.manager.deliver(world.replicas)
    assert len(world.relays) == 1


def test_the_trainer_waits_for_no_relay_but_its_own(world):
    world.manager.waits = False
    world.manager.replicas.append(Replica(2, "far"))
    world.hangs_at = "fetch"  # of the other node's
    world.manager.update_weights(2)
    assert world.written == [1, 2]
    assert world.manager.check() == 3, "the trainer may look meanwhile"
    assert world.taken == []
    world.goes_on.set()
    world.manager.settle()
    assert set(world.taken) == {(0, 2), (1, 2), (2, 2)}


def test_a_relay_that_dies_behind_the_trainers_back_is_replaced_without_the_actor(world):
    world.manager.waits = False
    world.dies_at.append("deliver")
    world.manager.update_weights(2)
    world.manager.settle()
    assert world.written == [1, 2]
    assert set(world.taken[-2:]) == {(0, 2), (1, 2)}


def test_weights_that_are_lost_behind_the_trainers_back_are_told_at_its_next_look(world):
    world.manager.waits = False
    world.manager.replicas.append(Replica(2, "far"))
    world.hangs_at = "fetch"
    world.manager.update_weights(2)
    world.dies_at += ["fetch", *["revive"] * 100]
    next(relay for relay in world.relays if relay.lives).lives = False  # the actor's
    world.goes_on.set()
    with pytest.raises(managers.WeightsError, match="from the last checkpoint"):
        world.manager.settle()
    world.dies_at.clear()
    world.hangs_at = None
    world.manager.update_weights(3)
    world.manager.settle()
    assert set(world.taken[-3:]) == {(0, 3), (1, 3), (2, 3)}


def test_a_replica_that_is_dead_keeps_no_other_from_new_weights(world):
    world.manager.waits = False
    world.manager.replicas.append(Replica(2, error=ActorDiedError()))
    world.manager.update_weights(2)
    world.manager.settle()
    assert world.taken == [(0, 2), (1, 2)]


def test_a_hand_out_that_failed_is_raised_at_every_look_and_not_as_one_replicas_error(world, monkeypatch):
    def failing(replicas):
        raise WeightsError("no room")

    world.manager.waits = False
    monkeypatch.setattr(world.manager, "_distribute", failing)
    world.manager.update_weights(2)
    world.manager._join()  # as whoever lets a replica rest does
    for _ in range(2):
        with pytest.raises(WeightsError, match="no room"):
            world.manager.check()
