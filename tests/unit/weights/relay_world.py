"""Relays of several nodes in one process, and their replicas, without verl and Ray."""

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace

import torch
from ray.exceptions import RayActorError

from verl_rhyme.weights.delivery import Target
from verl_rhyme.weights.engine import RelayCheckpointEngine
from verl_rhyme.weights.transfer import CHUNK_BYTES
from verl_rhyme.weights.writer import Writer


def weights(version):
    generator = torch.Generator().manual_seed(version)
    made = {f"layer.{n}": torch.randn(1000, generator=generator).to(torch.bfloat16) for n in range(5)}
    made["shared"] = made["layer.0"]  # as tied embeddings
    made["strided"] = torch.arange(12.0).reshape(3, 4).T
    return made


def write(folder, version, chunk_bytes=1000):
    writer = Writer(folder, version, 3000, chunk_bytes)
    for name, tensor in weights(version).items():
        writer.add(name, tensor)
    writer.close()


def let_go(folder):
    """Release a folder's lock, as if its owner had ended."""
    for each in Path("/proc/self/fd").iterdir():
        if os.path.exists(each) and os.path.realpath(each) == f"{folder.path}.lock":
            os.close(int(each.name))


def same(folder, version):
    read = dict(folder.read(version))
    wanted = weights(version)
    return read.keys() == wanted.keys() and all(torch.equal(read[name], wanted[name]) for name in wanted)


class Near:
    """A relay as a remote actor: its methods have ``remote``."""

    def __init__(self, relay):
        self.relay, self.sent = relay, 0

    def __getattr__(self, name):
        async def call(*arguments):
            self.sent += name == "chunk"
            return await getattr(self.relay, name)(*arguments)

        return SimpleNamespace(remote=call)


class Dead:
    """A relay whose process is gone."""

    def __getattr__(self, name):
        async def call(*arguments):
            raise RayActorError

        return SimpleNamespace(remote=call)


class Replica:
    """A replica as a relay sees it: its own server and worker, with a log of their calls and the loaded weights."""

    def __init__(self, relay, fails=False, idle=None):
        self.calls, self.loaded, self.fails, self.ended = [], None, fails, False
        self.idle = SimpleNamespace(remote=idle)
        self.engine = RelayCheckpointEngine(1 << 20)
        self.engine.init_process_group(str(relay._folder.path))
        self.target = Mortal(0, (self,), (self,))

    def __getattr__(self, name):
        async def call(**given):
            self.calls.append(name)
            if name == "update_weights":
                await self._update(**given)

        return SimpleNamespace(remote=call)

    async def _update(self, global_steps):
        if self.fails:
            raise RuntimeError("the engine died")
        self.loaded = {name: tensor async for name, tensor in self.engine.receive_weights(global_steps)}


class Mortal(Target):
    def kill(self):
        self.servers[0].ended = True


async def publish(relay, version):
    await relay.expect(version)
    write(relay._folder, version, chunk_bytes=CHUNK_BYTES)
    assert await relay.has(version)


async def fetch(relay, version, *sources, remote=False):
    await relay.fetch(version, [(source, remote) for source in sources])


async def deliver(relay, version):
    """Have a new replica load a version."""
    replica = Replica(relay)
    await asyncio.wait_for(relay.deliver(replica.target, version), 20)
    return replica


def loads(replica, content):
    """Whether a replica has the weights of version ``content``."""
    return torch.equal(replica.loaded["layer.1"], weights(content)["layer.1"])


def hold_chunks(relay, held):
    """Hold all chunks of a version back until the returned event is set."""
    chunk, gate = relay.chunk, asyncio.Event()

    async def late(version, *arguments):
        answer = await chunk(version, *arguments)
        if version == held:
            await gate.wait()
        return answer

    relay.chunk = late
    return gate
