"""What verl's FSDP engines give out of a model with LoRA adapters; on two ranks. ``python lora_ranks.py FOLDER``.

The ranks are forks of one process, which imports verl once.
"""

import os
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from verl_rhyme.actor.sent_weights import SentWeights

TARGETS = ["q_proj", "down_proj"]


def lora_model():
    """A tiny model with adapters that change it, and the merged matrices."""
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(3)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=2))
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=12, target_modules=TARGETS, task_type="CAUSAL_LM"))
    merged = {}
    for name, module in model.named_modules():
        if hasattr(module, "get_delta_weight"):
            torch.nn.init.normal_(module.lora_B["default"].weight)
            merged[name.removeprefix("base_model.model.") + ".weight"] = (
                module.get_base_layer().weight + module.get_delta_weight("default")
            ).detach()
    return model, merged


def sharded(model, strategy):
    """As verl wraps it."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardedStateDictConfig, StateDictType
    from verl.utils.fsdp_utils import apply_fsdp2, get_fsdp_wrap_policy

    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    if strategy == "fsdp2":
        apply_fsdp2(model, {"mesh": mesh}, {})
        return model
    policy = get_fsdp_wrap_policy(model, {}, is_lora=True)
    cpu = torch.device("cpu")
    model = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=cpu, device_mesh=mesh)
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig())
    return model


def given_out(rank, folder):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=2)
    results = {}
    for strategy, merge in (("fsdp2", True), ("fsdp2", False), ("fsdp", True)):
        model, merged = lora_model()
        engine = FSDPEngineWithLMHead.__new__(FSDPEngineWithLMHead)
        engine.module = sharded(model, strategy)
        engine.model_config = SimpleNamespace(lora={"merge": merge}, hf_config=SimpleNamespace(model_type="qwen2"))
        engine._is_offload_param = engine._qat_enabled = engine._uses_fsdp2_cpu_offload_policy = False
        for base_sync_done in (False, True):
            with SentWeights(engine, 0) as sent:
                given = {name: t.clone() for name, t in engine.get_per_tensor_param(base_sync_done=base_sync_done)[0]}
            results[strategy, merge, base_sync_done] = (given, merged, vars(sent.result()))
    if rank == 0:
        torch.save(results, f"{folder}/results")
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.start_processes(given_out, args=(sys.argv[1],), nprocs=2, start_method="fork")
