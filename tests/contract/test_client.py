"""The LLM client with verl's classes and real actors: the data that servers and routers get, and the results."""

from __future__ import annotations

import asyncio
import pickle
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.router import GlobalRequestLoadBalancer, _create_global_sticky_inflight
from vllm.v1.engine.exceptions import EngineDeadError

from verl_rhyme.agent_loop.client import RhymeLLMServerClient, rhymed
from verl_rhyme.agent_loop.session import Session, current, set_current
from verl_rhyme.history.keys import prompt_key, turn_key
from verl_rhyme.placement.assignment import Assignment
from verl_rhyme.processes.request import FIELD, RequestMeta
from verl_rhyme.router.router import PlacementRouter
from verl_rhyme.sampling.noise import key_of
from verl_rhyme.scheduling.attempts import Attempt

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # no worker can import it

pytestmark = pytest.mark.xdist_group("client")  # they share a cluster
ACTORS = pytest.mark.slow  # each of their processes takes seconds to start

N = 4
PROMPT = [3, 1, 4, 1, 5]


class Watched(PlacementRouter):
    """Router that records its calls."""

    def __init__(self, servers: dict[str, Any]) -> None:
        super().__init__(servers)
        self.received: list[dict[str, Any]] = []

    def begin(self, servers: dict[str, Any]) -> None:
        self.__init__(servers)  # type: ignore[misc]

    def acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        self.received.append(extra)
        return super().acquire_server(request_id, **extra)

    def take_received(self) -> list[dict[str, Any]]:
        received, self.received = self.received, []
        return received


class Server:
    """A server that behaves in one of these ways, from :meth:`become` on.

    - "well": Stops each response after two tokens, the first ``stops`` times.
    - "cut": Generates two tokens, and stops on an abort.
    - "slow": Never answers, and records the aborted requests.
    - "engine": Its engine is dead.
    - "bug": Lives and fails.
    """

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.become("well")

    def become(self, how: str, stops: int = 0) -> None:
        self.how, self.stops, self.aborted = how, stops, asyncio.Event()

    async def generate(self, **kwargs: Any) -> TokenOutput:
        if self.how == "engine":
            raise EngineDeadError()
        if self.how == "bug":
            raise ValueError("no such option")
        self.asked.append(kwargs)
        if self.how == "slow":
            await asyncio.sleep(3600)
        if self.how == "cut":
            self.running = kwargs["request_id"]
            await asyncio.wait_for(self.aborted.wait(), 60)
            return TokenOutput(
                token_ids=[0, 8],
                log_probs=[0.0, -2.0],
                stop_reason="aborted",
                extra_fields={FIELD: [{"response_tokens": 2, "version": 0}], "global_steps": 0},
            )
        meta = RequestMeta(**kwargs[FIELD])
        stopped, self.stops = self.stops > 0, max(0, self.stops - 1)
        record = {"prompt_key": meta.key, "sample": meta.sample, "request": meta.request, "response_tokens": 2}
        return TokenOutput(
            token_ids=[7, 8],
            log_probs=[-1.0, -2.0],
            stop_reason="aborted" if stopped else "completed",
            extra_fields={FIELD: [record], "global_steps": 1},
        )

    async def abort_request(self, request_id: str, reset_prefix_cache: bool = True) -> None:
        assert not reset_prefix_cache
        if self.how == "cut":
            assert request_id == self.running
            self.aborted.set()
        else:
            self.asked.append({"aborted": request_id})

    def take_asked(self) -> list[dict[str, Any]]:
        asked, self.asked = self.asked, []
        return asked

    async def wait_for_one(self) -> dict[str, Any]:
        while not self.asked:
            await asyncio.sleep(0.01)
        return self.asked.pop()


def config() -> Any:
    rollout = SimpleNamespace(
        name="vllm", full_determinism=False, response_length=8, prompt_length=8, n=N, val_kwargs=SimpleNamespace(n=1)
    )
    return SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout), data={})


@pytest.fixture(scope="module")
def cluster() -> Any:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def processes(cluster: None) -> list[Any]:
    return [ray.remote(num_cpus=0)(Server).remote() for _ in range(2)]


@pytest.fixture
def servers(processes: list[Any]) -> list[Any]:
    """Two servers, as new."""
    ray.get([server.become.remote("well") for server in processes])
    asked_of(processes)
    return processes


