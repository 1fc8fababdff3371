"""Routing replay (R3): with drafts, the experts that an engine reports of each token are the model's own choice."""

import asyncio
import inspect
import itertools
import random
import textwrap
from contextlib import contextmanager
from types import SimpleNamespace

import mixtures
import numpy as np
import pytest
import reported_routes  # noqa: F401  (vLLM's CPU reports none)
from exact_distribution import VOCABULARY
from mixtures import Routers
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from verl_rhyme.agent_loop import client as clients
from verl_rhyme.agent_loop.client import RhymeLLMServerClient
from verl_rhyme.agent_loop.session import Interrupted, Session, set_current
from verl_rhyme.processes.request import FIELD, RequestMeta
from verl_rhyme.sampling.continuation import continued_options
from verl_rhyme.scheduling.attempts import Attempt

pytestmark = pytest.mark.xdist_group("routes")

LENGTH = 30


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return mixtures.save(tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="module")
def routers(model):
    return Routers(model)


@pytest.fixture(scope="module")
def build(build_engine, write_history, tmp_path_factory, model):
    from vllm.distributed import parallel_state

    if parallel_state._EP is None:  # an earlier engine of this process, of a dense model, made groups without experts'
        parallel_state.destroy_model_parallel()

    def build(**options):
        folder = tmp_path_factory.mktemp("history") / "node"
        write_history(folder, [])
        engine = build_engine(
            folder,
            model,
            drafting={"floor": 1e-4, "weigh_cost": False, "max_tokens": 4},
            max_num_seqs=8,
            max_num_batched_tokens=24,
            block_size=16,
            enable_return_routed_experts=True,
            **options,
        )
        engine.history_folder = folder
        return engine

    return build


@pytest.fixture(scope="module")
def engine(build):
    return build()


@pytest.fixture(scope="module")
def caching(build):
    """It has too few blocks for its requests, and shares those of equal beginnings."""
    return build(enable_prefix_caching=True, num_gpu_blocks_override=16, disable_log_stats=False)


@pytest.fixture(scope="module")
def prompts():
    rng = random.Random(0)
    return [rng.choices(range(VOCABULARY), k=rng.choice([1, 2, 5, 20, 39])) for _ in range(16)]


@pytest.fixture(scope="module")
def texts(engine, prompts):
    return [text for text, _ in generate(engine, prompts)]


@pytest.fixture
def adversarial(texts, prompts, write_history):
    """``adversarial(engine)``: its drafts go wrong after a few tokens, or are of another response."""
    rng = random.Random(1)
    wrong = [[(token + 1) % VOCABULARY if i % 9 == 5 else token for i, token in enumerate(text)] for text in texts]
    both = [(prompt, draft) for prompt, text in zip(prompts, wrong, strict=True) for draft in (text, rng.choice(texts))]
    return lambda engine: write_history(engine.history_folder, both)


def generate(engine, prompts, **options):
    from vllm import SamplingParams

    params = SamplingParams(
        **{"temperature": 0, "max_tokens": LENGTH, "ignore_eos": True, "detokenize": False, "logprobs": 0, **options}
    )
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [(list(each.outputs[0].token_ids), each.outputs[0].routed_experts) for each in outputs]


@contextmanager
def drafted(engine):
    """Within a block the engine accepts drafts and rejects others."""
    before = engine.collective_rpc("draft_totals")[0]
    yield
    now = {name: count - before[name] for name, count in engine.collective_rpc("draft_totals")[0].items()}
    print(now["accepted"], "accepted of", now["drafted"])
    assert not now["errors"]
    assert now["accepted"] > 20
    assert now["drafted"] > now["accepted"]


def metric(engine, name):
    return sum(each.value for each in engine.get_metrics() if each.name == f"vllm:{name}")


def wrong(engine, routers, prompts, **options):
    """Generate with drafts; return the number of wrong routes."""
    with drafted(engine):
        answers = generate(engine, prompts, **options)
    return sum(routers.wrong(prompt + text, routes) for prompt, (text, routes) in zip(prompts, answers, strict=True))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_change_no_route(engine, routers, prompts, adversarial, temperature):
    adversarial(engine)
    assert not wrong(engine, routers, prompts, temperature=temperature)


