"""Emulate a link between two sites on one machine with two network namespaces.

In the product, nodes send these requests and responses (``weights/receiving.py``, ``sending.py``) as Ray calls; here
they go over TCP. The kernel's token bucket (``tc``'s tbf) limits the bandwidth of a pair of virtual interfaces.
:class:`Wire`, a TCP relay in this process, adds delay and cuts, because the kernel may lack netem. Responses on
separate connections can overtake each other. The emulation cannot lose, reorder or duplicate single packets below TCP.

    python -m benchmarks.far_link FOLDER HOST PORT   # a sender, in the namespace of this command
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import shutil
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verl_rhyme.weights.folder import Folder
from verl_rhyme.weights.receiving import LinkError
from verl_rhyme.weights.sending import Base, Sender
from verl_rhyme.weights.transfer import Chunk, Part

_LENGTH = struct.Struct("<Q")
_MOST = 1 << 30
_numbers = itertools.count()


# ---- requests and responses over TCP ----


async def _read(reader: asyncio.StreamReader) -> bytes:
    [size] = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if size > _MOST:
        raise ConnectionError("a damaged length")
    return await reader.readexactly(size)


async def serve(folder: Folder, host: str, port: int) -> None:
    """Serve requests until the process is killed."""
    sender = Sender(folder)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                version, chunk, base, pack = pickle.loads(await _read(reader))
                parts = folder.parts(version)
                if chunk is None:
                    payload = pickle.dumps(parts)
                else:
                    payload = bytes(await asyncio.to_thread(sender.encode_chunk, version, chunk, parts, base, pack))
                writer.write(_LENGTH.pack(len(payload)) + payload)
                await writer.drain()
        except (OSError, EOFError, pickle.UnpicklingError):  # cut or damaged: the receiver sends the request again
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, host, port)
    print("ready", flush=True)
    await server.serve_forever()


class TcpSource:
    """Remote folder at an address. Connections are reused for the next request, and dropped after an error."""

    def __init__(self, host: str, port: int) -> None:
        self._at, self._free = (host, port), list[Any]()

    async def parts(self, version: int) -> list[Part]:
        try:
            return pickle.loads(await self._ask(version, None, None, False))
        except LinkError:
            raise
        except Exception as error:  # a torn pickle may raise anything
            raise LinkError(f"a damaged answer: {error}") from error

    async def chunk(self, version: int, chunk: Chunk, base: Base | None, pack: bool) -> np.ndarray:
        return np.frombuffer(await self._ask(version, chunk, base, pack), np.uint8)

    async def _ask(self, *question: Any) -> bytes:
        writer = None
        try:
            reader, writer = self._free.pop() if self._free else await asyncio.open_connection(*self._at)
            payload = pickle.dumps(question)
            writer.write(_LENGTH.pack(len(payload)) + payload)
            await writer.drain()
            answer = await _read(reader)
        except (OSError, EOFError) as error:
            if writer is not None:
                writer.close()
            raise LinkError(str(error)) from error
        except BaseException:  # cancelled: the next request must not read this response
            if writer is not None:
                writer.close()
            raise
        self._free.append((reader, writer))
        return answer


# ---- delay and cuts ----


@dataclass
class Wire:
    """Relay of TCP streams with delay and cuts.

    Attributes:
        host: Host of the sender.
        port: Port of the sender.
        delay_s: One-way delay in seconds.
        up: Whether the link works; else data is dropped and connections are refused.
        bytes: Bytes received from the sender.
    """

    host: str
    port: int
    delay_s: float = 0.0
    up: bool = True
    bytes: int = 0
    at: int = 0
    _open: set[asyncio.StreamWriter] = field(default_factory=set)
    _passing: set[asyncio.Task[Any]] = field(default_factory=set)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Wire]:
        """Listen at ``127.0.0.1:at``."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.at = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            self.cut()
            await asyncio.gather(*self._passing, return_exceptions=True)

    def cut(self) -> None:
        self.up = False
        for writer in list(self._open):
            writer.transport.abort()

    def mend(self) -> None:
        self.up = True

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.up:
            writer.transport.abort()
            return
        self._open.add(writer)
        far_writer, task = None, asyncio.current_task()
        assert task is not None
        self._passing.add(task)
        try:
            far, far_writer = await asyncio.open_connection(self.host, self.port)
            self._open.add(far_writer)
            await asyncio.gather(self._pass(reader, far_writer, False), self._pass(far, writer, True))
        except OSError:
            pass
        finally:
            self._passing.discard(task)
            for each in (writer, far_writer):
                if each is not None:
                    self._open.discard(each)
                    each.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, back: bool) -> None:
        loop, late = asyncio.get_running_loop(), asyncio.Queue[tuple[float, bytes]](64)

        async def write() -> None:
            while True:
                when, data = await late.get()
                await asyncio.sleep(when - loop.time())
                writer.write(data)
                await writer.drain()

        writing = asyncio.create_task(write())
        try:
            while data := await reader.read(1 << 16):
                if back:
                    self.bytes += len(data)
                await late.put((loop.time() + self.delay_s, data))
            raise ConnectionError("the other side closed the connection")
        finally:
            writing.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await writing


# ---- two sites ----


def missing() -> str:
    """Return why this machine cannot emulate a second site, or ``""``."""
    if not sys.platform.startswith("linux") or not all(map(shutil.which, ("ip", "tc"))):
        return "needs Linux with ip and tc (iproute2)"
    if os.geteuid():
        return "needs root, to make network namespaces"
    try:
        with two_sites(1e9):
            return ""
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"


@contextmanager
def two_sites(bits_per_s: float) -> Iterator[tuple[str, str]]:
    """Yield the name of a second network namespace, and the far end's address in it.

    Args:
        bits_per_s: Bandwidth from the far namespace to this one.
    """
    name = f"far{os.getpid() % 100_000}x{next(_numbers)}"
    low = 4 * (os.getpid() % 60)
    net = f"10.213.{(os.getpid() // 60) % 250}"
    here, there = f"{net}.{low + 1}", f"{net}.{low + 2}"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b", "netns", name)
        _run("ip", "addr", "add", f"{here}/30", "dev", f"{name}a")
        _run("ip", "link", "set", f"{name}a", "up")
        _run("ip", "-n", name, "addr", "add", f"{there}/30", "dev", f"{name}b")
        _run("ip", "-n", name, "link", "set", f"{name}b", "up")
        burst = max(32_000, int(bits_per_s / 8 / 250))  # bytes of a kernel's tick
        limit = ["rate", f"{int(bits_per_s)}bit", "burst", str(burst), "latency", "50ms"]
        _run("tc", "-n", name, "qdisc", "add", "dev", f"{name}b", "root", "tbf", *limit)
        yield name, there
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)  # and both interfaces
        subprocess.run(["ip", "link", "del", f"{name}a"], capture_output=True, check=False)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@contextmanager
def sender(name: str, folder: Folder, host: str, port: int) -> Iterator[subprocess.Popen[str]]:
    """Run a process in a namespace that serves a folder."""
    command = ["ip", "netns", "exec", name, sys.executable, "-m", "benchmarks.far_link", str(folder.path), host]
    process = subprocess.Popen([*command, str(port)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", "the sender did not start"
        yield process
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    asyncio.run(serve(Folder(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
