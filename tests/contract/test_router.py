"""Our router is one by verl's protocol as installed: its methods, its answers, its way into a run."""

from __future__ import annotations

import asyncio
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.router import GlobalRequestLoadBalancer, RequestLoadBalancer, _create_plugin_extension

from verl_rhyme.agent_loop.client import rhymed
from verl_rhyme.placement.assignment import ANYWHERE, Assignment
from verl_rhyme.router.router import PlacementRouter

METHODS = [name for name, value in vars(RequestLoadBalancer).items() if callable(value) and not name.startswith("_")]
SERVERS = {f"10.0.0.{i}:8000": f"handle {i}" for i in range(4)}
THERE = "10.0.0.2:8000"


def assigned(replica: str) -> dict[str, Any]:
    return {"rhyme": {"assignment": Assignment(replica=replica)}}


def test_the_protocol_is_the_one_we_know() -> None:
    assert len(METHODS) == 10


@pytest.mark.parametrize("name", METHODS)
def test_signatures_are_verls(name: str) -> None:
    def shape(cls: type) -> list[tuple[Any, ...]]:
        parameters = inspect.signature(getattr(cls, name)).parameters.values()
        return [(p.name, p.kind, p.default) for p in parameters if p.name != "_ray_trace_ctx"]  # an actor's, by then

    assert shape(PlacementRouter) == shape(RequestLoadBalancer)


def test_answers_are_those_of_verls_router() -> None:
    """The same events to both: the same counts, and where nothing is assigned the same choice."""
    ours, theirs = PlacementRouter(SERVERS), GlobalRequestLoadBalancer(SERVERS)
    for balancer in (ours, theirs):
        at = {f"r{i}": balancer.acquire_server(f"r{i}") for i in range(4)}
        assert sorted(at.values()) == sorted(SERVERS.items()), "each goes where the fewest are"
        assert balancer.acquire_server("r0") == at["r0"]
        balancer.release_server(at["r3"][0], request_id="r3")
        balancer.release_server("unknown", request_id="r2")
        balancer.remove_servers(["unknown"])
        balancer.add_servers({"10.0.0.9:8000": "handle 9"})
    mine, known = ours.get_status(), theirs.get_status()
    assert mine.keys() == known.keys()
    assert sorted(mine["servers"].values()) == sorted(known["servers"].values()) == [0, 0, 1, 1, 2]
    assert ours.clear_sticky_cache().keys() == theirs.clear_sticky_cache().keys()
    ours.remove_servers(ours.get_all_servers())
    with pytest.raises(RuntimeError, match="No available servers in load balancer"):
        ours.acquire_server("r0", **assigned(THERE))
    assert ours.get_total_inflight() == 0


def test_a_request_goes_where_it_was_assigned() -> None:
    balancer = PlacementRouter(SERVERS)
    for i in range(8):
        assert balancer.acquire_server(f"r{i}", **assigned(THERE)) == (THERE, SERVERS[THERE])
    assert balancer.get_inflight_count(THERE) == 8
    assert balancer.acquire_server("r0", **assigned("10.0.0.1:8000"))[0] == "10.0.0.1:8000", "it was moved"
    assert balancer.acquire_server("r0")[0] == "10.0.0.1:8000", "a later turn stays there"


@pytest.mark.parametrize("extra", [{}, {"rhyme": None}, {"rhyme": {}}, {"rhyme": {"assignment": ANYWHERE}}])
def test_what_is_assigned_nowhere_is_served(extra: dict[str, Any]) -> None:
    balancer = PlacementRouter(SERVERS)
    assert {balancer.acquire_server(f"r{i}", **extra)[0] for i in range(4)} == set(SERVERS)


def test_what_was_assigned_to_a_replica_that_is_gone_is_served_elsewhere() -> None:
    balancer = PlacementRouter(SERVERS)
    balancer.acquire_server("r", **assigned(THERE))
    balancer.remove_servers([THERE])
    assert balancer.acquire_server("r", **assigned(THERE))[0] in SERVERS.keys() - {THERE}


def test_it_says_who_serves_and_what_room_they_have() -> None:
    balancer = PlacementRouter({"a": 1, "b": 2})
    balancer.report_capacity("a", 1000)
    assert balancer.fleet() == {"a": (1, 1000), "b": (2, None)}
    balancer.remove_servers(["a"])
    balancer.add_servers({"a": 3})
    assert balancer.fleet() == {"b": (2, None), "a": (3, None)}, "as another it may have other room"


class Here:
    """Ray's side of an actor, without Ray: verl's real factories and clients run on it in this process."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            async def answer(value: Any) -> Any:
                return await value if inspect.isawaitable(value) else value

            try:
                return asyncio.ensure_future(answer(getattr(self._target, name)(*args, **kwargs)))
            except RuntimeError as error:
                future = asyncio.get_running_loop().create_future()
                future.set_exception(error)
                return future

        return SimpleNamespace(remote=call)


def test_verl_makes_it_from_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(ray, "remote", lambda cls: SimpleNamespace(remote=lambda *a, **k: Here(cls(*a, **k))))
    file = tmp_path / "router.yaml"
    file.write_text("router_class: verl_rhyme.router.router.PlacementRouter\n")
    made = _create_plugin_extension(SERVERS, str(file))._target
    assert type(made) is PlacementRouter
    assert made.get_all_servers() == list(SERVERS)


def test_ray_makes_an_actor_of_it() -> None:
    assert isinstance(ray.remote(PlacementRouter), ray.actor.ActorClass)


class Server:
    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    async def generate(self, **kwargs: Any) -> TokenOutput:
        self.asked.append(kwargs)
        return TokenOutput(token_ids=[1], log_probs=[0.0], stop_reason="completed")


def config() -> Any:
    rollout = SimpleNamespace(name="vllm", full_determinism=False, response_length=8)
    return SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))


@pytest.mark.parametrize("client_cls", [LLMServerClient, FullyAsyncLLMServerClient])
async def test_verls_clients_pass_the_keyword_on_and_release(client_cls: type) -> None:
    servers = [Server() for _ in range(4)]
    balancer = PlacementRouter({f"s{i}": Here(server) for i, server in enumerate(servers)})
    client = client_cls(config(), load_balancer_handle=Here(balancer))
    await asyncio.gather(
        *(client.generate(f"r{i}", prompt_ids=[1, 2], sampling_params={}, **assigned("s3")) for i in range(8))
    )
    await asyncio.sleep(0)
    assert [len(server.asked) for server in servers] == [0, 0, 0, 8]
    assert all(kwargs["rhyme"]["assignment"].replica == "s3" for kwargs in servers[3].asked)  # a server takes it off
    assert balancer.get_total_inflight() == 0


@pytest.mark.parametrize("ours", [False, True])
async def test_verls_client_waits_for_a_server_and_ours_too(ours: bool) -> None:
    balancer = PlacementRouter({})
    client = FullyAsyncLLMServerClient(config(), load_balancer_handle=Here(balancer), only_hybrid=True)
    client = rhymed(client) if ours else client
    waiting = asyncio.ensure_future(client.generate("r", prompt_ids=[1], sampling_params={}))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    balancer.add_servers({"late": Here(Server())})
    assert (await asyncio.wait_for(waiting, 10)).token_ids == [1]


def test_the_fields_are_known() -> None:
    assert PlacementRouter(SERVERS).require_acquire_fields() == ["rhyme"]
    assert PlacementRouter(SERVERS).require_release_fields() == []
