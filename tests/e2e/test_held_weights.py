"""What a real engine holds after verl's weight sync, compared with what was sent; with faults."""

import asyncio
import threading
from dataclasses import asdict
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.conftest import ONLY_SLOW
from verl_rhyme.weights.folder import WeightsError
from verl_rhyme.weights.samples import Held, Sent, compare, is_compared, take

pytestmark = pytest.mark.xdist_group("features")
EXTENSION = "verl_rhyme.engine.extension.RhymeWorkerExtension"
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def send(weights, *ranks):
    """Send to these workers; return the threads."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    def to(rank):
        handle = f"ipc:///tmp/rl-colocate-zmq-held-replica-3-rank-{rank}.sock"
        asyncio.run(BucketedWeightSender(handle, 1, use_shm=True).async_send_weights(iter(weights.items())))

    senders = [threading.Thread(target=to, args=(rank,)) for rank in ranks]
    for each in senders:
        each.start()
    return senders


def compared(version, sent, held):
    """Compare all that the engines' workers hold; return it."""
    values = {name: take(t, version).float().tolist() for name, t in sent.items() if is_compared(name, version)}
    held = [Held(**each) for each in held]
    compare(3, Sent(version, values), held)
    return held


class Engine:
    """An engine with random weights, and syncs as verl's server adapters send them."""

    def __init__(self, engine, ranks=1):
        self.engine, self.ranks, self.version = engine, ranks, -1

    def sync(self, sent, received=None, **options):
        """Send ``received``; compare with ``sent``."""
        self.version += 1
        senders = send(sent if received is None else received, *range(self.ranks))
        kwargs = {"use_shm": True, "version": self.version, **options}
        self.engine.collective_rpc("update_weights_from_ipc", kwargs=kwargs)
        for each in senders:
            each.join()
        return self.compare(sent)

    def compare(self, sent):
        return compared(self.version, sent, self.engine.collective_rpc("held_weights"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    made = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, eos_token_id=None, bos_token_id=None, pad_token_id=None))
    made.folder = tmp_path_factory.mktemp("tied_model")
    made.save_pretrained(made.folder)
    return made


def build(build_engine, model, **options):
    options |= {"load_format": "dummy", "dtype": "bfloat16", "max_num_seqs": 4}
    options |= {"worker_cls": "workers.WithExtension", "worker_extension_cls": EXTENSION}
    return build_engine(model=model.folder, **options)


@pytest.fixture(scope="module", autouse=True)
def socket_names():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERL_RAY_JOB_ID", "held")
        patch.setenv("VERL_REPLICA_RANK", "3")
        yield


@pytest.fixture(scope="module")
def engine(build_engine, model):
    return Engine(build(build_engine, model, enable_lora=True, max_loras=1, max_lora_rank=8))


@pytest.fixture(scope="module")
def lora(model):
    from peft import LoraConfig

    return LoraConfig(r=8, lora_alpha=24, target_modules=PROJECTIONS, task_type="CAUSAL_LM")


