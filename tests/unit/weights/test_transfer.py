"""Weight transfer over a bad link: the protocol, and its receiver."""

import asyncio
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_rhyme.weights.folder import Folder, WeightsError
from verl_rhyme.weights.receiving import LinkError, Receiver, newest_base, request_parts
from verl_rhyme.weights.sending import Base, Sender
from verl_rhyme.weights.transfer import Part, all_chunks, digest, identity

CHUNK = 64


def parts_of(files):
    return [
        Part(len(data), CHUNK, tuple(digest(data[at : at + CHUNK]) for at in range(0, len(data), CHUNK)))
        for data in files
    ]


def slice_of(files, chunk):
    return files[chunk.part][chunk.index * CHUNK : (chunk.index + 1) * CHUNK]


FILES = st.lists(st.binary(min_size=1, max_size=5 * CHUNK), min_size=1, max_size=4)


@given(files=FILES)
def test_different_versions_have_different_identities(files):
    parts = parts_of(files)
    other = [*files[:-1], files[-1][:-1] + bytes([files[-1][-1] ^ 1])]
    assert identity(parts) == identity(parts_of(files))
    assert identity(parts) != identity(parts_of(other))
    assert identity(parts) != identity(parts[:-1])


def store(path, version, files):
    """Write a complete version to a folder."""
    folder, parts = Folder(path), parts_of(files)
    path.mkdir(exist_ok=True)
    for chunk in all_chunks(parts):
        folder.write_chunk(version, chunk, parts[chunk.part], np.frombuffer(slice_of(files, chunk), np.uint8))
    folder.complete(version, parts)
    return folder


class BadLink:
    """A source in this process that alters its answers."""

    def __init__(self, folder, alter=lambda chunk, answer: answer):
        self.folder, self.sender, self.alter, self.requests = folder, Sender(folder), alter, Counter()

    async def parts(self, version):
        return self.folder.parts(version)

    async def chunk(self, version, chunk, base, pack):
        self.requests[chunk] += 1
        answer = self.sender.encode_chunk(version, chunk, self.folder.parts(version), base, pack)
        await asyncio.sleep(0)
        return self.alter(chunk, answer.copy())


def some_files(seed, changed=0.0):
    rng = np.random.default_rng(0)
    files = [rng.integers(0, 256, size, dtype=np.uint8) for size in (20 * CHUNK, 7 * CHUNK + 13)]
    rng = np.random.default_rng(seed)
    for data in files:
        data[rng.random(len(data)) < changed] ^= 1
    return [data.tobytes() for data in files]


async def fetched(folder, version, *sources, silence=0.5, base=None, pack=False):
    """Fetch a version from sources one after another, until one has sent it all; return the receiver."""
    parts = await request_parts(sources[0], version)

    async def on_chunk(chunk):
        assert folder.read_chunk(version, chunk, parts[chunk.part]) is not None

    receiver = Receiver(folder, version, parts, on_chunk, silence)
    for number, source in enumerate(sources, 1):
        try:
            await receiver.fetch(source, base, pack)
            break
        except LinkError:
            assert version not in folder.versions(), "an incomplete version is listed"
            if number == len(sources):
                raise
    return receiver


def same(folder, version, files):
    return all(folder._file(version, number).read_bytes() == data for number, data in enumerate(files))


class TestReceiver:
    async def test_a_broken_link_costs_only_chunks_in_flight(self, tmp_path):
        files = some_files(1)
        near, far = store(tmp_path / "near", 1, files), store(tmp_path / "far", 0, [b"0"])
        answers = 0

        def cut(chunk, answer):
            nonlocal answers
            answers += 1
            if answers > 10:
                raise LinkError("cut")
            return answer

        again = BadLink(near)
        await fetched(far, 1, BadLink(near, cut), again)
        assert sum(again.requests.values()) == 28 - 10
        assert same(far, 1, files)
        assert far.versions() == [0, 1]

    async def test_a_base_of_the_same_number_but_other_bytes_is_not_used(self, tmp_path):
        new = some_files(2)
        near, far = store(tmp_path / "near", 1, some_files(1)), store(tmp_path / "far", 1, some_files(3, 0.5))
        store(tmp_path / "near", 2, new)
        base = newest_base(far, 2)
        assert base.identity != identity(near.parts(1))
        counts = (await fetched(far, 2, BadLink(near), base=base, pack=True)).counts
        assert counts["damaged"] == 0
        assert same(far, 2, new)

    async def test_a_damaged_base_is_dropped_after_two_answers(self, tmp_path):
        old, new = some_files(1), some_files(2, changed=0.02)
        near, far = store(tmp_path / "near", 1, old), store(tmp_path / "far", 1, old)
        store(tmp_path / "near", 2, new)
        base = newest_base(far, 2)
        file = far._file(1, 0)
        file.write_bytes(bytes(byte ^ 4 for byte in file.read_bytes()))
        counts = (await fetched(far, 2, BadLink(near), base=base, pack=True)).counts
        assert counts["damaged"] == 2 * 20, "each chunk of the part comes packed twice, then plain"
        assert same(far, 2, new)

    async def test_a_version_that_always_arrives_damaged_is_never_complete(self, tmp_path):
        near, far = store(tmp_path / "near", 1, some_files(1)), store(tmp_path / "far", 0, [b"0"])

        def other(chunk, answer):
            answer[-1] ^= 1
            return answer

        with pytest.raises(WeightsError, match="arrived damaged, too many times"):
            await fetched(far, 1, BadLink(near, other), silence=30.0)
        assert far.versions() == [0]

    async def test_random_faults_over_many_versions(self, tmp_path):
        """Loss, damage and broken links, while both ends move to newer versions."""
        far = store(tmp_path / "far", 0, some_files(0))
        near = store(tmp_path / "near", 0, some_files(0))
        for version in range(1, 21):
            rng = random.Random(version)
            files = some_files(version, changed=0.02)
            store(tmp_path / "near", version, files)

            def bad(chunk, answer, rng=rng):
                fate = rng.random()
                if fate < 0.1:
                    raise LinkError("lost")
                if fate < 0.2:
                    answer[rng.randrange(len(answer))] ^= 1 << rng.randrange(8)
                return answer

            sources, base = [BadLink(near, bad) for _ in range(50)], newest_base(far, version)
            await fetched(far, version, *sources, silence=rng.choice([0.0, 30.0]), base=base, pack=True)
            assert same(far, version, files)
            assert newest_base(far, version + 1) == Base(version, identity(near.parts(version)))
