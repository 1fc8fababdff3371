"""Relays that die during calls of the trainer, and their replacement."""

import threading
from contextlib import nullcontext as does_not_raise
from types import SimpleNamespace
from typing import ClassVar

import pytest
from ray.exceptions import ActorDiedError, RayActorError

from verl_rhyme.processes.deaths import WatchedCheckpointManager
from verl_rhyme.weights import manager as managers
from verl_rhyme.weights import samples
from verl_rhyme.weights.engine import register
from verl_rhyme.weights.folder import WeightsError
from verl_rhyme.weights.manager import RelayManager
from verl_rhyme.weights.samples import Held, Sent


class Result:
    """The result or the error of a call."""

    def __init__(self, value=None, error=None):
        self.value, self.error = value, error


class Relay:
    """The relay of a node; it dies in the calls named in ``dies_at``."""

    answers: ClassVar = {"folder": "/weights", "expect": "/weights", "publish": "identity", "recover": True}

    def __init__(self, world):
        self.world, self.lives = world, True

    def __getattr__(self, name):
        return SimpleNamespace(remote=lambda *arguments: self.call(name, arguments))

    def call(self, name, arguments):
        if name == self.world.hangs_at:
            assert self.world.goes_on.wait(10)
        if self.world.dies_at[:1] == [name]:
            self.world.dies_at.pop(0)
            self.lives = False
        if not self.lives:
            return Result(error=ActorDiedError())
        if name == "deliver":
            target, version, *_ = arguments
            if target.rank in self.world.dead:
                return Result(error=ActorDiedError())
            self.world.taken.append((target.rank, version))
        return Result(self.answers.get(name))


class Replica:
    def __init__(self, rank, node="n", error=None):
        worker = SimpleNamespace(
            remote=lambda method, **_: Result({"node": node} if method == "prepare" else None, self.error)
        )
        self.replica_rank, self.servers, self.error = rank, [], error
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
            execute_checkpoint_engine=lambda method, **_: [Result({"node": "n"})],
            update_weights=lambda global_steps, mode: self.written.append(global_steps) or [Result()],
        )
        register()
        config = SimpleNamespace(backend="relay", custom_backend_module=None, engine_kwargs={})
        self.manager = RelayManager(config, actor, self.replicas)

    def get(self, calls, timeout=None):
        if not isinstance(calls, Result):
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
    world.relays[0].lives = False
    world.manager.deliver([Replica(2)])
    assert world.taken == [(2, 1)]
    assert len(world.relays) == 2


@pytest.mark.parametrize("dies_at", [["deliver"], ["deliver", "recover"], ["deliver", "deliver"]])
def test_a_delivery_survives_relays_that_die_meanwhile(world, dies_at):
    world.dies_at += dies_at
    world.manager.deliver(world.replicas)
    assert world.taken[-2:] == [(0, 1), (1, 1)]


def test_relays_that_die_one_after_another_are_not_replaced_for_ever(world):
    world.dies_at += ["deliver", *["recover"] * 100]
    with pytest.raises(managers.WeightsError, match="from the last checkpoint"):
        world.manager.deliver(world.replicas)
    assert len(world.relays) < 10


@pytest.mark.parametrize("dies_at", ["expect", "folder", "publish"])
def test_a_version_is_written_again_after_a_death(world, dies_at):
    world.dies_at.append(dies_at)
    world.manager.update_weights(2)
    assert world.taken[-2:] == [(0, 2), (1, 2)]
    assert world.written in ([1, 2], [1, 2, 2])
    assert len(world.relays) == 2


def test_the_death_of_a_replica_is_raised(world):
    world.dead.append(1)
    with pytest.raises(RayActorError):
        world.manager.deliver(world.replicas)
    assert len(world.relays) == 1


def test_the_trainer_waits_only_for_the_actors_relay(world):
    world.manager.waits = False
    world.manager.replicas.append(Replica(2, "far"))
    world.hangs_at = "fetch"  # of the other node's
    world.manager.update_weights(2)
    assert world.written == [1, 2]
    assert world.manager.check() == 3, "check does not work during the distribution"
    assert world.taken == []
    world.goes_on.set()
    world.manager.finish_deliveries()
    assert set(world.taken) == {(0, 2), (1, 2), (2, 2)}


