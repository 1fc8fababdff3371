"""The server's requests: admission, records, aborts, draft counts, the death of an engine, and its health."""

import asyncio
import math
import os
from collections import defaultdict, deque
from functools import partial
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from verl.workers.config import HFModelConfig
from verl.workers.rollout.replica import RolloutMode, TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from verl_rhyme.config import ConfigError, DraftingConfig, RhymeConfig, config_tree
from verl_rhyme.config.presets import POLICY_LOGPROBS
from verl_rhyme.drafting.policy import RequestCounts
from verl_rhyme.engine import server as servers
from verl_rhyme.engine.gate import Gate
from verl_rhyme.engine.server import RhymeHttpServer
from verl_rhyme.processes.request import DIED, FIELD, RequestMeta, RequestRecord


class Engine:
    """Stand-in for vLLM's AsyncLLM.

    It registers a request after a moment and answers it when ``turn`` is set, and so do its workers.
    """

    def __init__(self):
        self.output_processor = SimpleNamespace(external_req_ids=defaultdict(list))
        self.turn, self.closed, self.calls, self.error = asyncio.Event(), [], [], None

    async def generate(self, prompt, sampling_params, request_id, **kwargs):
        try:
            await asyncio.sleep(0.01)
            self.output_processor.external_req_ids[request_id].append("internal")
            await self.turn.wait()
            for tokens in ([1], [1, 2]):
                yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens)], num_cached_tokens=32)
        except (asyncio.CancelledError, GeneratorExit):
            self.closed.append(request_id)
            raise

    @property
    def engine_core(self):
        return self

    core_engines = ("engine",)

    async def _call_utility_async(self, utility, method, timeout, args, kwargs, engine):
        self.calls.append((method, list(args[0])))
        await self.turn.wait()
        return [{id: {"drafted_tokens": 9, "history_hit": True} for id in args[0]}, {}]  # rank 0 drafts

    async def check_health(self):
        if self.error is not None:
            raise self.error

    async def is_sleeping(self):
        await self.turn.wait()
        return False


@pytest.fixture
def server(monkeypatch):
    async def generate(self, prompt_ids, sampling_params, request_id, **kwargs):
        self.given = sampling_params
        return TokenOutput(token_ids=[1, 2], stop_reason="completed", extra_fields={})

    monkeypatch.setattr(vLLMHttpServer, "generate", generate)
    built = object.__new__(RhymeHttpServer)
    built.engine, built.global_steps, built.node_rank, built.replica_rank = Engine(), 3, 0, 0
    built._engine_generate, built._node_id, built._rhyme = built.engine.generate, "node", RhymeConfig()
    built._requests, built._finished, built._aborts, built._rpcs = {}, deque(maxlen=4), set(), 0
    built._gate, built.asked, built.config = Gate(), [], SimpleNamespace(enable_rollout_routing_replay=False)
    built._histories = SimpleNamespace(ask=lambda key: built.asked.append(key) or 77, take_errors=lambda: 0)
    return built


async def outputs(server, request="r"):
    return [output async for output in server._observed_generate(None, None, request)]


# ---- admission: an abort finds every request that the engine knows, also with more requests than slots ----


async def test_queued_request_is_admitted_before_its_first_token(server):
    made = server._observed_generate(None, None, "r")
    first = await asyncio.wait_for(anext(made), 1)
    server.engine.turn.set()
    assert first.outputs == []
    assert [output.outputs[0].token_ids async for output in made] == [[1], [1, 2]]


async def test_cancelled_caller_closes_its_request(server):
    task = asyncio.create_task(outputs(server))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert server.engine.closed == ["r"]


# ---- records and counts ----


