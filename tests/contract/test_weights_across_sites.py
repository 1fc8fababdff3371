"""Weights between two network namespaces of this machine: the product's protocol and files, over a bad link.

What carries questions and answers is the test's own (``benchmarks/far_link.py``): Ray's calls need a cluster on both
sides. Bandwidth is tc's tbf; delay, cuts and damage are made above TCP, netem being absent from some kernels. Not
tested: loss, reordering and duplication of packets below TCP, and what Ray itself does when a link is cut.
"""

import asyncio
import random
import time

import pytest
import torch

from benchmarks import far_link
from benchmarks.far_link import TcpSource, Wire, sender, two_sites
from verl_rhyme.weights.folder import claim
from verl_rhyme.weights.receiving import Patience, Receiver, ask_parts, base_of, begin
from verl_rhyme.weights.transfer import identity

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why := far_link.missing()), reason=why or "there is a far side"),
]

PORT, CHUNK, PARTS = 9000, 1 << 16, 1 << 20
MBIT = 1e6
PATIENCE = Patience(1.0, 20.0)


def weights(version):
    """A few megabytes in bf16; of each version to the next a hundredth changes in the last bit."""
    generator = torch.Generator().manual_seed(0)
    made = {f"layer.{n}": (torch.randn(300_000, generator=generator) / 50).to(torch.bfloat16) for n in range(6)}
    for step in range(version):
        generator = torch.Generator().manual_seed(step)
        for tensor in made.values():
            bits = tensor.view(torch.int16)
            bits ^= (torch.rand(bits.shape, generator=generator) < 0.01).to(torch.int16)
    return made


def write(folder, version):
    writer = folder.writer(version, PARTS, CHUNK)
    for name, tensor in weights(version).items():
        writer.add(name, tensor)
    writer.close()
    return identity(folder.parts(version))


def is_whole(folder, version):
    wanted = weights(version)
    read = dict(folder.read(version))
    return read.keys() == wanted.keys() and all(torch.equal(read[name], wanted[name]) for name in wanted)


async def fetch(folder, version, wanted, source, attempts=None):
    """As a node's relay does, which starts anew each time."""
    parts = await ask_parts(source, version, PATIENCE)
    while identity(parts) != wanted:  # damaged on its way
        parts = await ask_parts(source, version, PATIENCE)
    transfer = await begin(folder, version, parts)
    if attempts is not None:
        attempts.append(transfer.counts)

    async def kept(chunk):
        pass

    receiver = Receiver(folder, version, transfer, kept, PATIENCE)
    await receiver.fetch(source, base_of(folder, version), True)


@pytest.fixture(scope="module", autouse=True)
def far_side():
    if why := far_link.missing():
        pytest.skip(why)


@pytest.fixture
def folders(tmp_path):
    return claim(tmp_path / "near"), claim(tmp_path / "far")


async def test_an_update_crosses_a_slow_link_as_what_changed(folders):
    there, here = folders
    with two_sites(100 * MBIT) as (name, host), sender(name, there, host, PORT):
        wire = Wire(host, PORT, delay_s=0.02)
        async with wire.running():
            source = TcpSource("127.0.0.1", wire.at)
            took = []
            for version in (1, 2):
                wanted, wire.bytes, began = write(there, version), 0, time.monotonic()
                await fetch(here, version, wanted, source)
                took.append((wire.bytes, time.monotonic() - began))
                assert is_whole(here, version)
    [(full, seconds), (less, _)] = took
    size = sum(tensor.nbytes for tensor in weights(1).values())
    assert 0.5 * size < full < 1.1 * size
    assert less < size / 20, "a hundredth of the words changed, by a bit"
    assert seconds > full * 8 / (100 * MBIT) * 0.8, "the link is not as slow as it was asked to be"


async def test_cuts_damage_and_ends_that_start_anew_cost_only_time(folders):
    there, here = folders
    rng, cuts, attempts = random.Random(0), 0, []
    with two_sites(100 * MBIT) as (name, host):
        wire = Wire(host, PORT, delay_s=0.005, flip=0.1, tear=0.02)
        async with wire.running():
            source = TcpSource("127.0.0.1", wire.at)
            for version in (1, 2, 3):
                wanted = write(there, version)
                fetching = None
                while version not in here.versions():
                    with sender(name, there, host, PORT):  # which starts anew each time
                        if fetching is None:
                            fetching = asyncio.create_task(fetch(here, version, wanted, source, attempts))
                        until = wire.bytes + rng.randrange(600_000, 900_000)
                        while wire.bytes < until and not fetching.done():
                            await asyncio.sleep(0.01)
                        if fetching.done():
                            await fetching
                            continue
                        wire.cut()
                        if cuts % 2 == 0:  # the receiver ends, too
                            fetching.cancel()
                            await asyncio.wait([fetching])
                            fetching = None
                        await asyncio.sleep(0.2)
                        wire.mend()
                        cuts += 1
                        assert cuts < 100
                assert is_whole(here, version)
                assert identity(here.parts(version)) == wanted
    assert cuts >= 2
    assert sum(each.lost for each in attempts) > 0
    assert sum(each.damaged for each in attempts) > 0
    assert sum(each.found for each in attempts) > 0, "what had come was sent again"
