"""Weight versions as files: what is written is read back, and nothing incomplete is."""

import pytest
import torch
from relay_world import write

from verl_rhyme.weights.claims import claim
from verl_rhyme.weights.folder import WeightsError
from verl_rhyme.weights.transfer import all_chunks, digest
from verl_rhyme.weights.writer import Writer


def test_tensors_of_all_dtypes_and_shapes_are_read_back(tmp_path):
    """Also if the actor reuses the memory of a tensor, and if a tensor is larger than a part."""
    folder, memory = claim(tmp_path), torch.empty(400, dtype=torch.uint8)
    writer, wanted = Writer(folder, 1, 100, 64), {}
    types = (torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn, torch.int64, torch.bool)
    for n in range(60):
        kind, size = types[n % len(types)], (0, 1, 3, 7, 11, 40)[n % 5]
        tensor = memory[: size * kind.itemsize].copy_(torch.randint(2, (size * kind.itemsize,))).view(kind)
        tensor = tensor.reshape(()) if size == 1 else tensor
        wanted[f"layer.{n}"] = tensor.clone()
        writer.add(f"layer.{n}", tensor)
    writer.close()
    read = dict(folder.read(1))
    assert read.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert bytes(read[name].reshape(-1).view(torch.uint8)) == bytes(tensor.reshape(-1).view(torch.uint8))
    parts = folder.parts(1)
    for chunk in all_chunks(parts):
        part = parts[chunk.part]
        assert digest(folder.read_chunk(1, chunk, part).data) == part.digests[chunk.index]
    assert len(parts) > 5


def test_complete_versions_are_listed_in_order(tmp_path):
    folder = claim(tmp_path)
    for version in (3, 12):
        write(folder, version)
    Writer(folder, 1, part_bytes=1).add("a", torch.ones(3))  # not closed
    assert folder.versions() == [3, 12]
    with pytest.raises(WeightsError, match="no weights of version 1"):
        next(folder.read(1))


def test_an_error_for_lack_of_room_has_a_remedy(tmp_path):
    folder = claim(tmp_path)
    writer = Writer(folder, 1)
    (folder.path / "1").write_bytes(b"")  # no folder can be made here
    writer.add("a", torch.ones(3))
    with pytest.raises(WeightsError, match=r"two versions of the model.*--shm-size.*relay\.folder"):
        writer.close()