async def test_finished_response_returns_while_the_workers_are_busy(server):
    made = [await asyncio.wait_for(server.generate([5], {}, f"r{i}"), 1) for i in range(2)]
    assert server.engine.calls == []
    counting = asyncio.create_task(server.take_counts())
    await asyncio.sleep(0)
    made.append(await asyncio.wait_for(server.generate([5], {}, "late"), 1))
    server.engine.turn.set()
    records = [output.extra_fields[FIELD][0] for output in made]
    assert [record["id"] for record in records] == ["r0", "r1", "late"]
    assert all(record["drafted_tokens"] == 0 and math.isnan(record["started_at"]) for record in records)
    assert all(record["sample"] == -1 and record["queued_at"] > 0 for record in records), "of no coordinator"
    assert not server._requests
    assert await counting == {id: {"drafted_tokens": 9, "history_hit": True} for id in ("r0", "r1")}
    assert list(await server.take_counts()) == ["late"]
    assert await server.take_counts() == {}
    assert server.engine.calls == [("take_request_counts", ["r0", "r1"]), ("take_request_counts", ["late"])]


async def test_engine_receives_the_fields_of_drafter_and_sampler(server):
    """It receives no list of tokens, because vLLM copies every object in ``extra_args``."""
    text = b"\1\0\0\0\2\0\0\0"
    meta = RequestMeta(key="00ff", sample=2, request=1, noise="ab", earlier_text=text, queued_at=12.5)
    params = {"temperature": 1.0, "extra_args": {"theirs": 1}}
    output = await server.generate([5], params, "r", rhyme=meta.to_dict())
    fields = server.given["extra_args"].pop(FIELD)
    assert server.given == {"temperature": 1.0, "extra_args": {"theirs": 1}}
    asked = {"history_requested_ns": 77, "noise": "ab", "earlier_text": text, "resumed_tokens": 0}
    assert fields == {"id": "r", "key": "00ff", **asked}
    assert server.asked == [bytes.fromhex("00ff")]
    assert fields["earlier_text"] is text
    (record,) = output.extra_fields[FIELD]
    assert (record["prompt_key"], record["sample"], record["request"], record["queued_at"]) == ("00ff", 2, 1, 12.5)
    assert params == {"temperature": 1.0, "extra_args": {"theirs": 1}}


async def test_request_that_arrives_while_weights_load_starts_under_the_new_policy(server, monkeypatch):
    """A request whose policy changes while it runs has both versions."""

    async def generate(self, prompt_ids, sampling_params, request_id, **kwargs):
        await self.set_global_steps(4)  # the request waits meanwhile, as at verl's gate
        async for _ in self._observed_generate(None, sampling_params, request_id):
            if request_id == "long":
                await self.set_global_steps(5)
        return TokenOutput(token_ids=[1], stop_reason="completed", extra_fields={})

    monkeypatch.setattr(vLLMHttpServer, "generate", generate)
    server.engine.turn.set()
    records = [(await server.generate([5], {}, name)).extra_fields[FIELD][0] for name in ("short", "long")]
    versions = [(record["policy_version_start"], record["policy_version_end"]) for record in records]
    assert versions == [(4, 4), (4, 5)]
    assert [record["cached_tokens"] for record in records] == [32, 32]


def test_every_count_has_a_record_column():
    assert set(RequestCounts.__slots__) <= set(RequestRecord.__dataclass_fields__)


async def test_continued_response_gets_adapted_options(server):
    """``min_tokens`` counts the tokens of the whole response, but vLLM refuses more than ``max_tokens``."""

    async def ask(made, **options):
        options |= {"max_tokens": 1024 - made}
        await server.generate([5] * (1 + made), options, "r", rhyme={"resumed_tokens": made})
        given = {name: value for name, value in server.given.items() if name != "extra_args"}
        SamplingParams(**given)
        return given

    assert await ask(600, min_tokens=512) == {"max_tokens": 424, "min_tokens": 0}
    assert await ask(100, min_tokens=512) == {"max_tokens": 924, "min_tokens": 412}
    server._rhyme = RhymeConfig(drafting=DraftingConfig(enable=False))
    assert (await ask(0, seed=3))["seed"] == 3
    seeds = [(await ask(made, seed=3))["seed"] for made in (1, 2, 2)]
    assert seeds[0] != seeds[1] == seeds[2] != 3, "vLLM's generator would repeat its numbers"
    server._rhyme = RhymeConfig()
    assert (await ask(2, seed=3))["seed"] == 3, "our noise depends on the position"