@pytest.fixture(scope="module")
def router(cluster: None) -> Any:
    return ray.remote(Watched).remote({})


@pytest.fixture
def balancer(router: Any, servers: list[Any]) -> Any:
    """Our router, as new."""
    ray.get(router.begin.remote({f"s{i}": server for i, server in enumerate(servers)}))
    return router


def asked_of(servers: list[Any]) -> list[list[dict[str, Any]]]:
    return ray.get([server.take_asked.remote() for server in servers])


@ray.remote(num_cpus=0)
class Worker:
    """Actor to which a client is sent."""

    async def run(self, client: Any) -> list[Any]:
        self.client = client
        return await asyncio.gather(*(self.sample(number) for number in range(N)))

    async def sample(self, number: int) -> Any:
        assignment = Assignment(replica="s1", expected_tokens=6)
        set_current(Session(attempt=Attempt("u", number), sample=number, noise=f"{number:x}", assignment=assignment))
        output = await self.client.generate(f"r{number}", prompt_ids=PROMPT, sampling_params={"temperature": 1.0})
        return output.extra_fields[FIELD], current().records, type(self.client).__name__


@pytest.fixture(scope="module")
def worker(cluster: None) -> Any:
    return Worker.remote()


@ACTORS
@pytest.mark.parametrize("theirs", [LLMServerClient, FullyAsyncLLMServerClient])
def test_server_and_router_get_the_request_metadata(
    servers: list[Any], balancer: Any, worker: Any, theirs: type
) -> None:
    client = rhymed(theirs(config(), load_balancer_handle=balancer), interruptible=True)
    results = ray.get(worker.run.remote(client), timeout=60)
    key = prompt_key(PROMPT).hex()
    for number, (records, kept, name) in enumerate(results):
        assert name == "RhymeLLMServerClient"
        record = {"prompt_key": key, "sample": number, "request": 0, "response_tokens": 2, "reason": ""}
        assert records == kept == [record]
    assignment = Assignment(replica="s1", expected_tokens=6)
    assert ray.get(balancer.take_received.remote()) == [{FIELD: {"assignment": assignment}}] * N
    here, there = asked_of(servers)
    assert (len(here), len(there)) == (0, N)
    metas = sorted((RequestMeta(**asked[FIELD]) for asked in here + there), key=lambda meta: meta.sample)
    turn = turn_key(PROMPT, {"options": {"temperature": 1.0}})
    assert [meta.noise for meta in metas] == [f"{key_of(f'{number:x}', turn, 0):016x}" for number in range(N)]
    assert all(meta.queued_at > 0 and meta.earlier_text == b"" for meta in metas)
    assert all(asked["sampling_params"].keys() <= {"temperature", "max_tokens"} for asked in here + there)


@pytest.mark.parametrize("interruptible", [False, True])
@pytest.mark.parametrize("theirs", [LLMServerClient, FullyAsyncLLMServerClient])
def test_client_keeps_the_state_of_verls_client(theirs: type, interruptible: bool) -> None:
    more = {"only_hybrid": True} if theirs is FullyAsyncLLMServerClient else {}
    given = theirs(config(), load_balancer_handle="handle", **more)
    given.tokenizer = "verl sets it where responses are traced"
    ours = rhymed(given, interruptible)
    assert isinstance(ours, LLMServerClient)
    assert rhymed(ours) is ours
    assert ours._interruptible == interruptible
    for client in (ours, pickle.loads(pickle.dumps(ours))):
        assert type(client) is RhymeLLMServerClient
        assert vars(client).items() >= {name: value for name, value in vars(given).items() if name != "config"}.items()
        assert client._resumes == (theirs is FullyAsyncLLMServerClient)
        assert client._only_hybrid == bool(more)


@ACTORS
async def test_verls_resume_loop_wraps_the_attempts(servers: list[Any], balancer: Any) -> None:
    stopping = servers[0]
    await stopping.become.remote("well", stops=2)
    await balancer.begin.remote({"s": stopping})
    client = rhymed(FullyAsyncLLMServerClient(config(), load_balancer_handle=balancer))
    output = await client.generate("r", prompt_ids=PROMPT, sampling_params={})
    assert output.token_ids == [7, 8] * 3
    assert [record["request"] for record in output.extra_fields[FIELD]] == [0, 1, 2]
    asked = ray.get(stopping.take_asked.remote())
    assert [len(kwargs["prompt_ids"]) for kwargs in asked] == [5, 7, 9]
    assert len({kwargs[FIELD]["key"] for kwargs in asked}) == 1