def test_a_relay_that_dies_in_the_background_is_replaced_without_the_actor(world):
    world.manager.waits = False
    world.dies_at.append("deliver")
    world.manager.update_weights(2)
    world.manager.finish_deliveries()
    assert world.written == [1, 2]
    assert set(world.taken[-2:]) == {(0, 2), (1, 2)}


def test_weights_lost_in_the_background_are_reported_by_the_next_check(world):
    world.manager.waits = False
    world.manager.replicas.append(Replica(2, "far"))
    world.hangs_at = "fetch"
    world.manager.update_weights(2)
    world.dies_at += ["fetch", *["recover"] * 100]
    next(relay for relay in world.relays if relay.lives).lives = False  # the actor's
    world.goes_on.set()
    with pytest.raises(managers.WeightsError, match="from the last checkpoint"):
        world.manager.finish_deliveries()
    world.dies_at.clear()
    world.hangs_at = None
    world.manager.update_weights(3)
    world.manager.finish_deliveries()
    assert set(world.taken[-3:]) == {(0, 3), (1, 3), (2, 3)}


def test_a_dead_replica_does_not_block_others(world):
    world.manager.waits = False
    world.manager.replicas.append(Replica(2, error=ActorDiedError()))
    world.manager.update_weights(2)
    world.manager.finish_deliveries()
    assert world.taken == [(0, 2), (1, 2)]


def test_a_replica_out_of_reach_after_a_failed_delivery_is_tried_again(world):
    world.manager.waits = False
    world.dies_at.append("deliver")
    world.manager.update_weights(2)
    world.manager._join()
    world.replicas[1].error = ActorDiedError()
    assert world.manager.check() == 2
    world.replicas[1].error = None
    assert world.manager.check() == 0
    assert world.taken == [(0, 2), (1, 2)]


def test_a_failed_distribution_is_raised_by_every_check_and_not_as_one_replicas_error(world, monkeypatch):
    def failing(replicas):
        raise WeightsError("no room")

    world.manager.waits = False
    monkeypatch.setattr(world.manager, "_distribute", failing)
    world.manager.update_weights(2)
    world.manager._join()  # as release does
    for _ in range(2):
        with pytest.raises(WeightsError, match="no room"):
            world.manager.check()


def test_watched_methods_exist():
    watched = [name for name, value in vars(WatchedCheckpointManager).items() if callable(value) and name[0] != "_"]
    assert "finish_deliveries" in watched
    assert all(hasattr(RelayManager, name) for name in watched)


def test_only_deltas_are_not_compared(caplog):
    """They have no tensors that an engine loads; the log says so."""
    samples.log_uncompared.cache_clear()
    theirs = SimpleNamespace(backend="delta_sharded", config=None, actor_wg=None, replicas=[])
    assert managers.choose_manager(theirs, managers.WeightsConfig(), {}) is theirs
    assert "delta_sharded sends only what changed" in caplog.text
    theirs.backend = "nixl"
    assert isinstance(managers.choose_manager(theirs, managers.WeightsConfig(), {}), managers.ComparingManager)


def test_a_version_of_which_no_tensor_is_compared_is_compared_all_the_same():
    """Adapters of two layers, of which every fourth is compared."""
    actor = SimpleNamespace(sent_weights=lambda: [Sent(2), None])
    for version, differs in ((2, does_not_raise()), (1, pytest.raises(managers.WeightsError, match="version 1 last"))):
        held = SimpleNamespace(remote=lambda version=version: [vars(Held(version))])
        replica = SimpleNamespace(replica_rank=0, servers=[SimpleNamespace(held_weights=held)])
        with pytest.MonkeyPatch.context() as patch, differs:
            patch.setattr(managers, "ray", SimpleNamespace(get=lambda calls: calls))
            managers.compare_replicas(actor, [replica])
