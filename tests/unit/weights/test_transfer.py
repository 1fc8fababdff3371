"""Weight transfer over a bad link: the protocol, the coding, and the distribution tree."""

import asyncio
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_rhyme.weights.coding import DamagedError, Form, decode, encode
from verl_rhyme.weights.folder import Folder, WeightsError
from verl_rhyme.weights.receiving import LinkError, Patience, Receiver, ask_parts, base_of, begin
from verl_rhyme.weights.sending import Base, Sender
from verl_rhyme.weights.sites import Hop, tree
from verl_rhyme.weights.transfer import Chunk, Part, Transfer, all_chunks, digest, identity

CHUNK = 64


def parts_of(files):
    return [
        Part(len(data), CHUNK, tuple(digest(data[at : at + CHUNK]) for at in range(0, len(data), CHUNK)))
        for data in files
    ]


def slice_of(files, chunk):
    return files[chunk.part][chunk.index * CHUNK : (chunk.index + 1) * CHUNK]


FILES = st.lists(st.binary(min_size=1, max_size=5 * CHUNK), min_size=1, max_size=4)


class TestProtocol:
    """The state machine against a link that loses, damages, repeats and reorders answers."""

    @settings(max_examples=300)
    @given(files=FILES, seed=st.integers(0, 2**32), window=st.integers(1, 6), bad=st.floats(0, 0.8))
    def test_the_received_version_equals_the_sent_one(self, files, seed, window, bad):
        rng = random.Random(seed)
        parts, place = parts_of(files), {}
        transfer = Transfer(parts, window, tries=10**9)
        under_way, old = [], b"\0" * CHUNK
        for _ in range(20_000):
            if transfer.done:
                break
            for part in transfer.whole():
                wrong = [index for index in range(len(parts[part].digests)) if rng.random() < bad / 4]
                for index in wrong:  # torn in the file
                    del place[Chunk(part, index)]
                transfer.reread(part, wrong)
            requests = transfer.asks()
            assert not set(requests) & set(place), "a stored chunk is requested"
            under_way += requests
            assert len(set(under_way)) <= window + 2, "the window is exceeded"
            if not under_way:
                continue
            chunk = under_way.pop(rng.randrange(len(under_way)))  # in any order
            answer, fate = slice_of(files, chunk), rng.random()
            if fate < bad / 4:
                transfer.lost(chunk)
                continue
            if fate < bad / 2:
                answer = old[: rng.randrange(CHUNK)] if rng.random() < 0.5 else bytes([answer[0] ^ 1]) + answer[1:]
            elif fate < bad and len(under_way) < window:
                under_way.append(chunk)  # a duplicate
            if transfer.fits(chunk, answer):
                place[chunk] = answer
                transfer.kept(chunk, len(answer))
            else:
                assert transfer.damaged(chunk, len(answer))
            if fate > 1 - bad / 50:  # the receiver restarts and verifies its stored chunks
                under_way, counts = [], transfer.counts
                transfer = Transfer(parts, window, tries=10**9)
                for each, data in place.items():
                    assert transfer.fits(each, data)
                    transfer.found(each)
                assert transfer.counts.found == len(place) or counts is None
        assert transfer.done
        assert {chunk: slice_of(files, chunk) for chunk in all_chunks(parts)} == place
        assert not transfer.missing

    @given(files=FILES)
    def test_each_chunk_is_requested_once_over_a_good_link(self, files):
        parts, requests = parts_of(files), Counter()
        transfer = Transfer(parts, 3)
        while not transfer.done:
            now = transfer.asks()
            requests.update(now)
            for chunk in now:
                assert transfer.kept(chunk, 1)
                assert not transfer.kept(chunk, 1), "a duplicate counts as missing"
            for part in transfer.whole():
                transfer.reread(part, [])
        assert requests == Counter(all_chunks(parts))

    def test_a_chunk_that_never_fits_fails(self):
        transfer = Transfer(parts_of([b"x" * 100]), 1, tries=3)
        [chunk] = transfer.asks()
        outcomes = []
        for _ in range(3):
            outcomes.append((transfer.plain(chunk), transfer.damaged(chunk, 5)))
        assert outcomes == [(False, True), (False, True), (True, False)], "plain only after two packed answers"
        assert transfer.counts.damaged == 3

    def test_the_window_shrinks_on_a_link_that_loses_answers(self):
        transfer = Transfer(parts_of([bytes(40 * CHUNK)]), 8)
        for chunk in transfer.asks():
            transfer.lost(chunk)
        assert len(transfer.asks()) == 1
        transfer.cut()
        for _ in range(3):
            transfer.kept(transfer.missing[0], 1)
        assert len(transfer.asks()) == 4

    @given(files=FILES)
    def test_different_versions_have_different_identities(self, files):
        parts = parts_of(files)
        other = [*files[:-1], files[-1][:-1] + bytes([files[-1][-1] ^ 1])]
        assert identity(parts) == identity(parts_of(files))
        assert identity(parts) != identity(parts_of(other))
        assert identity(parts) != identity(parts[:-1])


