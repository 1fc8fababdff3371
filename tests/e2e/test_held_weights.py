"""What a real engine holds after verl's weight sync, compared with what was sent; with faults."""

import asyncio
import threading

import pytest
import torch

from tests.conftest import ONLY_SLOW
from verl_rhyme.weights.folder import WeightsError
from verl_rhyme.weights.samples import Held, Sent, compare, is_compared, take

pytestmark = pytest.mark.xdist_group("features")
EXTENSION = "verl_rhyme.engine.extension.RhymeWorkerExtension"
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Engine:
    """An engine with random weights, and syncs as verl's server adapters send them."""

    def __init__(self, engine, ranks=1):
        self.engine, self.ranks, self.version = engine, ranks, -1

    def sync(self, sent, received=None, version=None, **options):
        """Send ``received``; compare with ``sent``."""
        from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

        def send(rank):
            handle = f"ipc:///tmp/rl-colocate-zmq-held-replica-3-rank-{rank}.sock"
            sender = BucketedWeightSender(handle, bucket_size_mb=1, use_shm=True)
            asyncio.run(sender.async_send_weights(iter((sent if received is None else received).items())))

        self.version += 1
        senders = [threading.Thread(target=send, args=(rank,)) for rank in range(self.ranks)]
        for each in senders:
            each.start()
        kwargs = {"use_shm": True, "version": self.version if version is None else version, **options}
        self.engine.collective_rpc("update_weights_from_ipc", kwargs=kwargs)
        for each in senders:
            each.join()
        return self.compare(sent)

    def compare(self, sent):
        values = {name: take(t, self.version).float().tolist() for name, t in sent.items()}
        held = [Held(**each) for each in self.engine.collective_rpc("held_weights")]
        compare(3, Sent(self.version, {n: v for n, v in values.items() if is_compared(n, self.version)}), held)
        return held


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
        assert held.unused in ([], ["lm_head.weight"])
    assert compared == base.keys() - {"lm_head.weight"}


def edited(tensors, name, edit):
    return {**tensors, name: edit(tensors[name].clone())}


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (lambda w: {n.replace(".k_proj", ".key"): t for n, t in w.items()}, None),
        (lambda w: edited(w, "model.norm.weight", lambda t: t * 0.5), "model.norm.weight: worker 0 has"),
        (lambda w: edited(w, "model.embed_tokens.weight", lambda t: t[:64].repeat(2, 1)), "model.embed_tokens.weight"),
        (lambda w: {n: t for n, t in w.items() if "embed" not in n}, "model.embed_tokens.weight: it was not loaded"),
    ],
    ids=["another name", "other values", "half", "a tied embedding left out"],
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


def test_a_missed_version_is_noticed(engine, base, lora):
    options = {"peft_config": lora.to_dict(), "base_sync_done": False}
    engine.sync(base, **options)
    with pytest.raises(WeightsError, match=r"loaded version \d+ last"):
        engine.sync(base, version=engine.version, **options)


def test_adapters_are_found_in_their_slots(engine, base, adapters, lora):
    options = {"peft_config": lora.to_dict(), "base_sync_done": True}
    for _ in range(4):
        [held] = engine.sync(adapters, **options)
        assert held.values.keys() == adapters.keys()
    engine.sync(base, peft_config=lora.to_dict(), base_sync_done=False)
    engine.version -= 1  # adapters follow their base, of the same version
    [held] = engine.sync(adapters, **options)
    assert held.values.keys() > adapters.keys()
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