# ---- aborts: a request is aborted in the engine by the id that verl gave it ----


@pytest.fixture
def front(server):
    """Server with vLLM's front end around one request, to which vLLM has given another id."""
    server.engine = SimpleNamespace(output_processor=OutputProcessor(None, log_stats=False), log_requests=False)
    server.engine.engine_core = SimpleNamespace(abort_requests_async=AsyncMock())
    server.engine.abort = partial(AsyncLLM.abort, server.engine)
    params = SamplingParams(max_tokens=8, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
    request = EngineCoreRequest("r-12345678", [1, 2], None, params, None, 0.0, None, None, None, external_req_id="r")
    server.queue = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, request.request_id)
    server.arrives = partial(server.engine.output_processor.add_request, request, None, None, 0, server.queue)
    return server


async def test_request_is_aborted_for_the_engine_and_for_its_caller(front):
    front.arrives()
    assert not (await front.abort_request("another", reset_prefix_cache=False))["aborted"]
    front.engine.engine_core.abort_requests_async.assert_not_called()
    assert await front.abort_request("r", reset_prefix_cache=False) == {"aborted": True, "request_id": "r"}
    front.engine.engine_core.abort_requests_async.assert_called_once_with(["r-12345678"])
    output = await asyncio.wait_for(front.queue.get(), 1)
    assert output.outputs[0].finish_reason == "abort"


async def test_request_that_waits_for_loading_weights_is_aborted_on_arrival(front):
    front._requests["r"] = None  # the request has passed the gate, and verl holds it
    assert not (await front.abort_request("r"))["aborted"]
    assert front._aborts
    front.arrives()
    await asyncio.wait_for(asyncio.gather(*front._aborts), 1)
    front.engine.engine_core.abort_requests_async.assert_called_once_with(["r-12345678"])


# ---- KV blocks of older weights ----


async def test_each_call_of_verls_after_a_weight_sync_empties_host_memory_too(server):
    server.engine, server.rollout_mode = (
        AsyncMock(vllm_config=SimpleNamespace(kv_transfer_config=None)),
        RolloutMode.HYBRID,
    )
    server.config = SimpleNamespace(free_cache_engine=True)
    for call in (server.clear_kv_cache, server.resume_kv_cache, partial(server.wake_up, ["kv_cache"])):
        server.engine.reset_prefix_cache.reset_mock()
        await call()
        server.engine.reset_prefix_cache.assert_called_once_with(reset_connector=True)


async def test_weights_are_not_served_beside_blocks_of_older_ones(server):
    server.engine = AsyncMock(vllm_config=SimpleNamespace(kv_transfer_config="OffloadingConnector"))
    await server.clear_kv_cache()
    server.engine.reset_prefix_cache.return_value = False
    with pytest.raises(RuntimeError, match="older weights"):
        await server.clear_kv_cache()


# ---- the death of an engine while the server still answers ----


@pytest.fixture
def dying(server, monkeypatch):
    """Server whose engine dies after two steps of a request."""

    async def two_steps(prompt, params, request_id, **kwargs):
        tokens, logprobs = server.lists
        yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, logprobs=logprobs, finish_reason=None)])
        raise EngineDeadError

    async def generate(self, prompt_ids, sampling_params, request_id, **kwargs):
        last = (await outputs(self, request_id))[-1].outputs[0]
        assert len(last.logprobs) == len(last.token_ids)
        return TokenOutput(token_ids=last.token_ids, stop_reason=last.finish_reason, extra_fields={})

    monkeypatch.setattr(vLLMHttpServer, "generate", generate)
    server._engine_generate, server.lists = two_steps, ([1, 2], ["a", "b"])
    return server


