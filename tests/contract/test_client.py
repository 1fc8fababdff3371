"""The LLM client with verl's client and router classes: the data that servers and routers get, and the results."""

import asyncio
import inspect
import pickle
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.router import GlobalRequestLoadBalancer
from vllm.v1.engine.exceptions import EngineDeadError

from verl_rhyme.agent_loop import client as module
from verl_rhyme.agent_loop.client import RhymeLLMServerClient, rhymed
from verl_rhyme.agent_loop.session import Session, current, set_current
from verl_rhyme.history.keys import prompt_key, turn_key
from verl_rhyme.placement.assignment import Assignment
from verl_rhyme.processes.request import FIELD, RequestMeta
from verl_rhyme.router.router import PlacementRouter
from verl_rhyme.sampling.noise import key_of
from verl_rhyme.scheduling.attempts import Attempt

N = 4
PROMPT = [3, 1, 4, 1, 5]


class Actor:
    """An object of this process, called as a Ray actor is. Without an object its process has died."""

    def __init__(self, made=None):
        self.made = made

    def __getattr__(self, name):
        return SimpleNamespace(remote=lambda *args, **kwargs: asyncio.ensure_future(self._call(name, args, kwargs)))

    async def _call(self, name, args, kwargs):
        if self.made is None:
            raise ActorDiedError
        try:
            result = getattr(self.made, name)(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result
        except ActorUnavailableError:  # Ray's own
            raise
        except Exception as error:
            raise RayTaskError(name, str(error), error).as_instanceof_cause() from error


class Watched(PlacementRouter):
    """Router that records its calls."""

    def __init__(self, servers):
        super().__init__(servers)
        self.received = []

    def acquire_server(self, request_id, **extra):
        self.received.append(extra)
        return super().acquire_server(request_id, **extra)


class Server:
    """A server that behaves in one of these ways.

    - "well": Completes each response after two tokens.
    - "cut": Generates two tokens, and stops on an abort.
    - "slow": Never answers, and records the aborted requests.
    - "cut off": The first answer is lost with the network.
    - "engine": Its engine is dead.
    - "bug": Lives and fails.
    """

    def __init__(self, how="well"):
        self.how, self.asked, self.aborted = how, [], asyncio.Event()

    async def generate(self, **kwargs):
        if self.how == "engine":
            raise EngineDeadError
        if self.how == "bug":
            raise ValueError("no such option")
        self.asked.append(kwargs)
        if self.how == "cut off" and len(self.asked) == 1:
            raise ActorUnavailableError("the network", None)
        if self.how == "slow":
            await asyncio.sleep(3600)
        if self.how == "cut":
            await asyncio.wait_for(self.aborted.wait(), 60)
            return TokenOutput(
                token_ids=[0, 8],
                log_probs=[0.0, -2.0],
                stop_reason="aborted",
                extra_fields={FIELD: [{"response_tokens": 2, "version": 0}], "global_steps": 0},
            )
        meta = RequestMeta(**kwargs[FIELD])
        record = {"prompt_key": meta.key, "sample": meta.sample, "request": meta.request, "response_tokens": 2}
        return TokenOutput(
            token_ids=[7, 8],
            log_probs=[-1.0, -2.0],
            stop_reason="completed",
            extra_fields={FIELD: [record], "global_steps": 1},
        )

    async def abort_request(self, request_id, reset_prefix_cache=True):
        assert not reset_prefix_cache
        if self.how == "cut":
            assert request_id == self.asked[0]["request_id"]
            self.aborted.set()
        else:
            self.asked.append({"aborted": request_id})

    async def wait_for_one(self):
        while not self.asked:
            await asyncio.sleep(0.01)
        return self.asked[-1]


def config(full_determinism=False):
    rollout = SimpleNamespace(
        name="vllm",
        full_determinism=full_determinism,
        response_length=8,
        prompt_length=8,
        enable_rollout_routing_replay=False,
        n=N,
        val_kwargs=SimpleNamespace(n=1),
    )
    return SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout), data={})


