"""In a process with this folder in PYTHONPATH, a decoding step of vLLM takes at least ``STEADY_STEP_MS`` milliseconds.

On a GPU a step takes as long for one request as for a few dozen, because it waits for the weights; on two CPU cores it
gets faster with every request less. The sleep stands for the first, so that idle slots cost what they cost there.
Everything else is as it is. A module of this name is imported by every Python process at its start.
"""

import importlib.util
import os
import sys
import time
from importlib.abc import MetaPathFinder

_RUNNER = "vllm.v1.worker.gpu_model_runner"


class _Finder(MetaPathFinder):
    """Wraps the runner's two halves of a step when vLLM is imported."""

    def find_spec(self, name, path, target=None):
        if name != _RUNNER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            _steady(module.GPUModelRunner, float(os.environ["STEADY_STEP_MS"]) / 1000)

        spec.loader.exec_module = exec_module
        return spec


def _steady(runner, seconds):
    execute, sample = runner.execute_model, runner.sample_tokens

    def execute_model(self, *args, **kwargs):
        self._steady_start = time.perf_counter()
        return execute(self, *args, **kwargs)

    def sample_tokens(self, *args, **kwargs):
        output = sample(self, *args, **kwargs)
        time.sleep(max(0.0, self._steady_start + seconds - time.perf_counter()))
        return output

    runner.execute_model, runner.sample_tokens = execute_model, sample_tokens


if "STEADY_STEP_MS" in os.environ:
    sys.meta_path.insert(0, _Finder())
