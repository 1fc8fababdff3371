"""verl's checkpoint engine of the relay: dtypes of sent tensors, and how workers pass them on."""

import torch
from relay_world import weights, write

from verl_rhyme.weights import engine as engines
from verl_rhyme.weights.claims import claim
from verl_rhyme.weights.engine import RelayCheckpointEngine, narrow
from verl_rhyme.weights.manager import transfer_dtype
from verl_rhyme.weights.writer import PART_BYTES

MODEL = {
    "model.layers.0.mlp.up_proj.weight": torch.randn(64, 32),
    "model.layers.0.mlp.experts.3.gate_proj.weight": torch.randn(64, 32),
    "model.layers.0.mlp.gate.weight": torch.randn(8, 32),
    "model.layers.0.block_sparse_moe.router.weight": torch.randn(8, 32),
    "model.layers.1.mlp.up_proj.weight_scale_inv": torch.randn(2, 4),
    "model.norm.weight": torch.randn(32),
    "model.layers.0.mlp.gate.e_score_correction_bias": torch.randn(8),
    "half": torch.randn(4, 4).to(torch.float16),
    "table": torch.arange(6).reshape(2, 3),
}


async def test_matrices_are_written_as_engines_hold_them(tmp_path):
    folder = claim(tmp_path)
    for version, dtype in ((1, None), (2, "bfloat16")):
        actor = RelayCheckpointEngine(1 << 20, is_master=True)
        actor.init_process_group(str(folder.path), dtype)
        await actor.send_weights(iter(MODEL.items()), global_steps=version)
    as_is, read = dict(folder.read(1)), dict(folder.read(2))
    assert all(torch.equal(as_is[name], tensor) for name, tensor in MODEL.items())
    for name, tensor in MODEL.items():
        narrow = name.endswith("_proj.weight")
        assert read[name].dtype == (torch.bfloat16 if narrow else tensor.dtype)
        parameter = torch.empty_like(tensor, dtype=read[name].dtype)  # an engine's
        assert torch.equal(read[name], parameter.copy_(tensor))


def test_no_tensor_is_widened():
    tensor = torch.ones(2, 2, dtype=torch.bfloat16)
    assert narrow("a.weight", tensor, torch.float32) is tensor
    assert narrow("a.weight", tensor, torch.float16) is tensor


def test_sent_dtype_is_the_engines_unless_they_quantise():
    dtypes = {name: transfer_dtype({"dtype": name}) for name in ("bfloat16", "half", "float32", "auto")}
    assert dtypes == {"bfloat16": "bfloat16", "half": "float16", "float32": None, "auto": None}
    assert transfer_dtype({"dtype": "bfloat16", "quantization": "fp8"}) is None


async def test_a_tensor_larger_than_a_bucket_is_passed_on_the_device(tmp_path, monkeypatch):
    """verl sends it to the engine by a device memory handle, which a mapped file does not have."""
    monkeypatch.setattr(engines, "_device", lambda: "meta")
    folder = claim(tmp_path)
    write(folder, 1)
    worker = RelayCheckpointEngine(1500)  # between those of 2,000 and of 48 bytes
    worker.init_process_group(str(folder.path))
    read = {name: tensor.device.type async for name, tensor in worker.receive_weights(1)}
    assert read == {name: "meta" if "layer" in name or name == "shared" else "cpu" for name in weights(1)}


def test_parts_are_as_large_as_buckets_at_most():
    assert RelayCheckpointEngine(1000)._part_bytes == 1000
    assert RelayCheckpointEngine(1 << 40)._part_bytes == PART_BYTES