class TestCoding:
    @settings(max_examples=300)
    @given(
        size=st.integers(1, 3000),
        changed=st.floats(0, 1),
        seed=st.integers(0, 2**32),
        kind=st.sampled_from(["random", "zeros", "bf16"]),
    )
    def test_coding_is_lossless(self, size, changed, seed, kind):
        rng = np.random.default_rng(seed)
        old = rng.integers(0, 256, size, dtype=np.uint8)
        if kind == "bf16":
            old = (rng.normal(0, 0.02, size).astype(np.float32).view(np.uint32) >> 16).astype("<u2").view(np.uint8)
        elif kind == "zeros":
            old = np.zeros(size, np.uint8)
        new = old.copy()
        where = rng.random(len(old)) < changed**3
        new[where] ^= rng.integers(0, 4, where.sum(), dtype=np.uint8)
        for base in (None, old):
            for pack in (True, False):
                coded = encode(new, base, pack)
                assert len(coded) <= len(new) + 1
                assert np.array_equal(decode(coded, len(new), base), new)

    def test_gaps_of_any_width(self):
        old = np.zeros(2_000_001, np.uint8)
        new = old.copy()
        new[[0, 2, 2 * 254, 2 * 600, 1_500_001, 2_000_000]] = 7
        coded = encode(new, old)
        assert coded[0] == Form.GAPS
        assert len(coded) < 100
        assert np.array_equal(decode(coded, len(new), old), new)

    @settings(max_examples=300)
    @given(seed=st.integers(0, 2**32), few=st.booleans(), cut=st.booleans())
    def test_damaged_bytes_raise_or_fail_the_checksum(self, seed, few, cut):
        rng = np.random.default_rng(seed)
        old = rng.integers(0, 256, 2001, dtype=np.uint8)
        new = old.copy()
        new[:: 400 if few else 3] ^= 1
        coded = encode(new, old).copy()
        assert coded[0] == (Form.GAPS if few else Form.DELTA)
        if cut:
            coded = coded[: rng.integers(len(coded))]
        else:
            coded[rng.integers(len(coded))] ^= 1 << rng.integers(8)
        try:
            made = decode(coded, len(new), old)
        except DamagedError:
            return
        wanted = parts_of([new.tobytes()])[0].digests
        assert parts_of([made.tobytes()])[0].digests != wanted or np.array_equal(made, new)

    def test_a_difference_needs_its_base(self):
        old = np.random.default_rng(0).integers(0, 256, 3000, dtype=np.uint8)
        for each, form in ((1000, Form.GAPS), (3, Form.DELTA)):
            new = old.copy()
            new[::each] ^= 1
            coded = encode(new, old)
            assert coded[0] == form
            with pytest.raises(DamagedError, match="cannot be decoded here"):
                decode(coded, 3000, None)


class TestTree:
    @given(
        nodes=st.dictionaries(st.sampled_from("bcdefghijklm"), st.sampled_from(["x", "y", "z", None])),
        home=st.sampled_from(["x", None]),
    )
    def test_a_version_goes_to_each_site_once(self, nodes, home):
        sources = tree("a", nodes, {**nodes, "a": home})
        assert sources.keys() == nodes.keys()
        far = [node for node, hops in sources.items() if hops[0].far]
        assert sorted(str(nodes[node]) for node in far) == sorted({str(s) for s in nodes.values() if s != home})
        sends = Counter(hops[0].node for hops in sources.values() if not hops[0].far)
        assert all(count <= 2 for count in sends.values())
        order = ["a", *sources]
        for node, hops in sources.items():
            assert hops[-1] == Hop("a", nodes[node] != home), "the last resort is not the source"
            assert all(order.index(hop.node) < order.index(node) for hop in hops), "the hops form a cycle"
            assert all(nodes[hop.node] == nodes[node] and not hop.far for hop in hops[:-1])


def store(path, version, files):
    """Write a complete version to a folder."""
    folder, parts = Folder(path), parts_of(files)
    path.mkdir(exist_ok=True)
    for chunk in all_chunks(parts):
        folder.put(version, chunk, parts[chunk.part], np.frombuffer(slice_of(files, chunk), np.uint8))
    folder.complete(version, parts)
    return folder


class BadLink:
    """A source in this process that alters its answers."""

    def __init__(self, folder, alter=lambda chunk, answer: answer):
        self.folder, self.sender, self.alter, self.requests, self.bytes = folder, Sender(folder), alter, Counter(), 0
        self.bases = set()

    async def parts(self, version):
        return self.folder.parts(version)

    async def chunk(self, version, chunk, base, pack):
        self.requests[chunk] += 1
        self.bases.add(base)
        answer = self.sender.answer(version, chunk, self.folder.parts(version), base, pack)
        self.bytes += len(answer)
        await asyncio.sleep(0)
        return self.alter(chunk, answer.copy())


SHORT, LONG = Patience(30.0, 0.5), Patience(30.0, 30.0)


def some_files(seed, changed=0.0):
    rng = np.random.default_rng(0)
    files = [rng.integers(0, 256, size, dtype=np.uint8) for size in (20 * CHUNK, 7 * CHUNK + 13)]
    rng = np.random.default_rng(seed)
    for data in files:
        data[rng.random(len(data)) < changed] ^= 1
    return [data.tobytes() for data in files]


