"""Weight transfer over a bad link: the protocol, and its receiver."""

import asyncio
import random

import numpy as np
import pytest
import torch

from verl_rhyme.weights import receiving
from verl_rhyme.weights.folder import Folder, WeightsError
from verl_rhyme.weights.receiving import LinkError, Receiver, newest_base
from verl_rhyme.weights.sending import Base, Sender
from verl_rhyme.weights.transfer import Part, identity
from verl_rhyme.weights.writer import Writer

CHUNK = 64


def test_different_versions_have_different_identities():
    part = Part(100, CHUNK, ("a", "b"))
    others = [Part(101, CHUNK, ("a", "b")), Part(100, 32, ("a", "b")), Part(100, CHUNK, ("a", "c"))]
    assert len({identity(parts) for parts in ([part], [part, part], [], *([other] for other in others))}) == 6


class BadLink:
    """A source in this process that alters its answers."""

    def __init__(self, folder, alter=lambda answer: answer):
        self.folder, self.sender, self.alter, self.requests = folder, Sender(folder), alter, 0

    async def parts(self, version):
        return self.folder.parts(version)

    async def chunk(self, version, chunk, base, pack):
        self.requests += 1
        answer = self.sender.encode_chunk(version, chunk, self.folder.parts(version), base, pack)
        await asyncio.sleep(0)
        return self.alter(answer.copy())


def tensors(seed, changed=0.0):
    """Two tensors, each of which has a part of its own; ``changed`` is the share that depends on the seed."""
    made = [np.random.default_rng(n).integers(0, 256, size, dtype=np.uint8) for n, size in enumerate((1280, 461))]
    rng = np.random.default_rng(seed)
    for data in made:
        data[rng.random(len(data)) < changed] ^= 1
    return [torch.from_numpy(data) for data in made]


def store(path, version, content):
    path.mkdir(exist_ok=True)
    writer = Writer(Folder(path), version, part_bytes=1, chunk_bytes=CHUNK)
    for number, tensor in enumerate(content):
        writer.add(str(number), tensor)
    writer.close()
    return Folder(path)


def same(folder, version, content):
    return all(torch.equal(tensor, content[int(name)]) for name, tensor in folder.read(version))


@pytest.fixture
def fetched(monkeypatch):
    async def fetch(folder, version, *sources, base=None, silence=0.5):
        """Fetch a version from sources one after another, until one has sent it all; return the receiver's counts."""
        monkeypatch.setattr(receiving, "PATIENCE_S", silence)
        parts = await sources[0].parts(version)

        async def on_chunk(chunk):
            assert folder.read_chunk(version, chunk, parts[chunk.part]) is not None

        receiver = Receiver(folder, version, parts, on_chunk)
        for number, source in enumerate(sources, 1):
            try:
                await receiver.fetch(source, base, pack=base is not None)
                break
            except LinkError:
                assert version not in folder.versions(), "an incomplete version is listed"
                if number == len(sources):
                    raise
        return receiver.counts

    return fetch


async def test_a_broken_link_costs_only_chunks_in_flight(tmp_path, fetched):
    content = tensors(1)
    near, far = store(tmp_path / "near", 1, content), store(tmp_path / "far", 0, content[:1])
    answers = 0

    def cut(answer):
        nonlocal answers
        answers += 1
        if answers > 10:
            raise LinkError("cut")
        return answer

    again = BadLink(near)
    await fetched(far, 1, BadLink(near, cut), again)
    assert again.requests == sum(len(part.digests) for part in near.parts(1)) - 10
    assert same(far, 1, content)
    assert far.versions() == [0, 1]


async def test_a_base_of_the_same_number_but_other_bytes_is_not_used(tmp_path, fetched):
    new = tensors(2)
    near, far = store(tmp_path / "near", 1, tensors(1)), store(tmp_path / "far", 1, tensors(3, 0.5))
    store(tmp_path / "near", 2, new)
    base = newest_base(far, 2)
    assert base.identity != identity(near.parts(1))
    assert (await fetched(far, 2, BadLink(near), base=base))["damaged"] == 0
    assert same(far, 2, new)


async def test_a_damaged_base_is_dropped_after_two_answers(tmp_path, fetched):
    old, new = tensors(1), tensors(2, changed=0.02)
    near, far = store(tmp_path / "near", 1, old), store(tmp_path / "far", 1, old)
    store(tmp_path / "near", 2, new)
    base, file = newest_base(far, 2), far._file(1, 0)
    file.write_bytes(bytes(byte ^ 4 for byte in file.read_bytes()))
    counts = await fetched(far, 2, BadLink(near), base=base)
    # each chunk of the part comes packed twice, then plain; the last one is too short to be packed
    assert counts["damaged"] == 2 * (len(near.parts(2)[0].digests) - 1)
    assert same(far, 2, new)


async def test_a_version_that_always_arrives_damaged_is_never_complete(tmp_path, fetched):
    near, far = store(tmp_path / "near", 1, tensors(1)), store(tmp_path / "far", 0, tensors(0))

    def other(answer):
        answer[-1] ^= 1
        return answer

    with pytest.raises(WeightsError, match="arrived damaged, too many times"):
        await fetched(far, 1, BadLink(near, other), silence=30.0)
    assert far.versions() == [0]


async def test_random_faults_over_many_versions(tmp_path, fetched):
    """Loss, damage and broken links, while both ends move to newer versions."""
    near, far = (store(tmp_path / name, 0, tensors(0)) for name in ("near", "far"))
    for version in range(1, 21):
        rng = random.Random(version)
        content = tensors(version, changed=0.02)
        store(tmp_path / "near", version, content)

        def bad(answer, rng=rng):
            fate = rng.random()
            if fate < 0.1:
                raise LinkError("lost")
            if fate < 0.2:
                answer[rng.randrange(len(answer))] ^= 1 << rng.randrange(8)
            return answer

        sources, base = [BadLink(near, bad) for _ in range(50)], newest_base(far, version)
        await fetched(far, version, *sources, silence=rng.choice([0.0, 30.0]), base=base)
        assert same(far, version, content)
        assert newest_base(far, version + 1) == Base(version, identity(near.parts(version)))