def test_client_of_another_class_is_rejected() -> None:
    class Theirs(LLMServerClient): ...

    class Derived(RhymeLLMServerClient): ...

    with pytest.raises(TypeError, match=r"client class Theirs is not supported; derive it from .*RhymeLLMServerClient"):
        rhymed(Theirs(config()))
    derived = Derived(config())
    assert not derived._patient
    assert rhymed(derived, interruptible=True) is rhymed(derived) is derived
    assert derived._interruptible
    assert derived._patient


@ACTORS
async def test_task_without_session_gets_one(servers: list[Any], balancer: Any) -> None:
    client = rhymed(LLMServerClient(config(), load_balancer_handle=balancer))

    async def task() -> list[list[int]]:
        found = []
        for name in ("a", "b", "a"):
            records = (await client.generate(name, prompt_ids=PROMPT, sampling_params={})).extra_fields[FIELD]
            assert {record["sample"] for record in records} == {-1}
            found.append([record["request"] for record in records])
        return found

    assert await asyncio.create_task(task()) == [[0], [0], [0, 1]]
    assert current() is None


@ray.remote(num_cpus=0)
class Mortal:
    """A server that dies with its first request. It imports nothing, so that it starts fast."""

    async def generate(self, **_: Any) -> None:
        ray.actor.exit_actor()


@pytest.fixture(scope="module")
def verls(processes: list[Any]) -> Any:
    """verl's balancer. Processes start slowly, so that they are shared."""
    return _create_global_sticky_inflight({"s": processes[0]}, load_balancer_cls=GlobalRequestLoadBalancer)


async def balanced(verls: Any, **servers: Any) -> None:
    """Set the balancer's servers."""
    await verls.remove_servers.remote(await verls.get_all_servers.remote())
    await verls.add_servers.remote(servers)


async def sample(client: Any, number: int) -> list[Any]:
    set_current(Session(sample=number))
    name = f"{id(client)} {number}"  # verl's balancer remembers the server of a name
    output = await client.generate(name, prompt_ids=PROMPT, sampling_params={})
    return output.extra_fields[FIELD]


async def samples(client: Any) -> list[list[Any]]:
    return await asyncio.gather(*(asyncio.create_task(sample(client, number)) for number in range(N)))


@ACTORS
@pytest.mark.parametrize("theirs", [LLMServerClient, FullyAsyncLLMServerClient])
async def test_requests_of_dead_replicas_go_to_another(servers: list[Any], verls: Any, theirs: type) -> None:
    """The process of one is dead, of the other only the engine."""
    await servers[1].become.remote("engine")
    await balanced(verls, process=Mortal.remote(), engine=servers[1], well=servers[0])
    client = rhymed(theirs(config(), load_balancer_handle=verls))
    assert [len(records) for records in await samples(client)] == [1] * N
    assert await verls.get_all_servers.remote() == ["well"]
    assert await verls.get_total_inflight.remote() == 0


@ACTORS
async def test_requests_have_unique_ids_in_deterministic_mode(servers: list[Any], verls: Any) -> None:
    await balanced(verls, well=servers[0])
    theirs = config()
    theirs.actor_rollout_ref.rollout.full_determinism = True
    client = rhymed(LLMServerClient(theirs, load_balancer_handle=verls))
    assert LLMServerClient._vllm_request_id(client, "det-0") == "det-0"

    async def ask(number: int) -> None:
        set_current(Session(sample=number))
        await client.generate("det-0", prompt_ids=PROMPT, sampling_params={})

    await asyncio.gather(*(asyncio.create_task(ask(number)) for number in range(N)))
    assert len({asked["request_id"] for asked in asked_of(servers)[0]}) == N


