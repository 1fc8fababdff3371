"""Faults of weight transfers: wrong dtypes, mixed versions, versions written again, missing versions."""

import asyncio
import shutil
import subprocess
import sys

import pytest
import torch
from omegaconf import OmegaConf
from relay_world import Near, Replica, known, let_go, publish, weights, write

from verl_rhyme.weights import engine as engines
from verl_rhyme.weights import folder as folders
from verl_rhyme.weights import relay as relays
from verl_rhyme.weights.engine import RelayCheckpointEngine, narrowed
from verl_rhyme.weights.folder import UnsentError, WeightsError, claim
from verl_rhyme.weights.manager import travels_in
from verl_rhyme.weights.relay import Relay


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    monkeypatch.setattr(relays, "keep_audible", lambda: None)
    return [Relay(str(tmp_path / str(n))) for n in range(3)]


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


class TestTypes:
    """FSDP holds float32, engines bf16: bytes that engines would drop are not sent."""

    async def test_matrices_are_written_as_engines_hold_them(self, tmp_path):
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

    def test_no_tensor_is_widened(self):
        tensor = torch.ones(2, 2, dtype=torch.bfloat16)
        assert narrowed("a.weight", tensor, torch.float32) is tensor
        assert narrowed("a.weight", tensor, torch.float16) is tensor

    @pytest.mark.parametrize(
        ("rollout", "dtype"),
        [
            ({"dtype": "bfloat16"}, "bfloat16"),
            ({"dtype": "half"}, "float16"),
            ({"dtype": "float32"}, None),
            ({"dtype": "auto"}, None),
            ({"dtype": "bfloat16", "quantization": "fp8"}, None),
        ],
    )
    def test_sent_dtype_is_the_engines_unless_they_quantise(self, rollout, dtype):
        assert travels_in(OmegaConf.create(rollout)) == dtype
        assert dtype is None or isinstance(getattr(torch, dtype), torch.dtype)

    async def test_a_tensor_larger_than_a_bucket_is_passed_on_the_device(self, tmp_path, monkeypatch):
        """verl sends it to the engine by a device memory handle, which a mapped file does not have."""
        monkeypatch.setattr(engines, "_device", lambda: "meta")
        folder = claim(tmp_path)
        write(folder, 1)
        worker = RelayCheckpointEngine(1500)  # between those of 2,000 and of 48 bytes
        worker.init_process_group(str(folder.path))
        read = {name: tensor.device.type async for name, tensor in worker.receive_weights(1)}
        assert read == {name: "meta" if "layer" in name or name == "shared" else "cpu" for name in weights(1)}