async def fetched(folder, version, source, patience=SHORT, **more):
    parts = await ask_parts(source, version, patience)
    transfer = await begin(folder, version, parts)

    async def kept(chunk):
        assert folder.chunk(version, chunk, parts[chunk.part]) is not None

    receiver = Receiver(folder, version, transfer, kept, patience)
    await receiver.fetch(source, more.get("base"), more.get("pack", False))
    return transfer


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

        with pytest.raises(LinkError, match="no chunk of weights of version 1 arrived"):
            await fetched(far, 1, BadLink(near, cut))
        assert far.versions() == [0], "an incomplete version is listed"
        again = BadLink(near)
        transfer = await fetched(far, 1, again)  # as after a restart
        assert transfer.counts.found == 10
        assert sum(again.requests.values()) == 28 - 10
        assert same(far, 1, files)
        assert far.versions() == [0, 1]

    async def test_a_chunk_torn_in_its_file_is_found_and_fetched_again(self, tmp_path):
        files = some_files(1)
        near, far = store(tmp_path / "near", 1, files), store(tmp_path / "far", 0, [b"0"])
        put, torn = far.put, []

        def tearing(version, chunk, part, data):
            if chunk == Chunk(0, 4) and not torn:
                torn.append(chunk)
                data = np.where(np.arange(len(data)) < len(data) // 2, data, 0).astype(np.uint8)
            put(version, chunk, part, data)

        far.put = tearing
        transfer = await fetched(far, 1, BadLink(near))
        assert torn
        assert transfer.counts.damaged == 1
        assert same(far, 1, files)

    async def test_a_version_is_sent_as_a_difference_from_the_previous_one(self, tmp_path):
        old, new = some_files(1), some_files(2, changed=0.02)
        near, far = store(tmp_path / "near", 1, old), store(tmp_path / "far", 1, old)
        store(tmp_path / "near", 2, new)
        source = BadLink(near)
        await fetched(far, 2, source, base=base_of(far, 2), pack=True)
        assert same(far, 2, new)
        assert source.bytes < sum(map(len, new)) / 1.5

    async def test_a_base_of_the_same_number_but_other_bytes_is_not_used(self, tmp_path):
        new = some_files(2)
        near, far = store(tmp_path / "near", 1, some_files(1)), store(tmp_path / "far", 1, some_files(3, 0.5))
        store(tmp_path / "near", 2, new)
        base = base_of(far, 2)
        assert base.identity != identity(near.parts(1))
        counts = (await fetched(far, 2, BadLink(near), base=base, pack=True)).counts
        assert counts.damaged == 0
        assert same(far, 2, new)

    async def test_a_damaged_base_is_dropped_after_two_answers(self, tmp_path):
        old, new = some_files(1), some_files(2, changed=0.02)
        near, far = store(tmp_path / "near", 1, old), store(tmp_path / "far", 1, old)
        store(tmp_path / "near", 2, new)
        base = base_of(far, 2)
        file = far._file(1, 0)
        file.write_bytes(bytes(byte ^ 4 for byte in file.read_bytes()))
        counts = (await fetched(far, 2, BadLink(near), base=base, pack=True)).counts
        assert counts.damaged == 2 * 20, "each chunk of the part comes packed twice, then plain"
        assert same(far, 2, new)

    async def test_a_version_that_always_arrives_damaged_is_never_complete(self, tmp_path):
        near, far = store(tmp_path / "near", 1, some_files(1)), store(tmp_path / "far", 0, [b"0"])

        def other(chunk, answer):
            answer[-1] ^= 1
            return answer

        with pytest.raises(WeightsError, match="arrived damaged, too many times"):
            await fetched(far, 1, BadLink(near, other), LONG)
        assert far.versions() == [0]

    async def test_remains_of_another_version_of_the_same_number_are_not_used(self, tmp_path):
        near, far = store(tmp_path / "near", 1, some_files(1)), store(tmp_path / "far", 0, [b"0"])
        long = [b"x" * 30 * CHUNK, some_files(1)[1], b"third"]
        left = parts_of(long)
        for chunk in all_chunks(left):
            far.put(1, chunk, left[chunk.part], np.frombuffer(slice_of(long, chunk), np.uint8))
        counts = (await fetched(far, 1, BadLink(near))).counts
        assert counts.found == 8, "not exactly the chunks of the second part, which are equal, were kept"
        assert same(far, 1, some_files(1))

    async def test_random_faults_over_many_versions(self, tmp_path):
        """Loss, damage, broken links and restarts of the receiver, while both ends move to newer versions."""
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

            for _ in range(50):
                try:
                    source, patience = BadLink(near, bad), Patience(30.0, rng.choice([0.0, 30.0]))
                    await fetched(far, version, source, patience, base=base_of(far, version), pack=True)
                    break
                except LinkError:
                    assert version not in far.versions()
            assert same(far, version, files)
            assert base_of(far, version + 1) == Base(version, identity(near.parts(version)))