@ACTORS
@pytest.mark.parametrize("there", ["well", "gone"])
async def test_response_continues_on_another_replica(servers: list[Any], balancer: Any, there: str) -> None:
    """With its tokens, log-probs, versions and the rest of its budget. A dead target counts as no target."""
    cut = servers[1]
    await cut.become.remote("cut")
    await balancer.begin.remote({"cut": cut})
    await balancer.add_servers.remote({"well": servers[0]})
    client = rhymed(LLMServerClient(config(), load_balancer_handle=balancer), interruptible=True)
    session = Session(True, Assignment(replica="cut", priority=1, expected_tokens=5), Attempt("u", 0), sample=0)

    async def generated() -> Any:
        set_current(session)
        return await client.generate("r", prompt_ids=PROMPT, sampling_params={"temperature": 1.0})

    assert not session.move("cut", "a plan"), "nothing runs"
    running = asyncio.create_task(generated())
    asked = await cut.wait_for_one.remote()
    assert (asked[FIELD]["name"], asked[FIELD]["assignment"].replica) == ("u_0", "cut")
    assert asked["sampling_params"]["max_tokens"] == 8
    assert not session.move("cut", "a plan"), "it is there"
    assert session.replica == "cut"
    if there == "gone":
        await balancer.remove_servers.remote(["cut"])
    assert session.move(there, "it is long")
    output = await asyncio.wait_for(running, 60)
    assert output.token_ids == [0, 8, 7, 8]
    assert output.log_probs == [0.0, -2.0, -1.0, -2.0]
    fields = output.extra_fields
    assert (fields["min_global_steps"], fields["max_global_steps"], output.stop_reason) == (0, 1, "completed")
    assert [record["response_tokens"] for record in fields[FIELD]] == [2, 2]
    reasons = ["a plan", "it is long" if there == "well" else ""]
    assert [record["reason"] for record in fields[FIELD]] == reasons, "where it could not go is no reason"
    [[asked]] = asked_of(servers[:1])
    assert asked["prompt_ids"] == [*PROMPT, 0, 8]
    assert (asked["sampling_params"]["max_tokens"], asked[FIELD]["request"]) == (6, 1)
    assert asked[FIELD]["assignment"].remaining(asked[FIELD]["earlier_tokens"]) == (3, None)
    assert session.calls == []
    assert session.replica == "well"
    await asyncio.sleep(0.2)
    assert await balancer.get_total_inflight.remote() == 0


@ACTORS
async def test_abandoned_call_leaves_no_request_behind(servers: list[Any], verls: Any) -> None:
    """No request stays in an engine or in the router's count."""
    slow = servers[0]
    await slow.become.remote("slow")
    await balanced(verls, slow=slow)
    client = rhymed(LLMServerClient(config(), load_balancer_handle=verls), interruptible=True)
    running = asyncio.create_task(sample(client, 0))
    asked = await slow.wait_for_one.remote()
    running.cancel()
    assert await slow.wait_for_one.remote() == {"aborted": asked["request_id"]}
    acquiring = [asyncio.create_task(sample(client, number)) for number in range(8)]
    await asyncio.sleep(0)  # they ask the router
    await asyncio.sleep(0)
    for task in acquiring:
        task.cancel()
    await asyncio.wait([running, *acquiring])
    await asyncio.sleep(0.5)
    assert await verls.get_total_inflight.remote() == 0


@ACTORS
async def test_requests_wait_for_new_replicas_if_the_trainer_starts_them(servers: list[Any], verls: Any) -> None:
    await balanced(verls, process=Mortal.remote())
    with pytest.raises(RuntimeError, match="No available servers"):
        await sample(rhymed(LLMServerClient(config(), load_balancer_handle=verls)), 0)
    patient = rhymed(rhymed(LLMServerClient(config(), load_balancer_handle=verls)), patient=True)
    running = asyncio.create_task(samples(patient))
    assert not (await asyncio.wait({running}, timeout=2))[0]
    await verls.add_servers.remote({"well": servers[0]})
    assert len(await running) == N


@ACTORS
async def test_error_of_a_living_server_is_raised(servers: list[Any], verls: Any) -> None:
    await servers[0].become.remote("bug")
    await balanced(verls, bug=servers[0])
    with pytest.raises(ValueError, match="no such option"):
        await sample(rhymed(LLMServerClient(config(), load_balancer_handle=verls)), 0)
    assert await verls.get_all_servers.remote() == ["bug"]