@pytest.mark.parametrize("lists", [([1, 2], ["a", "b", "c"]), ([1, 2, 3], ["a", "b"])])
async def test_request_of_a_coordinator_ends_as_aborted_and_reports_the_death(dying, lists):
    dying.lists = lists  # they grow one after another
    output = await dying.generate([5], {}, "r", rhyme={"name": "uid_0"})
    assert (output.token_ids, output.stop_reason) == ([1, 2], "abort")
    assert output.extra_fields[DIED]


async def test_replayed_routing_keeps_no_token_of_a_dead_engine(dying):
    """vLLM joins the experts of a request's tokens at its end alone."""
    dying.config.enable_rollout_routing_replay = True
    output = await dying.generate([5], {}, "r", rhyme={"name": "uid_0"})
    assert (output.token_ids, output.stop_reason) == ([], "abort")
    assert output.extra_fields[DIED]


async def test_request_of_another_client_fails_as_with_verl(dying):
    with pytest.raises(EngineDeadError):
        await dying.generate([5], {}, "r")
    assert not dying._requests


# ---- health: a replica is healthy only if its engine answers as well ----


@pytest.fixture(autouse=True)
def fast_polls(monkeypatch):
    monkeypatch.setattr(servers, "_HEALTH_POLL_S", 0.01)


async def test_engine_that_hangs_or_dies_during_the_check_is_not_healthy(server):
    check = asyncio.create_task(server.healthy())
    done, _ = await asyncio.wait({check}, timeout=0.1)
    assert not done, "the engine process hangs"
    server.engine.error = RuntimeError("it has died")
    with pytest.raises(RuntimeError, match="it has died"):
        await asyncio.wait_for(check, 1)


async def test_engine_that_loads_weights_is_healthy(server, monkeypatch):
    taken = asyncio.Event()
    monkeypatch.setattr(vLLMHttpServer, "collective_rpc", lambda self, method: taken.wait())
    loads = asyncio.create_task(server.collective_rpc("update_weights"))
    await asyncio.sleep(0)
    await asyncio.wait_for(server.healthy(), 1)
    taken.set()
    await loads
    done, _ = await asyncio.wait({check := asyncio.create_task(server.healthy())}, timeout=0.1)
    assert not done
    server.engine.turn.set()
    await asyncio.wait_for(check, 1)


# ---- engine options ----


class Rollout(SimpleNamespace):
    """verl's rollout config."""

    def get(self, key, default=None):
        return getattr(self, key, default)


def options(
    server, model_type, drafting, mode="processed_logprobs", given=(), own=None, lora=0, custom=None, folder="", **rhyme
):
    """Return ``engine_kwargs`` as the server completes them; ``folder``: of the checkpoint."""
    tree = {"drafting": {"enable": drafting, "model": own}, "history": {"dir": "/history"}, **rhyme}
    server._rhyme = config_tree.parse(tree)
    sizes = {"cudagraph_capture_sizes": None, "max_num_seqs": 8, "max_num_batched_tokens": 256}
    server.config = Rollout(
        checkpoint_engine=None, logprobs_mode=mode, mtp=None, enable_prefix_caching=True, custom=custom, **sizes
    )
    tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 0}, name_or_path="t")
    server.model_config = SimpleNamespace(
        hf_config=CONFIG_MAPPING[model_type](), tokenizer=tokenizer, lora_rank=lora, lora={}, local_path=folder
    )
    engine_kwargs = dict(given)
    server._preprocess_engine_kwargs(engine_kwargs)
    return engine_kwargs


def test_without_drafts_the_pipeline_draws_with_rhymes_sampler(server, monkeypatch):
    """It regenerates with the same noise, on the model runner that the sampler knows, and returns the policy's
    log-probabilities."""
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    assert "async_scheduling" not in options(server, "qwen3", drafting=False)
    assert "VLLM_USE_V2_MODEL_RUNNER" not in os.environ, "histospec without drafts is vLLM's"
    found = options(server, "qwen3", drafting=False, mode=POLICY_LOGPROBS, max_staleness=0)
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert found["logprobs_mode"] == "processed_logprobs", "vLLM does not know the other"
    assert not {"speculative_config", "async_scheduling"} & set(found)
    mtp = {"speculative_config": {"method": "mtp"}}
    assert options(server, "qwen3", drafting=False, given=mtp, max_staleness=0)["async_scheduling"] is False


