"""The router follows assignments, and otherwise does what verl's does."""

import pytest

from verl_rhyme.placement.assignment import ANYWHERE, Assignment
from verl_rhyme.router.router import PlacementRouter

SERVERS = {f"10.0.0.{i}:8000": f"handle {i}" for i in range(4)}
THERE = "10.0.0.2:8000"


def assigned(replica):
    return {"rhyme": {"assignment": Assignment(replica=replica)}}


def test_request_goes_to_its_assigned_replica():
    router = PlacementRouter(SERVERS)
    for i in range(8):
        assert router.acquire_server(f"r{i}", **assigned(THERE)) == (THERE, SERVERS[THERE])
    assert router.get_inflight_count(THERE) == 8
    assert router.acquire_server("r0", **assigned("10.0.0.1:8000"))[0] == "10.0.0.1:8000", "it was moved"
    assert router.acquire_server("r0")[0] == "10.0.0.1:8000", "a later turn stays there"


@pytest.mark.parametrize("extra", [{}, {"rhyme": None}, {"rhyme": {"assignment": ANYWHERE}}])
def test_request_without_assignment_goes_to_the_least_loaded_replica(extra):
    router = PlacementRouter(SERVERS)
    assert {router.acquire_server(f"r{i}", **extra)[0] for i in range(4)} == set(SERVERS)


def test_request_of_a_removed_replica_goes_to_another():
    router = PlacementRouter(SERVERS)
    router.acquire_server("r", **assigned(THERE))
    router.remove_servers([THERE])
    assert router.acquire_server("r", **assigned(THERE))[0] in SERVERS.keys() - {THERE}
    router.remove_servers(router.get_all_servers())
    with pytest.raises(RuntimeError, match="No available servers in load balancer"):  # our client waits then
        router.acquire_server("r", **assigned(THERE))


def test_fleet_lists_serving_replicas_with_their_capacity():
    router = PlacementRouter({"a": 1, "b": 2})
    router.report_capacity("a", 1000)
    assert router.fleet() == {"a": (1, 1000), "b": (2, None)}
    router.remove_servers(["a"])
    router.add_servers({"a": 3})
    assert router.fleet() == {"b": (2, None), "a": (3, None)}, "a new replica may have another capacity"