def test_drafts_of_a_responses_own_text_change_no_route(engine, routers, prompts, write_history):
    write_history(engine.history_folder, [])
    assert not wrong(engine, routers, prompts)


def test_tokens_after_a_stop_leave_no_route(engine, routers, prompts, texts, adversarial):
    adversarial(engine)
    assert not wrong(engine, routers, prompts, stop_token_ids=[texts[0][0], texts[1][11]])


def test_a_longer_prompt_continues_a_response(engine, routers, prompts, texts, adversarial):
    adversarial(engine)
    assert not wrong(engine, routers, [prompt + text[:11] for prompt, text in zip(prompts, texts, strict=True)])


def test_preempted_requests_keep_their_routes(engine, routers, prompts, adversarial, monkeypatch):
    adversarial(engine)
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    schedule, preempt, steps, preempted = scheduler.schedule, scheduler._preempt_request, itertools.count(), []

    def preempting(*args):
        if next(steps) % 7 == 3:
            scheduler.reset_prefix_cache(reset_running_requests=True)
        return schedule(*args)

    monkeypatch.setattr(scheduler, "schedule", preempting)
    monkeypatch.setattr(scheduler, "_preempt_request", lambda *args: (preempted.append(args), preempt(*args)))
    assert not wrong(engine, routers, prompts, temperature=1.0)
    assert len(preempted) > 7


def test_siblings_share_the_routes_of_cached_blocks(caching, routers, prompts, adversarial):
    adversarial(caching)
    for _ in range(2):
        assert not wrong(caching, routers, [prompt for prompt in prompts for _ in range(3)], temperature=1.0)
    assert metric(caching, "prefix_cache_hits") > 0
    assert metric(caching, "num_preemptions") > 0


def test_a_response_continues_from_cached_blocks(caching, routers, prompts, texts, adversarial):
    adversarial(caching)
    longer = [prompt + text[:20] for prompt, text in zip(prompts, texts, strict=True)]
    assert not wrong(caching, routers, longer, temperature=1.0)


class Server(LLMServerClient):
    """Our client's server: the engine, which gets new weights every few steps. Its routers then choose the others."""

    def __init__(self, config, engine, **kwargs):
        super().__init__(config, **kwargs)
        self._core, self._names = engine.llm_engine, map(str, itertools.count())
        runner = self._core.model_executor.driver_worker.worker.model_runner
        self._gates = [layer.mlp.gate for layer in runner.model.model.layers]
        self._running, self._rng, self._left = set(), random.Random(4), 15
        self.version, self.requests = 0, []  # sample, tokens whose experts were computed, version

    async def generate(self, request_id, *, prompt_ids, sampling_params, rhyme, **kwargs):
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.output_processor import RequestOutputCollector

        meta, version = RequestMeta(**{**rhyme, "id": next(self._names)}), self.version
        params = continued_options(sampling_params, meta.resumed_tokens, noise_by_position=True)
        settings = meta.put({**params, "ignore_eos": True, "detokenize": False})
        self._core.add_request(meta.id, {"prompt_token_ids": prompt_ids}, SamplingParams(**settings))
        processor = self._core.output_processor
        [internal] = processor.external_req_ids[meta.id]
        queue = RequestOutputCollector(RequestOutputKind.CUMULATIVE, internal)
        processor.request_states[internal].queue = queue
        self._running.add(meta.id)
        while (output := queue.get_nowait()) is None or not output.finished:
            self._core.step()
            self._left -= 1
            if not self._left:
                self.publish()
            await asyncio.sleep(0)
        self._running.discard(meta.id)
        answer, tokens = output.outputs[0], list(output.outputs[0].token_ids)
        if tokens:
            self.requests.append((meta.sample, len(prompt_ids) + len(tokens) - 1, version))
        return TokenOutput(
            token_ids=tokens,
            routed_experts=answer.routed_experts,
            stop_reason="aborted" if answer.finish_reason == "abort" else "completed",
            extra_fields={"global_steps": version, FIELD: []},
        )

    def publish(self):
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        core = self._core.engine_core.engine_core
        core.pause_scheduler(mode="abort")
        self._core.abort_request([*self._running])
        for gate in self._gates:
            gate.weight.data.neg_()
            dispatch_cpu_unquantized_gemm(gate, remove_weight=False)  # as after a weight sync
        core.resume_scheduler()
        self.version, self._left = self.version + 1, self._rng.randrange(10, 40)


