"""Slow down vLLM and verl in processes with this folder in PYTHONPATH, if these variables are set.

``STEADY_STEP_MS``: minimum milliseconds of a decoding step; ``90,60`` is 90 on replicas 0, 2, 4 ..., and 60 on the
others. ``STEADY_UPDATE_S``: minimum seconds of the actor's training step. ``STEADY_TRAIN_MS``: the same in milliseconds
per sample, and a third of that for its old log-probability.

On a GPU a step takes the same time for one request as for a few dozen, because it waits for the weights. On two CPU
cores it gets faster with fewer requests. The sleep emulates the GPU, so that idle slots cost the same. Python imports a
module of this name in every process at its start.
"""

import importlib.util
import os
import sys
import time
from importlib.abc import MetaPathFinder


class _Finder(MetaPathFinder):
    """Changes a module at its import."""

    def __init__(self, name, change):
        self._name, self._change = name, change

    def find_spec(self, name, path, target=None):
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            self._change(module)

        spec.loader.exec_module = exec_module
        return spec


def _steady_step(module):
    floors = os.environ["STEADY_STEP_MS"].split(",")
    seconds = float(floors[int(os.environ.get("VERL_REPLICA_RANK", 0)) % len(floors)]) / 1000
    runner = module.GPUModelRunner
    execute, sample = runner.execute_model, runner.sample_tokens

    def execute_model(self, *args, **kwargs):
        self._steady_start = time.perf_counter()
        return execute(self, *args, **kwargs)

    def sample_tokens(self, *args, **kwargs):
        output = sample(self, *args, **kwargs)
        time.sleep(max(0.0, self._steady_start + seconds - time.perf_counter()))
        return output

    runner.execute_model, runner.sample_tokens = execute_model, sample_tokens


def _steady_update(module):
    seconds = float(os.environ["STEADY_UPDATE_S"])
    _at_least(module.PPOTrainer, "_update_actor", lambda batch: seconds)


def _steady_training(module):
    seconds = float(os.environ["STEADY_TRAIN_MS"]) / 1000
    _at_least(module.PPOTrainer, "_update_actor", lambda batch: seconds * len(batch.keys))
    _at_least(module.PPOTrainer, "_compute_old_log_prob", lambda batch: seconds * len(batch.keys) / 3)


def _at_least(trainer, name, seconds):
    theirs = getattr(trainer, name)

    def stage(self, batch, *args, **kwargs):
        end = time.perf_counter() + seconds(batch)
        output = theirs(self, batch, *args, **kwargs)
        time.sleep(max(0.0, end - time.perf_counter()))
        return output

    setattr(trainer, name, stage)


for _variable, _name, _change in (
    ("STEADY_STEP_MS", "vllm.v1.worker.gpu_model_runner", _steady_step),
    ("STEADY_UPDATE_S", "verl.trainer.ppo.v1.trainer_base", _steady_update),
    ("STEADY_TRAIN_MS", "verl.trainer.ppo.v1.trainer_base", _steady_training),
):
    if _variable in os.environ:
        sys.meta_path.insert(0, _Finder(_name, _change))
