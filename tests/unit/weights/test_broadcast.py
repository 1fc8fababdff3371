"""Carriers over verl's backends: weights are compared, and a failure while the actor sends ends the run."""

from contextlib import nullcontext as does_not_raise
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorUnavailableError
from verl.checkpoint_engine import CheckpointEngineManager

from verl_rhyme.config.backends import BACKENDS, backend
from verl_rhyme.processes.deaths import ReplicaDied
from verl_rhyme.weights import broadcast
from verl_rhyme.weights.broadcast import Broadcast
from verl_rhyme.weights.folder import WeightsError
from verl_rhyme.weights.samples import Held, Sent


@pytest.fixture
def engines(monkeypatch):
    """A carrier of the backend ``naive``, and the replicas of each of its syncs; engines hold version 1."""
    held = SimpleNamespace(remote=lambda: [vars(Held(1))])
    one, other = (SimpleNamespace(replica_rank=n, servers=[SimpleNamespace(held_weights=held)]) for n in range(2))
    actor = SimpleNamespace(sent_weights=lambda: [None, Sent(2)])
    monkeypatch.setattr(broadcast, "ray", SimpleNamespace(get=lambda calls: calls))
    carrier = Broadcast(SimpleNamespace(backend="naive", custom_backend_module=None), actor, [one, other])
    carrier.syncs = []
    monkeypatch.setattr(CheckpointEngineManager, "update_weights", lambda self, _: self.syncs.append(self.replicas))
    return carrier


@pytest.mark.parametrize("version", [1, 2])
def test_a_version_of_which_no_tensor_is_compared_is_compared_all_the_same(engines, version):
    """Adapters of two layers, of which every fourth is compared."""
    engines.actor_wg.sent_weights = lambda: [None, Sent(version)]
    with does_not_raise() if version == 1 else pytest.raises(WeightsError, match="version 1 last"):
        engines.update_weights(version)


def test_only_deltas_are_not_compared(engines, caplog):
    """They have no tensors that an engine loads; the log says so."""
    engines._uncompared = BACKENDS["delta_sharded"].uncompared
    engines.update_weights(2)
    assert "delta_sharded sends only what changed" in caplog.text
    assert [name for name, each in BACKENDS.items() if each.uncompared] == ["delta_sharded"]


def test_weights_go_to_new_replicas_alone(engines):
    engines.actor_wg.sent_weights = lambda: [None, Sent(1)]
    one, other = engines.replicas
    engines.replicas = [one]
    engines.deliver([other], 1)
    assert (engines.syncs, engines.replicas) == ([[other]], [one])


@pytest.mark.parametrize(
    ("error", "expected"), [(ActorUnavailableError("it died", None), ReplicaDied), (WeightsError("no"), WeightsError)]
)
def test_a_failed_send_ends_the_run(engines, monkeypatch, error, expected):
    """The actor may still be sending, so that no other replica can start."""

    def fail(*_):
        raise error

    monkeypatch.setattr(CheckpointEngineManager, "update_weights", fail)
    before = engines.replicas
    with pytest.raises(expected):
        engines.deliver(before[:1], 1)
    assert engines.replicas is before


def test_backends_that_cannot_send_to_a_single_replica():
    stopped = [name for name in [*BACKENDS, "a user's"] if backend(name).obstacle(8)]
    assert stopped == ["kimi_ckpt_engine", "delta_sharded"] == [name for name in BACKENDS if backend(name).obstacle()]
    assert backend("nixl").obstacle(1)