class TestTwoVersions:
    def test_a_version_written_again_during_a_read_raises(self, tmp_path):
        folder = claim(tmp_path)
        write(folder, 1)
        reading = folder.read(1)
        next(reading)
        writer = folder.writer(1, 3000, 1000)  # same sizes, other numbers
        for name, tensor in weights(2).items():
            writer.add(name, tensor)
        writer.close()
        with pytest.raises(WeightsError, match="may be of both"):
            list(reading)
        reading = folder.read(1)
        next(reading)
        folder.remove(1)
        with pytest.raises(WeightsError):
            list(reading)

    async def test_a_version_that_another_process_reads_is_kept(self, nodes):
        """For a replica of several nodes: only the relay of its first node knows of the delivery."""
        [node] = nodes[:1]
        await publish(node, 1)
        reader = """
import sys
from pathlib import Path
from verl_rhyme.weights.folder import Folder
reading = Folder(Path(sys.argv[1])).read(1)
next(reading)
print("reads", flush=True)
sys.stdin.readline()
print(len(list(reading)), flush=True)
"""
        command = [sys.executable, "-c", reader, str(node._folder.path)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout.readline() == "reads\n"
            for version in (2, 3):
                await publish(node, version)
            assert node._folder.versions() == [1, 2, 3]
            assert process.communicate("on\n")[0] == f"{len(weights(1)) - 1}\n", "the version was removed"
        finally:
            process.kill()
            process.wait()
        await publish(node, 4)
        assert node._folder.versions() == [3, 4]

    async def test_a_fetch_of_a_version_that_is_written_again_is_replaced(self, nodes):
        gate, near = asyncio.Event(), Near(nodes[0])
        await publish(nodes[0], 1)
        chunk = nodes[0].chunk

        async def slow(*arguments):
            answer = await chunk(*arguments)
            await gate.wait()  # a late chunk of the old version
            return answer

        nodes[0].chunk = slow
        await nodes[1].fetch(1, known(1), [(near, True)])
        replica = Replica(nodes[1])
        delivery = asyncio.create_task(nodes[1].deliver(replica.target, 1, False, known(1)))
        await asyncio.sleep(0.1)
        nodes[0].chunk = chunk
        writer = nodes[0]._folder.writer(1, 3000, 1000)
        for name, tensor in weights(5).items():
            writer.add(name, tensor)
        writer.close()
        wanted = await nodes[0].written(1)
        await nodes[1].fetch(1, wanted, [(near, True)])
        gate.set()
        await asyncio.wait_for(delivery, 20)
        assert torch.equal(replica.loaded["layer.1"], weights(5)["layer.1"])
        assert (await nodes[1].tally())["damaged"] == 0, "both fetches wrote to one file"

    async def test_an_old_version_of_the_same_number_is_not_loaded_before_the_new_one_arrives(self, nodes):
        near, replica = Near(nodes[0]), Replica(nodes[1])
        await publish(nodes[0], 1)
        await nodes[1].fetch(1, known(1), [(near, False)])
        await nodes[1].deliver(replica.target, 1, False, known(1))
        with pytest.raises(UnsentError, match="weights of version 1 were not sent"):
            await nodes[1].deliver(replica.target, 1, False, known(5))
        assert replica.calls.count("update_weights") == 1
        writer = nodes[0]._folder.writer(1, 3000, 1000)
        for name, tensor in weights(5).items():
            writer.add(name, tensor)
        writer.close()
        wanted = await nodes[0].written(1)
        await nodes[1].fetch(1, wanted, [(near, False)])
        await nodes[1].deliver(replica.target, 1, False, wanted)
        assert torch.equal(replica.loaded["layer.1"], weights(5)["layer.1"])


async def test_a_version_is_kept_for_a_slow_site_also_without_compression(tmp_path, monkeypatch):
    monkeypatch.setattr(relays, "keep_audible", lambda: None)
    here, there = (Relay(str(tmp_path / str(n)), None, False) for n in range(2))
    gate, near = asyncio.Event(), Near(here)
    chunk = here.chunk

    async def slow(version, *arguments):
        answer = await chunk(version, *arguments)
        if version == 1:
            await gate.wait()
        return answer

    here.chunk = slow
    await publish(here, 1)
    await there.fetch(1, known(1), [(near, True)])
    await asyncio.sleep(0.2)
    for version in (2, 3, 4):
        await publish(here, version)
    assert here._folder.versions() == [1, 3, 4], "the slow site would never complete a version"
    gate.set()
    replica = Replica(there)
    await asyncio.wait_for(there.deliver(replica.target, 1), 20)
    assert torch.equal(replica.loaded["layer.1"], weights(1)["layer.1"])


async def test_a_version_sent_in_full_over_the_link_is_logged(nodes, monkeypatch):
    near = Near(nodes[0])
    for version in (1, 2):
        await publish(nodes[0], version)
        await nodes[1].fetch(version, known(version), [(near, True)])
        await nodes[1].deliver(Replica(nodes[1]).target, version)
    nodes[0]._folder.remove(2)
    await publish(nodes[0], 3)
    lines = []
    monkeypatch.setattr(relays.logger, "warning", lambda text, *of: lines.append(text % of))
    await nodes[1].fetch(3, known(3), [(near, True)])
    await nodes[1].deliver(Replica(nodes[1]).target, 3)
    assert any("chunks came in full from another site" in line for line in lines)


async def test_close_cancels_fetches_in_flight(nodes):
    await publish(nodes[0], 1)
    gate, chunk = asyncio.Event(), nodes[0].chunk

    async def slow(*arguments):
        await gate.wait()
        return await chunk(*arguments)

    nodes[0].chunk = slow
    await nodes[1].fetch(1, known(1), [(Near(nodes[0]), False)])
    await asyncio.sleep(0.1)
    await nodes[1].close()
    gate.set()
    await asyncio.sleep(0.1)
    assert not nodes[1]._running
    assert not nodes[1]._folder.path.exists()


async def test_a_transfer_can_be_retried_after_any_error(nodes, monkeypatch):
    await publish(nodes[0], 1)

    def full(version, parts):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(nodes[1]._folder, "trim", full)
    await nodes[1].fetch(1, known(1), [(Near(nodes[0]), False)])
    with pytest.raises(OSError, match="Input/output error"):
        await nodes[1].deliver(Replica(nodes[1]).target, 1)
    with pytest.raises(WeightsError, match="removed to make room"):  # other nodes then try their next source
        await asyncio.wait_for(nodes[1].parts(1), 5)
    monkeypatch.undo()
    await nodes[1].fetch(1, known(1), [(Near(nodes[0]), False)])
    replica = Replica(nodes[1])
    await nodes[1].deliver(replica.target, 1)
    assert replica.loaded


def test_an_old_folder_that_cannot_be_removed_is_only_logged(tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr(folders.logger, "warning", lambda text, *of: lines.append(text % of))
    left = claim(tmp_path)
    let_go(left)

    def refused(path, *_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shutil, "rmtree", refused)
    assert claim(tmp_path).path.exists()
    assert any(line.startswith("cannot remove") and "Permission denied" in line for line in lines)
