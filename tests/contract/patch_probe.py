"""Probe of the patched functions, run in a separate process by test_patches.py; prints one JSON object.

python patch_probe.py patched | unpatched

The unpatched probe finally applies vLLM's patches to a changed original.
"""

import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

MODE = sys.argv[1]
if MODE != "patched":
    os.environ["VERL_USE_EXTERNAL_PLUGINS"] = "none"
    os.environ.pop("VERL_PLATFORM", None)  # without the plugin verl has no such platform


def attempt(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"


def expand(dtype_name: str) -> list[float]:
    import torch
    import vllm.utils.cpu_triton_utils as kernels

    dtype = getattr(torch, dtype_name)
    values = torch.tensor([0, 7, 2], dtype=dtype)
    output = torch.full((7,), -9, dtype=dtype)
    cumulative = torch.tensor([2, 2, 5], dtype=torch.int32)
    kernels.expand_kernel[(3,)](output, values, cumulative, 0, 1, MAX_NUM_TOKENS=128)
    return output.tolist()


def recover(fp64: bool) -> dict[str, Any]:
    import torch
    import vllm.utils.cpu_triton_utils as kernels

    torch.manual_seed(0)
    vocabulary, counts = 11, [2, 0, 3]
    cumulative = torch.tensor(counts).cumsum(0).to(torch.int32)
    probs = torch.rand(sum(counts), vocabulary).softmax(-1)
    drafts = torch.randint(vocabulary, (sum(counts),), dtype=torch.int32)
    noise = torch.rand(len(counts), vocabulary) + 0.1
    recovered = torch.empty_like(drafts)
    kernels.sample_recovered_tokens_kernel[(3, 3)](
        recovered, cumulative, drafts, None, probs, noise, vocabulary, 8192, NO_DRAFT_PROBS=True, USE_FP64_GUMBEL=fp64
    )
    rows = torch.repeat_interleave(torch.arange(3), torch.tensor(counts))
    scores = (probs * noise[rows]).scatter(1, drafts.long()[:, None], 0.0)
    return {"got": recovered.tolist(), "expected": scores.argmax(-1).tolist()}


def log_with_flush() -> str:
    from verl.trainer.ppo.v1 import trainer_separate_async

    seen: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord):
            seen.append(f"{record.name.rpartition('.')[2]}:{record.funcName}:{record.getMessage()}")

    plain = logging.getLogger(trainer_separate_async.__name__)
    plain.addHandler(Listener())
    plain.setLevel("INFO")
    trainer_separate_async.logger.info("hybrid replicas %s", "disabled", flush=True)
    return seen[0]


def resume_metrics(resumed: bool) -> list[int]:
    """Return the steps in the metrics file after a second start."""
    from verl.utils.tracking import FileLogger

    with tempfile.TemporaryDirectory() as folder:
        path = os.environ["VERL_FILE_LOGGER_PATH"] = f"{folder}/metrics.jsonl"
        for step in (1, 2):
            FileLogger.resumed = resumed
            logger = FileLogger("project", "experiment")
            logger.log({"loss": 0.5}, step)
            logger.finish()
        with open(path) as file:
            return [json.loads(line)["step"] for line in file]


def run_command(*overrides: str) -> Any:
    """Run a command of verl's default config as ``@hydra.main`` does."""
    import verl.trainer
    from hydra._internal import utils
    from hydra._internal.hydra import Hydra
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import RunMode

    if MODE != "patched":  # hydra's search path applies it for releases of verl without plugins
        from verl_rhyme import patches

        patches.apply = lambda patch: patches.status(patch)
    search = utils.create_config_search_path(f"{next(iter(verl.trainer.__path__))}/config")
    hydra = Hydra.create_main_hydra2("probe", search)
    logs = ["hydra/job_logging=none", "hydra/hydra_logging=none"]
    arguments = [*overrides, f"hydra.run.dir={tempfile.mkdtemp()}", *logs]
    ran = []
    try:
        utils._run_app(
            run=True,
            multirun=False,
            mode=RunMode.RUN,
            hydra=hydra,
            config_name="ppo_trainer",
            task_function=lambda config: ran.append("ran"),
            overrides=arguments,
        )
        return ran[0]
    finally:
        GlobalHydra.instance().clear()


def change_originals() -> dict[str, Any]:
    """Apply the patches to a vLLM with another kernel than the patch is written for."""
    import vllm.utils.cpu_triton_utils as kernels

    from verl_rhyme import patches

    def another_kernel(*args: Any) -> str:
        return "another"

    kernels.expand_kernel.func = another_kernel
    patches.apply_vllm()
    found = {found.patch.name: [found.state.value, found.detail] for found in map(patches.status, patches.VLLM)}
    return {"statuses": found, "kernel": kernels.expand_kernel.func.__name__, "refused": len(patches.refused())}


def behave() -> dict[str, Any]:
    from vllm.platforms import current_platform

    from verl_rhyme import patches

    current_platform.import_kernels()  # like vLLM's workers
    if MODE == "patched":
        import mbridge.core.llm_bridge  # noqa: F401
        import verl.workers.engine.megatron  # noqa: F401 - applies the patches through the plugin
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        import vllm.model_executor.layers.fused_moe.cpu_fused_moe
        import vllm.model_executor.layers.mamba.ops.cpu.gdn_attention
        import vllm.model_executor.models.qwen3_next
        import vllm.v1.engine.output_processor
        import vllm.v1.worker.gpu_model_runner  # noqa: F401 - like vLLM's workers
    result = {
        "expand": {name: expand(name) for name in ("float32", "int32", "int64")},
        "recover": attempt(lambda: recover(False)),
        "recover_fp64": attempt(lambda: recover(True)),
        "run_misspelt": attempt(lambda: run_command("+actor_rollout_ref.rollout.custom.rhyme.enabel=true")),
        "run_stock": attempt(run_command),
        "log": attempt(log_with_flush),
        "metrics": [attempt(lambda: resume_metrics(True)), attempt(lambda: resume_metrics(False))],
    }
    result["statuses"] = {patch.name: patches.status(patch).state.value for patch in patches.ALL}
    return result


if __name__ == "__main__":
    outcome = behave()
    if MODE == "unpatched":
        outcome["changed"] = change_originals()
    print("\n" + json.dumps(outcome), flush=True)
