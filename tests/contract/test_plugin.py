"""verl finds the plugin, which costs nothing and leaves verl unchanged in runs without rhyme."""

import json
import os
import subprocess
import sys

import pytest

FORKS = pytest.mark.xdist_group("forks")


def python(code, **env):
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "VERL_PLATFORM": "cpu", **env},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result


def test_import_loads_no_engine():
    code = """
import sys, json
import verl
before = set(sys.modules)
import verl_rhyme.plugin
print(json.dumps([sorted({m.split(".")[0] for m in set(sys.modules) - before}), verl_rhyme.plugin.FAILURES]))
"""
    loaded, failures = json.loads(python(code, VERL_USE_EXTERNAL_PLUGINS="none").stdout.splitlines()[-1])
    assert not {"vllm", "megatron", "numba", "lmdb", "matplotlib"} & set(loaded)
    assert failures == []


@FORKS
def test_everything_is_registered(forks):
    code = """
import verl, verl_rhyme.plugin
from verl.plugin.platform import get_platform
from verl.workers.engine import EngineRegistry
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.workers.rollout import get_rollout_class
from verl_rhyme.trainer.registry import TRAINERS
assert verl_rhyme.plugin.FAILURES == []
assert type(get_platform()).__name__ == "PlatformCPU"
assert EngineRegistry.get_engine_cls("language_model", "fsdp2").__name__ == "FSDPEngineWithLMHead"
assert CheckpointEngineRegistry.get("relay").__name__ == "RelayCheckpointEngine"
assert get_rollout_class("vllm").__name__ == "RhymeServerAdapter"
assert all(get_trainer_cls(mode) is trainer for mode, trainer in TRAINERS.items())
"""
    forks.python(code)


def test_failures_are_printed_and_stop_a_run_with_rhyme():
    code = """
import sys
sys.modules["verl_rhyme.testing.cpu"] = None  # its import fails
import verl
import verl_rhyme.plugin
from omegaconf import OmegaConf
from verl_rhyme.checks import startup
assert any("testing.cpu" in line for line in verl_rhyme.plugin.FAILURES)
try:
    startup.check(OmegaConf.create({"actor_rollout_ref": {"rollout": {"custom": {"rhyme": {}}}}}))
except startup.ConfigError as error:
    assert "testing.cpu" in str(error), error
else:
    raise AssertionError("a broken plugin must not pass")
"""
    assert "verl-rhyme: FAILED" in python(code, VERL_PLATFORM="nvidia").stderr