def routed(router=GlobalRequestLoadBalancer, theirs=LLMServerClient, settings=None, **servers):
    """A router of these servers, and verl's client of it; a server of ``None`` has died."""
    made = router({name: Actor(server) for name, server in servers.items()})
    return made, theirs(settings or config(), load_balancer_handle=Actor(made))


async def sample(client, number, **session):
    set_current(Session(sample=number, **session))
    output = await client.generate(f"r{number}", prompt_ids=PROMPT, sampling_params={"temperature": 1.0})
    return output.extra_fields[FIELD], current().records


async def samples(client, more=lambda number: {}):
    return await asyncio.gather(*(asyncio.create_task(sample(client, n, **more(n))) for n in range(N)))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "_AGAIN_S", 0.05)


@pytest.mark.parametrize("theirs", [LLMServerClient, FullyAsyncLLMServerClient])
async def test_server_and_router_get_the_request_metadata(theirs):
    server, assignment = Server(), Assignment(replica="s1", expected_tokens=6)
    router, client = routed(Watched, theirs, s0=None, s1=server)
    results = await samples(
        rhymed(client, interruptible=True),
        lambda number: {"attempt": Attempt("u", number), "noise": f"{number:x}", "assignment": assignment},
    )
    key = prompt_key(PROMPT).hex()
    for number, (records, kept) in enumerate(results):
        record = {"prompt_key": key, "sample": number, "request": 0, "response_tokens": 2, "reason": ""}
        assert records == kept == [record]
    assert router.received == [{FIELD: {"assignment": assignment}}] * N
    metas = sorted((RequestMeta(**asked[FIELD]) for asked in server.asked), key=lambda meta: meta.sample)
    turn = turn_key(PROMPT, {"options": {"temperature": 1.0}})
    assert [meta.noise for meta in metas] == [f"{key_of(f'{number:x}', turn, 0):016x}" for number in range(N)]
    assert all(meta.queued_at > 0 and meta.earlier_text == b"" for meta in metas)
    assert all(asked["sampling_params"].keys() <= {"temperature", "max_tokens"} for asked in server.asked)


@pytest.mark.parametrize("interruptible", [False, True])
@pytest.mark.parametrize("theirs", [LLMServerClient, FullyAsyncLLMServerClient])
def test_client_keeps_the_state_of_verls_client(theirs, interruptible):
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


def test_client_of_another_class_is_rejected():
    class Theirs(LLMServerClient): ...

    class Derived(RhymeLLMServerClient): ...

    with pytest.raises(TypeError, match=r"client class Theirs is not supported; derive it from .*RhymeLLMServerClient"):
        rhymed(Theirs(config()))
    derived = Derived(config())
    assert not derived._patient
    assert rhymed(derived, interruptible=True) is rhymed(derived) is derived
    assert derived._interruptible
    assert derived._patient


async def test_task_without_session_gets_one():
    _, client = routed(s=Server())

    async def task():
        found = []
        for name in ("a", "b", "a"):
            output = await rhymed(client).generate(name, prompt_ids=PROMPT, sampling_params={})
            assert {record["sample"] for record in output.extra_fields[FIELD]} == {-1}
            found.append([record["request"] for record in output.extra_fields[FIELD]])
        return found

    assert await asyncio.create_task(task()) == [[0], [0], [0, 1]]
    assert current() is None


@pytest.mark.parametrize("theirs", [LLMServerClient, FullyAsyncLLMServerClient])
async def test_requests_of_dead_replicas_go_to_another(theirs):
    """The process of one is dead, of the other only the engine."""
    router, client = routed(theirs=theirs, process=None, engine=Server("engine"), well=Server())
    assert [len(records) for records, _ in await samples(rhymed(client))] == [1] * N
    await asyncio.sleep(0)
    assert router.get_all_servers() == ["well"]
    assert router.get_total_inflight() == 0


async def test_requests_have_unique_ids_in_deterministic_mode():
    server = Server()
    _, client = routed(settings=config(full_determinism=True), s=server)
    assert LLMServerClient._vllm_request_id(client, "det-0") == "det-0"
    await samples(rhymed(client))
    assert len({asked["request_id"] for asked in server.asked}) == N