def test_server_drafts_by_the_models_layers(server):
    """The driver may have no config.json, but verl's server has the model's config."""
    with pytest.raises(ConfigError, match=r"mamba.*drafting\.enable=false"):
        options(server, "nemotron_h", drafting=True)
    assert "speculative_config" not in options(server, "nemotron_h", drafting=False)
    assert options(server, "qwen3", drafting=True)["speculative_config"]["num_speculative_tokens"] == 32
    hybrid = options(server, "qwen3_next", drafting=True)
    assert hybrid["speculative_config"]["num_speculative_tokens"] == 4
    assert hybrid["additional_config"][FIELD]["drafting"]["max_tokens"] == 4


def test_server_turns_off_what_drafts_do_not_go_with(server, caplog):
    """verl's default is prefix caching; with adapters, 8 x 33 tokens are more than the 256 of a step."""
    hybrid = options(server, "qwen3_5", drafting=True)
    assert hybrid["enable_prefix_caching"] is False
    [line] = [record.message for record in caplog.records]
    assert "prefix caching is off" in line
    assert "prefill their context again" in line
    assert "enable_prefix_caching" not in options(server, "qwen3_5", drafting=False)
    assert "enable_prefix_caching" not in options(server, "qwen3", drafting=True)
    adapters = options(server, "qwen3", drafting=True, lora=8)
    assert adapters["speculative_config"]["num_speculative_tokens"] == 31
    assert adapters["additional_config"][FIELD]["drafting"]["max_tokens"] == 31
    assert len(caplog.records) == 1


def test_server_looks_at_the_models_drafter_before_the_engine_does(server, tmp_path):
    """In verl's config of the model, a disabled ``mtp`` leaves no MTP layers; vLLM reads the checkpoint."""
    policy = {"model_type": "qwen3", "drafting": True, "folder": str(tmp_path / "policy")}
    layers = CONFIG_MAPPING["qwen3"](num_nextn_predict_layers=3, architectures=["Qwen3ForCausalLM"])
    layers.save_pretrained(policy["folder"])
    assert HFModelConfig(path=policy["folder"], load_tokenizer=False).hf_config.num_nextn_predict_layers == 0
    found = options(server, own="mtp", **policy)
    assert found["speculative_config"]["num_speculative_tokens"] == 30, "vLLM refuses 32"
    assert found["additional_config"][FIELD]["drafting"]["max_tokens"] == 30
    CONFIG_MAPPING["qwen3"]().save_pretrained(policy["folder"])
    for own, words in (("/nowhere", "no such folder"), ("mtp", "has no MTP layers")):
        with pytest.raises(ConfigError, match=words):
            options(server, own=own, **policy)
    head = CONFIG_MAPPING["qwen3"](num_hidden_layers=1)
    head.save_pretrained(tmp_path / "head")
    given = options(server, own=str(tmp_path / "head"), **policy)["speculative_config"]
    assert (given["method"], given["model"]) == ("eagle", str(tmp_path / "head"))
    head.vocab_size += 1
    head.save_pretrained(tmp_path / "head")
    with pytest.raises(ConfigError, match="vocabulary entries"):
        options(server, own=str(tmp_path / "head"), **policy)


def test_server_takes_the_length_that_start_up_chose(server):
    """It knows the model's layers itself."""
    for chosen, tokens in ((2, 2), (32, 4)):
        made = options(server, "qwen3_5", drafting=True, custom={"rhyme_draft_tokens": chosen})
        assert made["speculative_config"]["num_speculative_tokens"] == tokens
