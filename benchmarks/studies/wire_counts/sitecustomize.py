"""In a process with this folder in PYTHONPATH, what it exchanges with TransferQueue and asks of Ray actors is counted.

Each process writes its counts to a file in ``WIRE_COUNTS``. Counted are the ZeroMQ messages that it sends and receives,
TransferQueue's, and with an engine's front end in it also vLLM's; and the calls of actors' methods that it makes, with
the pickled size of their arguments. Answers of Ray calls are not counted. A module of this name is imported by every
Python process at its start.
"""

import contextlib
import importlib.util
import json
import os
import sys
import threading
import time
from collections import Counter
from importlib.abc import MetaPathFinder
from pathlib import Path

_COUNTS: "Counter[str]" = Counter()
_writer_of = None  # a fork has no thread of its own


class _Finder(MetaPathFinder):
    """Wraps what counts in a module when it is imported."""

    def __init__(self, wraps):
        self._wraps = wraps

    def find_spec(self, name, path, target=None):
        wrap = self._wraps.pop(name, None)
        if wrap is None:
            return None
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            wrap(module)

        spec.loader.exec_module = exec_module
        return spec


def _zmq(module):
    send, receive = module.Socket.send_multipart, module.Socket.recv_multipart

    def send_multipart(self, msg_parts, *args, **kwargs):
        answer = send(self, msg_parts, *args, **kwargs)  # raises where it has to be tried again
        _count("sent", sum(memoryview(part).nbytes for part in msg_parts))
        return answer

    def recv_multipart(self, *args, **kwargs):
        parts = receive(self, *args, **kwargs)
        _count("received", sum(memoryview(part).nbytes for part in parts))
        return parts

    module.Socket.send_multipart, module.Socket.recv_multipart = send_multipart, recv_multipart


def _ray(module):
    call = module.ActorHandle._actor_method_call

    def counted(self, method_name, args=None, kwargs=None, *rest, **options):
        try:
            from ray import cloudpickle

            _count("ray", len(cloudpickle.dumps((args, kwargs))))
        except Exception:  # what cannot be pickled fails in the call itself
            _count("ray", 0)
        return call(self, method_name, args, kwargs, *rest, **options)

    module.ActorHandle._actor_method_call = counted


def _count(kind, size):
    global _writer_of
    if _writer_of != os.getpid():
        _writer_of = os.getpid()
        _COUNTS.clear()
        threading.Thread(target=_write, daemon=True).start()
    _COUNTS[f"{kind} messages"] += 1
    _COUNTS[f"{kind} bytes"] += size


def _write():
    path = Path(os.environ["WIRE_COUNTS"]) / f"{os.getpid()}.json"
    while True:
        time.sleep(0.5)
        title = Path("/proc/self/cmdline").read_text().replace("\0", " ").strip()
        with contextlib.suppress(RuntimeError):  # counted meanwhile: the next one has it
            path.with_suffix(".new").write_text(json.dumps({"title": title, **_COUNTS}))
            path.with_suffix(".new").replace(path)


if "WIRE_COUNTS" in os.environ:
    sys.meta_path.insert(0, _Finder({"zmq.sugar.socket": _zmq, "ray.actor": _ray}))