@pytest.mark.parametrize("there", ["well", "gone"])
async def test_response_continues_on_another_replica(there):
    """With its tokens, log-probs, versions and the rest of its budget. A dead target counts as no target."""
    cut, well = Server("cut"), Server()
    router, client = routed(PlacementRouter, cut=cut, well=well)
    client = rhymed(client, interruptible=True)
    session = Session(True, Assignment(replica="cut", priority=1, expected_tokens=5), Attempt("u", 0), sample=0)

    async def generated():
        set_current(session)
        return await client.generate("r", prompt_ids=PROMPT, sampling_params={"temperature": 1.0})

    assert not session.move("cut", "a plan"), "nothing runs"
    running = asyncio.create_task(generated())
    asked = await cut.wait_for_one()
    assert (asked[FIELD]["name"], asked[FIELD]["assignment"].replica) == ("u_0", "cut")
    assert asked["sampling_params"]["max_tokens"] == 8
    assert not session.move("cut", "a plan"), "it is there"
    assert session.replica == "cut"
    if there == "gone":
        router.remove_servers(["cut"])
    assert session.move(there, "it is long")
    output = await asyncio.wait_for(running, 60)
    assert output.token_ids == [0, 8, 7, 8]
    assert output.log_probs == [0.0, -2.0, -1.0, -2.0]
    fields = output.extra_fields
    assert (fields["min_global_steps"], fields["max_global_steps"], output.stop_reason) == (0, 1, "completed")
    assert [record["response_tokens"] for record in fields[FIELD]] == [2, 2]
    reasons = ["a plan", "it is long" if there == "well" else ""]
    assert [record["reason"] for record in fields[FIELD]] == reasons, "where it could not go is no reason"
    [asked] = well.asked
    assert asked["prompt_ids"] == [*PROMPT, 0, 8]
    assert (asked["sampling_params"]["max_tokens"], asked[FIELD]["request"]) == (6, 1)
    assert asked[FIELD]["assignment"].remaining(asked[FIELD]["earlier_tokens"]) == (3, None)
    assert session.calls == []
    assert session.replica == "well"
    await asyncio.sleep(0.05)
    assert router.get_total_inflight() == 0


async def test_abandoned_call_leaves_no_request_behind():
    """No request stays in an engine or in the router's count."""
    slow = Server("slow")
    router, client = routed(slow=slow)
    client = rhymed(client, interruptible=True)
    running = asyncio.create_task(sample(client, 0))
    asked = await slow.wait_for_one()
    running.cancel()
    await asyncio.wait([running])
    await asyncio.sleep(0.05)
    assert slow.asked[-1] == {"aborted": asked["request_id"]}
    acquiring = [asyncio.create_task(sample(client, number)) for number in range(8)]
    for turns in range(8):  # cancelled at each turn on the way to the router and back
        acquiring[turns].cancel()
        await asyncio.sleep(0)
    await asyncio.wait(acquiring)
    await asyncio.sleep(0.05)
    assert router.get_total_inflight() == 0


async def test_request_whose_answer_was_lost_is_aborted_before_the_next():
    """It may still run, in a slot of the engine."""
    server = Server("cut off")
    router, client = routed(server=server)
    records, _ = await sample(rhymed(client), 0)
    first, aborted, second = server.asked
    assert aborted == {"aborted": first["request_id"]}
    assert second["request_id"] != first["request_id"]
    assert len(records) == 1
    await asyncio.sleep(0)
    assert router.get_total_inflight() == 0


async def test_requests_wait_for_new_replicas_if_the_trainer_starts_them():
    _, client = routed(process=None)
    with pytest.raises(RuntimeError, match="No available servers"):
        await sample(rhymed(client), 0)
    router, client = routed(process=None)
    running = asyncio.create_task(samples(rhymed(rhymed(client), patient=True)))
    assert not (await asyncio.wait({running}, timeout=0.3))[0]
    router.add_servers({"well": Actor(Server())})
    assert len(await running) == N


async def test_error_of_a_living_server_is_raised():
    router, client = routed(bug=Server("bug"))
    with pytest.raises(ValueError, match="no such option"):
        await sample(rhymed(client), 0)
    assert router.get_all_servers() == ["bug"]
