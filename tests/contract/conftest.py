"""One process that has imported verl serves the tests that each want a process of their own to look at it."""

import json
import os
import subprocess
import sys
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import pytest


class Forks:
    """As ``subprocess.run`` of a Python that has imported verl already, with the plugin and verl's CPU platform.

    Each call is a process of its own, forked from one that waits (``forks.py``).
    """

    def __init__(self, folder):
        self._folder, self._calls = folder, 0
        self._errors = (folder / "errors").open("w+")
        self._server = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("forks.py"))],
            env={**os.environ, "VERL_PLATFORM": "cpu"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._answer()

    def python(self, code):
        """``python -c CODE``; asserts that it ends well."""
        done = self._run({"code": code, "arguments": [], "cwd": str(self._folder), "env": {}})
        assert done.returncode == 0, done.stderr[-3000:]
        return done

    def main_ppo(self, *arguments, cwd, env=None):
        """``python -m verl.trainer.main_ppo ARGUMENTS``, with ``env`` beside the environment's variables."""
        return self._run({"code": None, "arguments": arguments, "cwd": str(cwd), "env": env or {}})

    def close(self):
        self._server.stdin.close()
        self._server.wait(timeout=30)

    def _run(self, request):
        self._calls += 1
        files = {name: self._folder / f"{self._calls}.{name}" for name in ("stdout", "stderr")}
        print(json.dumps({**request, **{name: str(file) for name, file in files.items()}}), file=self._server.stdin)
        self._server.stdin.flush()
        status = int(self._answer())
        printed = {name: file.read_text() if file.exists() else "" for name, file in files.items()}
        return subprocess.CompletedProcess(request["arguments"], status, **printed)

    def _answer(self):
        line = self._server.stdout.readline()
        if not line:
            self._errors.seek(0)
            raise AssertionError(f"the process with verl died: {self._errors.read()[-3000:]}")
        return line


@pytest.fixture(scope="session")
def forks(tmp_path_factory):
    """Tests that use it belong to ``pytest.mark.xdist_group("forks")``: then there is one."""
    made = Forks(tmp_path_factory.mktemp("forks"))
    yield made
    made.close()


@pytest.fixture
def queue(monkeypatch):
    """TransferQueue: its controller and a storage unit, in threads of this process; they are Ray actors otherwise."""
    import transfer_queue
    from omegaconf import OmegaConf
    from transfer_queue import interface
    from transfer_queue.controller import TransferQueueController
    from transfer_queue.storage.managers import base as storage_manager
    from transfer_queue.storage.simple_storage import SimpleStorageUnit
    from verl.utils import transferqueue_utils

    controller, unit = (
        actor.__ray_metadata__.modified_class(*arguments)
        for actor, arguments in ((TransferQueueController, ()), (SimpleStorageUnit, ({},)))
    )
    nowhere = SimpleNamespace(get_actor_id=lambda: None, get_task_id=lambda: None)
    monkeypatch.setattr(storage_manager, "ray", SimpleNamespace(get_runtime_context=lambda: nowhere))
    config = OmegaConf.create(flags={"allow_objects": True})
    config.merge_with(OmegaConf.load(resources.files("transfer_queue") / "config.yaml"))
    config.controller.zmq_info = controller.get_zmq_server_info()
    config.backend.SimpleStorage.zmq_info = {"unit": unit.get_zmq_server_info()}
    monkeypatch.setattr(interface, "_TQ_CLIENT", None)
    for module in (interface, transfer_queue):  # join() replaces it
        monkeypatch.setattr(module, "async_kv_clear", module.async_kv_clear)
    interface._maybe_create_tq_client(config)
    monkeypatch.setattr(transferqueue_utils, "TQ_INITIALIZED", True)
    yield
    interface._TQ_CLIENT.close()