@pytest.fixture
def base(model, lora):
    """New weights, by the names that verl gives them for an engine with LoRA."""
    from verl.utils.fsdp_utils import replace_lora_wrapper

    new = {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
    new["lm_head.weight"] = new["model.embed_tokens.weight"]
    return {replace_lora_wrapper(name, lora): tensor for name, tensor in new.items()}


@pytest.fixture(scope="module")
def adapters(model, lora):
    from peft import get_peft_model, get_peft_model_state_dict

    with_lora = get_peft_model(type(model)(model.config), lora)
    return {name: torch.randn_like(tensor) for name, tensor in get_peft_model_state_dict(with_lora).items()}


def test_an_engine_without_a_sync_is_noticed(engine, base):
    with pytest.raises(WeightsError, match="loaded version None last"):
        engine.compare(base)


def test_weights_are_found_in_fused_and_tied_parameters(engine, base, lora):
    options = {"peft_config": lora.to_dict(), "base_sync_done": False}
    compared = set()
    for _ in range(4):
        [held] = engine.sync(base, **options)
        compared |= held.values.keys()
        assert not held.incomplete
        assert not held.altered
        assert not held.blank
    assert compared == base.keys() - {"lm_head.weight"}


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (lambda w: {n.replace(".k_proj", ".key"): t for n, t in w.items()}, None),
        (lambda w: {**w, "model.norm.weight": w["model.norm.weight"] * 0.5}, "model.norm.weight: worker 0 has"),
        (lambda w: {n: t for n, t in w.items() if "embed" not in n}, "model.embed_tokens.weight: it was not loaded"),
    ],
    ids=["another name", "other values", "a tied embedding left out"],
)
def test_faults_of_the_transfer_and_the_loader_are_noticed(engine, base, lora, wrong, named, monkeypatch):
    options = {"peft_config": lora.to_dict(), "base_sync_done": False}
    engine.version = 3  # layer 0 next
    loads = engine.engine.llm_engine.model_executor.driver_worker.worker.model_runner.model
    if named is None:  # a loader that drops names it does not know
        known = type(loads).load_weights

        def load_weights(self, weights):
            return known(self, [each for each in weights if ".key" not in each[0]])

        monkeypatch.setattr(type(loads), "load_weights", load_weights)
        named = r"k_proj.*: it was not loaded; model.layers.0.self_attn.qkv_proj.*got less"
    with pytest.raises(WeightsError, match=rf"replica 3 .* version 4: .*{named}"):
        engine.sync(base, wrong(base), **options)


def test_adapters_are_found_in_their_slots(engine, base, adapters, lora):
    options = {"peft_config": lora.to_dict(), "base_sync_done": True}
    for _ in range(4):
        [held] = engine.sync(adapters, **options)
        assert held.values.keys() == {name for name in adapters if is_compared(name, engine.version)}
    engine.version = 3  # layer 0 next
    engine.sync(base, peft_config=lora.to_dict(), base_sync_done=False)
    engine.version -= 1  # adapters follow their base, of the same version
    [held] = engine.sync(adapters, **options)
    assert {name for name in {**base, **adapters} if "layers.0." in name} < held.values.keys()
    engine.compare({**base, **adapters})


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (lambda w: {n.replace("down_proj", "gone_proj"): t for n, t in w.items()}, "down_proj.*: it was not loaded"),
        (lambda w: {n: t * 0 if "lora_B" in n else t for n, t in w.items()}, r"lora_B.*: worker 0 has -?0, the actor"),
    ],
)
def test_faults_of_adapters_are_noticed(engine, adapters, lora, wrong, named):
    engine.version = 3
    with pytest.raises(WeightsError, match=named):
        engine.sync(adapters, wrong(adapters), peft_config=lora.to_dict(), base_sync_done=True)


class Loader:
    """Our extension around a model of vLLM's without an engine; it takes the process groups of the engine here."""

    def __init__(self, folder, architecture):
        from vllm import EngineArgs, ModelRegistry
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.utils import initialize_model
        from vllm.utils.torch_utils import set_default_torch_dtype

        from verl_rhyme.engine.extension import RhymeWorkerExtension

        # else vLLM looks at the class in a process of its own
        ModelRegistry.register_model(architecture, ModelRegistry._try_load_model_cls(architecture))
        options = {"load_format": "dummy", "dtype": "bfloat16", "skip_tokenizer_init": True}
        config = EngineArgs(str(folder), **options).create_engine_config()
        with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
            model = initialize_model(config)
        self.folder = folder
        self.worker = object.__new__(RhymeWorkerExtension)
        self.worker.__dict__ |= {"local_rank": 0, "device": torch.device("cpu"), "_is_qat_model": False}
        self.worker._is_modelopt_qat = False
        self.worker.model_runner = SimpleNamespace(model=model, vllm_config=config)

    def collective_rpc(self, method, kwargs=None):
        # the CPU build packs experts after a load, and could not load any again
        with mock.patch("vllm.model_executor.model_loader.utils.process_weights_after_loading"):
            return [getattr(self.worker, method)(**(kwargs or {}))]


