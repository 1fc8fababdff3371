"""Bad input: one clear error before anything heavy starts."""

import os
import shutil
import sys

import pytest
from omegaconf import OmegaConf

from verl_rhyme.checks import run_lock, startup
from verl_rhyme.config import ConfigError

RHYME = "actor_rollout_ref.rollout.custom.rhyme"


def config(tmp_path, **rollout):
    """As much of verl's config as the check reads; all of it right."""
    (tmp_path / "train.parquet").touch()
    return OmegaConf.create(
        {
            "data": {"train_files": str(tmp_path / "train.parquet"), "val_files": [str(tmp_path / "train.parquet")]},
            "actor_rollout_ref": {"rollout": {"name": "vllm", "custom": {"rhyme": {}}, **rollout}, "actor": {}},
            "trainer": {"use_v1": True, "v1": {"trainer_mode": "sync"}},
        }
    )


def pipeline_config(tmp_path, **rollout):
    agent = {"agent_loop_manager_class": "verl_rhyme.agent_loop.agent_loop.SessionAgentLoopManager"}
    rollout = {"agent": agent, "calculate_log_probs": True, "scheduling_policy": "priority", **rollout}
    return config(tmp_path, custom={"rhyme": {"max_staleness": 1}}, **rollout)


def error(tree):
    with pytest.raises(ConfigError) as caught:
        startup.check(tree)
    return str(caught.value)


@pytest.fixture(autouse=True)
def verl(monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    import verl

    return verl


@pytest.mark.parametrize("package", ["verl", "vllm"])
def test_wrong_version(tmp_path, monkeypatch, package):
    monkeypatch.setattr(
        startup, "installed_version", lambda name: "0.1.2" if name == package else startup.SUPPORTED[name]
    )
    message = error(config(tmp_path))
    assert f"{package} 0.1.2" in message
    assert f"{package}=={startup.SUPPORTED[package]}" in message


def test_files_are_there_or_remote(tmp_path):
    tree = config(tmp_path)
    tree.data.train_files = "hdfs://somewhere/train.parquet"
    startup.check(tree)
    tree.data.val_files = [str(tmp_path / "nowhere.parquet")]
    assert f"data.val_files: no file {tmp_path}/nowhere.parquet" in error(tree)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("rhyme", {"enable": False}, "did you mean actor_rollout_ref.rollout.custom.rhyme?"),
        (f"{RHYME}.scheduling.at_version", "finish", "at_version=finish needs replicas that take versions one by"),
        (f"{RHYME}.placement", {"policy": "histopipe", "options": {"groups": 0}}, "must be at least 1"),
        ("actor_rollout_ref.rollout.data_parallel_size", 2, "data_parallel_size=2 with"),  # of the table
    ],
)
def test_bad_input_is_one_line_before_ray_starts(tmp_path, key, value, words):
    """``validate_config`` is patched: verl calls it before Ray starts."""
    import ray
    from verl.utils.config import validate_config

    tree = pipeline_config(tmp_path)
    startup.check(tree)
    OmegaConf.update(tree, key, value, force_add=True)
    with pytest.raises(SystemExit) as caught:
        validate_config(tree, use_reference_policy=False, use_critic=False)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert not ray.is_initialized()


def test_a_folder_in_use_is_refused_before_ray_starts(tmp_path):
    import ray
    from verl.utils.config import validate_config

    tree = config(tmp_path)
    tree.trainer.default_local_dir = str(tmp_path / "checkpoints")
    other = run_lock.take(tmp_path / "checkpoints", 123)
    with pytest.raises(SystemExit, match=r"checkpoints is in use by process 123 on .* set another folder"):
        validate_config(tree, use_reference_policy=False, use_critic=False)
    assert not ray.is_initialized()
    for theirs in ({"enable": False}, None):  # stock verl locks nothing
        tree.actor_rollout_ref.rollout.custom = {"rhyme": theirs} if theirs else {}
        startup.hold_folder(tree)
    os.close(other)
    tree.actor_rollout_ref.rollout.custom = {"rhyme": {}}
    for _ in range(2):
        startup.hold_folder(tree)
    assert run_lock.user(tmp_path / "checkpoints")


def test_no_shared_memory(tmp_path, monkeypatch):
    def missing(path):
        raise FileNotFoundError(2, "No such file or directory", path)

    monkeypatch.setattr(shutil, "disk_usage", missing)
    assert "/dev/shm" in error(config(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 26, 0, 1 << 26))
    assert "--shm-size" in error(config(tmp_path))


OWN_MANAGERS = """
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
from verl_rhyme.agent_loop.agent_loop import RhymeAgentLoopManager, SessionAgentLoopManager

class Foreign(AgentLoopManagerTQ): ...
class Drafting(RhymeAgentLoopManager): ...
class Sorted(SessionAgentLoopManager): ...
"""


@pytest.mark.parametrize(
    ("build", "name", "told"),
    [
        (config, "Drafting", None),
        (config, "Foreign", "Foreign does not derive from verl_rhyme.agent_loop.agent_loop.RhymeAgentLoopManager"),
        (config, "Missing", "agent_loop_manager_class=own_managers.Missing cannot be imported"),
        (config, None, None),
        (pipeline_config, "Sorted", None),
        (pipeline_config, None, "agent_loop_manager_class=null with"),
        (pipeline_config, "Drafting", "does not derive from verl_rhyme.agent_loop.agent_loop.SessionAgentLoopManager"),
    ],
)
def test_an_agent_loop_manager_of_ones_own(tmp_path, monkeypatch, build, name, told):
    (tmp_path / "own_managers.py").write_text(OWN_MANAGERS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_managers", raising=False)
    tree = build(tmp_path, agent={"agent_loop_manager_class": name and f"own_managers.{name}"})
    if told is None:
        startup.check(tree)
    else:
        assert told in error(tree)


def test_vllm_still_answers_with_its_first_engine_only():
    """Why data-parallel rollout is refused; if this fails, it may work now."""
    import asyncio

    from vllm.v1.engine.core_client import DPLBAsyncMPClient

    class Engines:
        core_engines = ("first", "second")

        async def _call_utility_async(self, method, *args, engine):
            return engine

    assert asyncio.run(DPLBAsyncMPClient.call_utility_async(Engines(), "collective_rpc")) == "first"


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (None, "does not exist"),
        ("policy: mine", "names no router_class"),
        ("router_class: own_routers.Missing", "cannot be imported"),
        ("router_class: own_routers.Half", "own_routers.Half lacks add_servers, "),
        ("router_class: own_routers.Mine", None),
    ],
)
def test_a_router_of_ones_own(tmp_path, monkeypatch, written, told):
    """It serves as with verl; what would fail when all engines stand is told before they start."""
    (tmp_path / "own_routers.py").write_text(
        "from verl.workers.rollout.router import GlobalRequestLoadBalancer\n"
        "class Mine(GlobalRequestLoadBalancer): pass\n"
        "class Half:\n    def acquire_server(self, request_id): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_routers", raising=False)
    file = tmp_path / "router.yaml"
    if written:
        file.write_text(written)
    tree = config(tmp_path, router_config_path=str(file))
    if told is None:
        startup.check(tree)
    else:
        assert told in error(tree)