@FORKS
@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (("+rhyme=histospec", "actor_rollout_ref.rollout.custom.rhyme.drafting.max_tokens=5"), ["max_tokens: 5"]),
        (("+rhyme=sorted",), ["trainer_mode: sync", "scheduling_policy: priority"]),  # its user chooses the mode
    ],
)
def test_presets_are_found_from_any_folder_with_verls_own_yaml(forks, tmp_path, arguments, lines):
    result = forks.main_ppo(*arguments, "--cfg", "job", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert all(line in result.stdout for line in lines)


@FORKS
def test_each_trainer_mode_of_verl_selects_a_pipeline_trainer(forks):
    """verl's base trainer assumes that ``sync`` has no requests in flight when it saves."""
    code = """
import verl
from omegaconf import OmegaConf
from verl.trainer.ppo.v1 import get_trainer_cls
from verl_rhyme.checks import startup
from verl_rhyme.trainer.pipeline import RhymePipelineTrainer

seen = []
startup.begin = lambda config: None  # of a whole config
RhymePipelineTrainer.__init__ = lambda self, config: seen.append((type(self).__name__, config.trainer.v1.trainer_mode))
for stale in (0, 1):
    for mode in ("sync", "colocate_async", "separate_async"):
        rhyme = {"rhyme": {"max_staleness": stale}}
        config = OmegaConf.create(
            {"actor_rollout_ref": {"rollout": {"custom": rhyme}}, "trainer": {"v1": {"trainer_mode": mode}}}
        )
        get_trainer_cls(mode)(config=config)
colocated, separate = ("RhymePipelineColocated", "colocate_async"), ("RhymePipelineSeparate", "separate_async")
assert seen == [colocated, colocated, separate] * 2, seen
"""
    forks.python(code)


@FORKS
def test_verls_and_a_users_trainer_are_unchanged_without_rhyme(forks):
    code = """
import verl
from omegaconf import OmegaConf
from verl.trainer.ppo.v1 import PPOTrainerSync, get_trainer_cls, trainer_base
from verl_rhyme.trainer.base import RhymeTrainerMixin
from verl_rhyme.trainer.registry import RhymeTrainerSync

called = []
class Theirs(PPOTrainerSync):
    def __init__(self, config):
        self.config, self.global_steps, self.replay_buffer = config, 1, object()
    def get_llm_client(self): return "verl's client"
def stock(name):
    def method(self, *args, **kwargs): called.append(name)
    return method
hooks = ("_init_tokenizer", "_setup", "_compute_old_log_prob", "on_step_end", "_compute_metrics", "_save_checkpoint",
         "_load_checkpoint", "fit")
for name in hooks:
    setattr(Theirs, name, stock(name))

class Mine(RhymeTrainerMixin, Theirs):
    def on_step_end(self):
        called.append("mine")
        super().on_step_end()
class MyOther(RhymeTrainerSync):
    def __init__(self, config):
        pass

for tree in (None, {"rhyme": {"enable": False}}):
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"custom": tree}}})
    trainer = Mine(config)
    assert type(trainer) is Mine and trainer.config is config
    called.clear()
    for name in hooks:
        getattr(trainer, name)()
    assert called == [*hooks[:3], "mine", *hooks[3:]], called
    assert trainer.get_llm_client() == "verl's client"
    trainer.timing_raw = timing = {}
    assert trainer.timing_raw is timing
    assert {"_history", "_recorder", "_event_log"}.isdisjoint(vars(trainer)), vars(trainer)
    assert type(MyOther(config)) is MyOther

built = []
PPOTrainerSync.__init__ = lambda self, config: built.append(type(self))
for tree in (None, {"rhyme": {"enable": False}}):
    get_trainer_cls("sync")(config=OmegaConf.create({"actor_rollout_ref": {"rollout": {"custom": tree}}}))
assert built == [PPOTrainerSync] * 2
"""
    forks.python(code)


@FORKS
def test_every_method_of_the_mixin_that_verl_calls_is_inert_without_rhyme(forks):
    """A new hook without the mark would run without a history."""
    code = """
import inspect, verl
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl_rhyme.trainer.base import RhymeTrainerMixin
own = {name for name, value in vars(RhymeTrainerMixin).items() if inspect.isfunction(value)}
overridden = {name for name in own if hasattr(PPOTrainer, name)}
marked = {name for name in overridden if hasattr(getattr(RhymeTrainerMixin, name), "__wrapped__")}
assert overridden - marked == {"__init__"}, overridden - marked
assert marked
"""
    forks.python(code)


#: One process for both tests, because both import vLLM.
SERVER = """
import verl
from verl.workers.rollout.replica import get_rollout_replica_class
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
from verl.workers.config import RolloutConfig
from verl_rhyme.engine.server import RhymeHttpServer
def server(custom):
    config = RolloutConfig(name="vllm", custom=custom)
    replica = get_rollout_replica_class("vllm")(replica_rank=0, config=config, model_config=None)
    return replica.server_class.__ray_metadata__.modified_class
assert not issubclass(server(None), RhymeHttpServer)
assert not issubclass(server({"rhyme": {"enable": False}}), RhymeHttpServer)
assert issubclass(server({"rhyme": {}}), RhymeHttpServer)

import logging
from verl_rhyme.observability.log_handler import add_log_handler
for _ in range(2):
    add_log_handler()
logging.getLogger("verl_rhyme.coordinator.coordinator").warning("sample %d is lost", 7)
"""


@FORKS
def test_disabled_rhyme_launches_verls_server_and_rhyme_warnings_are_logged_with_vllm(forks):
    assert forks.python(SERVER).stderr.count("sample 7 is lost") == 1


def test_other_hydra_programs_are_left_alone() -> None:
    """Hydra loads the search path in every program of the environment; our patches are verl's alone."""
    code = "import sys, hydra_plugins.verl_rhyme.search_path; sys.exit('verl_rhyme.plugin' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
