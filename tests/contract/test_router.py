"""Our router is one by verl's protocol as installed: its methods, its answers, its way into a run."""

from __future__ import annotations

import asyncio
import inspect
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.router import (
    GlobalRequestLoadBalancer,
    RequestLoadBalancer,
    _create_plugin_extension,
)

from verl_rhyme.agent_loop.client import rhymed
from verl_rhyme.placement import POLICIES
from verl_rhyme.placement.assignment import Assignment
from verl_rhyme.router.router import PlacementRouter

METHODS = [name for name, value in vars(RequestLoadBalancer).items() if callable(value) and not name.startswith("_")]
SERVERS = {f"10.0.0.{i}:8000": f"handle {i}" for i in range(4)}


def keyed(key: str, **more: Any) -> dict[str, Any]:
    return {"rhyme": {"key": key, **more}}


def test_the_protocol_is_the_one_we_know() -> None:
    assert len(METHODS) == 10


@pytest.mark.parametrize("name", METHODS)
def test_signatures_are_verls(name: str) -> None:
    def shape(cls: type) -> list[tuple[Any, ...]]:
        parameters = inspect.signature(getattr(cls, name)).parameters.values()
        return [(p.name, p.kind, p.default) for p in parameters if p.name != "_ray_trace_ctx"]  # an actor's, by then

    assert shape(PlacementRouter) == shape(RequestLoadBalancer)


@pytest.mark.parametrize("policy", POLICIES)
def test_answers_are_of_verls_kind(policy: str) -> None:
    """The same events to both: the same keys, and where placement does not matter the same values."""
    ours, theirs = PlacementRouter(SERVERS, {"policy": policy}), GlobalRequestLoadBalancer(SERVERS)
    for balancer in (ours, theirs):
        at = {}
        for i in range(4):
            server_id, handle = balancer.acquire_server(f"r{i}")
            at[f"r{i}"] = server_id
            assert handle == SERVERS[server_id]
        assert balancer.acquire_server("r0")[0] == at["r0"]
        balancer.release_server(server_id, request_id="r3")
        balancer.release_server("unknown", request_id="r2")
        balancer.remove_servers(["10.0.0.3:8000", "unknown"])
        balancer.add_servers({"10.0.0.9:8000": "handle 9"})
    mine, known = ours.get_status(), theirs.get_status()
    assert mine.keys() >= known.keys()
    assert mine["registered_handles"] == known["registered_handles"]
    assert mine["active_servers"] == known["active_servers"]
    assert ours.get_all_servers() == theirs.get_all_servers()
    assert ours.get_total_inflight() == sum(mine["servers"].values()) == mine["total_inflight"]
    assert all(ours.get_inflight_count(name) == count for name, count in mine["servers"].items())
    assert ours.get_inflight_count("10.0.0.3:8000") == 0
    cleared = ours.clear_sticky_cache()
    assert cleared.keys() == theirs.clear_sticky_cache().keys()
    assert (cleared["cleared_entries"], ours.clear_sticky_cache()["cleared_entries"]) == (4, 0)
    ours.remove_servers(ours.get_all_servers())
    with pytest.raises(RuntimeError, match="No available servers in load balancer"):
        ours.acquire_server("r0")
    assert ours.get_status()["total_inflight"] == 0


def test_a_release_after_its_server_left_and_came_back_changes_nothing() -> None:
    """separate_async: hybrid replicas leave first, are aborted then, and come back under the same address."""
    balancer = PlacementRouter({"a": 1})
    balancer.acquire_server("old")
    balancer.remove_servers(["a"])
    balancer.add_servers({"a": 2})
    assert balancer.acquire_server("new") == ("a", 2)
    balancer.release_server("a", request_id="old")
    assert balancer.get_total_inflight() == 1


@pytest.mark.parametrize("extra", [keyed("00ff"), keyed("00ff", attempt=0, group=9)])
def test_siblings_meet(extra: dict[str, Any]) -> None:
    balancer = PlacementRouter(SERVERS)
    balancer.expect(64)
    home = balancer.acquire_server("first", **keyed("00ff"))
    assert [balancer.acquire_server(f"r{i}", **extra) for i in range(9)] == [home] * 9


@pytest.mark.parametrize(
    "extra",
    [
        {"rhyme": "no mapping"},
        keyed("k", group="many"),
        keyed("k", assignment="somewhere"),
    ],
)
def test_what_cannot_be_read_is_served(extra: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    balancer = PlacementRouter(SERVERS)
    with caplog.at_level(logging.WARNING):
        for i in range(8):
            balancer.acquire_server(f"r{i}", **extra)
    assert set(balancer.get_status()["servers"].values()) == {2}
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "extra",
    [{}, keyed(""), {"rhyme": None}, keyed("k", assignment=Assignment(expected_tokens=10**30)), keyed("k", group=-5)],
)
def test_what_is_odd_is_served_without_a_word(extra: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    balancer = PlacementRouter(SERVERS)
    where = [balancer.acquire_server(f"r{i}", **extra)[0] for i in range(8)]
    for i, server_id in enumerate(where):
        balancer.release_server(server_id, request_id=f"r{i}")
    assert balancer.get_total_inflight() == 0
    assert balancer.get_status()["policy_errors"] == 0
    assert not caplog.records


def test_a_policy_that_fails_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    balancer = PlacementRouter(SERVERS)
    balancer._placement.policy.choose = None  # type: ignore[method-assign, assignment]
    with caplog.at_level(logging.WARNING):
        for i in range(8):
            balancer.acquire_server(f"r{i}", **keyed("k"))
    status = balancer.get_status()
    assert set(status["servers"].values()) == {2}
    assert (status["policy_errors"], status["request_imbalance"]) == (8, 1.0)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "sticky_group failed" in caplog.text


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"polic": "x"}, "has no polic; it has policy and options"),
        ({"policy": "x"}, "least_loaded, .*sticky_group"),
        ({"options": {"factr": 2}}, "options for sticky_group: .*factr"),
        ({"options": {"factor": 0.5}}, "above 1"),
    ],
)
def test_a_wrong_setting_is_told(config: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        PlacementRouter(SERVERS, config)


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


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "remote", lambda cls: SimpleNamespace(remote=lambda *a, **k: Here(cls(*a, **k))))


def test_verl_makes_it_from_a_file(no_ray: None, tmp_path: Any) -> None:
    file = tmp_path / "router.yaml"
    file.write_text(
        "router_class: verl_rhyme.router.router.PlacementRouter\npolicy: sticky_group\noptions: {factor: 1.5}\n"
    )
    made = _create_plugin_extension(SERVERS, str(file))._target
    assert (made.get_status()["policy"], made._placement.policy._factor) == ("sticky_group", 1.5)
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
    balancer.expect(100)
    client = client_cls(config(), load_balancer_handle=Here(balancer))
    await asyncio.gather(
        *(
            client.generate(f"r{i}", prompt_ids=[1, 2], sampling_params={}, **keyed("k", sample=i, group=8))
            for i in range(8)
        )
    )
    await asyncio.sleep(0)
    assert sorted(len(server.asked) for server in servers) == [0, 0, 0, 8]
    asked = next(server.asked for server in servers if server.asked)
    assert all(kwargs["rhyme"]["key"] == "k" for kwargs in asked)  # a server has to take it off
    assert balancer.get_total_inflight() == 0
    assert balancer.get_status()["placed"] == 8


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
    assert PlacementRouter(SERVERS).require_release_fields() == ["request_id"]