class Client(RhymeLLMServerClient, Server):
    pass


async def conversations(client, prompts):
    """Return the text and the experts of a sample a prompt, of three turns with tools, and their versions."""

    async def attempt(session, prompt):
        rng, text = random.Random(session.sample), prompt
        set_current(session)
        for turn in range(3):
            options = {"temperature": 1.0, "max_tokens": rng.randrange(8, 20)}
            output = await client.generate("conversation", prompt_ids=text, sampling_params=options)
            text = [*text, *output.token_ids]
            if turn < 2:
                text += rng.choices(range(VOCABULARY), k=rng.choice([0, 1, 4]))
                for _ in range(rng.randrange(20)):
                    await asyncio.sleep(0)
        return text, output.routed_experts, len(session.turns)

    async def sample(number, prompt):
        left = []
        while True:
            session = Session(True, attempt=Attempt("prompt", number), sample=number, noise=f"{number:x}")
            session.inherit(left, [], partial=True)
            try:
                return await attempt(session, prompt)
            except Interrupted:  # before its first token
                left = session.carried_over

    return await asyncio.gather(*(asyncio.create_task(sample(*each)) for each in enumerate(prompts)))


async def test_experts_are_those_of_the_weights_that_sampled_each_token(
    caching, model, prompts, adversarial, monkeypatch
):
    """Interrupted responses continue in place; each turn computes all text again, under the weights of its time."""
    monkeypatch.setattr(clients, "_REFUSED_S", 0.0)
    adversarial(caching)
    of_version = [Routers(model), Routers(model)]
    for layer in of_version[1].model.model.layers:
        layer.mlp.gate.weight.data.neg_()
    config = SimpleNamespace(response_length=100, prompt_length=100, enable_rollout_routing_replay=True)
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=config))
    client = Client(config, engine=caching, interruptible=True)
    try:
        with drafted(caching):
            answers = await conversations(client, prompts)
        total = 0
        for number, (text, experts, turns) in enumerate(answers):
            made = [each[1:] for each in client.requests if each[0] == number]
            assert turns == 3
            versions = np.array([next(v for end, v in made if row < end) for row in range(len(text) - 1)])
            for odd in (0, 1):
                assert not of_version[odd].wrong(text, experts, versions % 2 == odd)
            total += of_version[made[-1][1] % 2].wrong(text, experts)
        print(client.version, "versions", len(client.requests), "requests", total, "rows x layers of earlier weights")
        assert client.version >= 3
        assert total > 100, "the last weights alone would be wrong"
    finally:
        if client.version % 2:
            client.publish()


def test_rows_of_rejected_drafts_would_be_found(engine, routers, prompts, adversarial, monkeypatch):
    """vLLM takes a step's first rows of a request with drafts; its last rows are rejected tokens'."""
    from vllm.v1.core.sched import scheduler

    adversarial(engine)
    source = inspect.getsource(scheduler.Scheduler.update_from_output)
    first, last = "req_offset : req_offset + len(new_token_ids)", "end - len(new_token_ids) : end"
    assert first in source
    names = dict(vars(scheduler))
    exec(textwrap.dedent(source).replace(first, last), names)
    monkeypatch.setattr(scheduler.Scheduler, "update_from_output", names["update_from_output"])
    assert wrong(engine, routers, prompts, temperature=1.0)


def test_missing_routes_would_be_found(engine, routers, prompts, adversarial, monkeypatch):
    from vllm.model_executor.layers.fused_moe import routed_experts_capturer

    adversarial(engine)
    monkeypatch.setattr(routed_experts_capturer.RoutedExpertsCapturer, "capture", lambda *args: None)
    assert wrong(engine, routers, prompts)