@pytest.fixture(scope="module")
def experts(engine, tmp_path_factory):
    """A mixture of experts, and new weights by the names that verl gives them."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM
    from verl.workers.engine.fsdp.utils import unfuse_moe_params

    sizes = {"vocab_size": 128, "hidden_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    made = Qwen2MoeForCausalLM(Qwen2MoeConfig(**sizes, **heads, num_experts=4, num_experts_per_tok=2))
    folder = tmp_path_factory.mktemp("experts")
    made.save_pretrained(folder)
    new = ((name, torch.randn_like(tensor)) for name, tensor in made.state_dict().items())
    return Engine(Loader(folder, "Qwen2MoeForCausalLM")), dict(unfuse_moe_params(new, "qwen2_moe"))


def test_weights_are_found_in_stacked_experts(experts):
    loader, weights = experts
    assert len([name for name in weights if ".experts." in name]) == 2 * 4 * 3
    seen = set()
    for _ in range(16):
        [held] = loader.sync(weights)
        seen |= held.values.keys()
        assert not held.incomplete + held.altered + held.blank
    assert seen == weights.keys()


def test_a_vision_tower_that_is_never_sent_ends_no_run(engine, tmp_path, caplog):
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 4]}
    text = {**sizes, "vocab_size": 128, "num_hidden_layers": 2, "rope_parameters": rope}
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
    made = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision))
    made.save_pretrained(tmp_path)
    whole = {name: torch.randn_like(tensor) for name, tensor in made.state_dict().items()}
    loader = Engine(Loader(tmp_path, "Qwen2_5_VLForConditionalGeneration"))
    [held] = loader.sync({name: tensor for name, tensor in whole.items() if ".visual." not in name})
    assert not held.blank + held.incomplete
    assert held.aside
    assert "the actor sends no weights for visual of the engines" in caplog.text
    [held] = loader.sync(whole)
    assert not held.aside + held.incomplete
    with pytest.raises(WeightsError, match=r"model.visual.*: it was not loaded; visual.* got less"):
        loader.sync(whole, {name: tensor for name, tensor in whole.items() if ".visual." not in name})


def test_a_language_model_that_is_not_sent_ends_the_run(experts, tmp_path):
    _, weights = experts
    unsent = {name: tensor for name, tensor in weights.items() if "o_proj" not in name}
    with pytest.raises(WeightsError, match=r"o_proj.weight of worker 0 got nothing and has random values"):
        Engine(Loader(experts[0].engine.folder, "Qwen2MoeForCausalLM")).sync(unsent)


@ONLY_SLOW
def test_weights_are_found_in_shards(build_engine, model):
    sharded = Engine(build(build_engine, model, tensor_parallel_size=2), ranks=2)
    weights = {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    for _ in range(4):
        first, second = sharded.sync(weights)
        assert not first.incomplete + second.incomplete
    half = {n: torch.cat([t[:32], t[:32] * 0]) if "o_proj" in n else t for n, t in weights.items()}
    with pytest.raises(WeightsError, match=r"o_proj.weight: worker . has -?0, the actor"):
        sharded.sync(weights, half)


@ONLY_SLOW
def test_every_data_parallel_engine_is_compared(model, monkeypatch):
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from verl_rhyme.engine.server import RhymeHttpServer

    options = {"load_format": "dummy", "dtype": "bfloat16", "max_model_len": 64, "num_gpu_blocks_override": 64}
    options |= {"worker_extension_cls": EXTENSION, "enforce_eager": True, "skip_tokenizer_init": True}
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")

    async def sync():
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(str(model.folder), data_parallel_size=2, **options))
        try:
            server, core = SimpleNamespace(engine=engine), engine.engine_core
            assert await RhymeHttpServer._ask_workers(server, "held_weights") == [asdict(Held())] * 2
            weights = {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
            call = ("collective_rpc", "update_weights_from_ipc", None, (), {"use_shm": True, "version": 0})
            [sender] = send(weights, 0)
            await core._call_utility_async(*call, engine=core.core_engines[0])  # the other one misses it
            sender.join()
            held = await RhymeHttpServer._ask_workers(server, "held_weights")
            compared(0, weights, held[:1])
            with pytest.raises(WeightsError, match="worker 1 has loaded version None last"):
                compared(0, weights, held)
        finally:
            engine.shutdown()

    asyncio.run(sync())
