"""Run ``recipes/run_tiny_cpu.sh`` for benchmarks."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

RECIPE = Path(__file__).parents[1] / "recipes" / "run_tiny_cpu.sh"
STEADY_STEP = Path(__file__).parent / "steady_step"
ROLLOUT = "actor_rollout_ref.rollout"
RHYME = f"{ROLLOUT}.custom.rhyme"


def sizes(batch: int, samples: int, slots: int, ranks: int) -> list[str]:
    """Return overrides for prompts per batch, samples per prompt and slots per replica; ranks train equal shares."""
    share = batch * samples // ranks
    return [
        *(f"data.train_batch_size={batch}", f"{ROLLOUT}.n={samples}", f"{ROLLOUT}.max_num_seqs={slots}"),
        f"actor_rollout_ref.actor.ppo_mini_batch_size={batch}",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={share}",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu={share}",
        # blocks of 128 tokens; by default vLLM takes 1 GiB per replica
        f"+{ROLLOUT}.engine_kwargs.vllm.num_gpu_blocks_override=256",
    ]


def train(
    folder: Path,
    settings: Mapping[str, str],
    overrides: Sequence[str],
    steady_ms: float | None = None,
    update_s: float | None = None,
    modules: Sequence[Path] = (),
    timeout: float = 1200,
    train_ms: float | None = None,
) -> None:
    """Make or resume a training run; its output goes to the folder's name with ``.log``.

    Args:
        folder: ``RUN_DIR``.
        settings: Further variables of the recipe.
        overrides: Hydra overrides.
        steady_ms: Minimum milliseconds of a decoding step (:mod:`benchmarks.steady_step`).
        update_s: Minimum seconds of a training step of the actor.
        modules: Further import folders of the run's processes.
        timeout: Seconds.
        train_ms: Minimum milliseconds of the actor's training per sample; the old log-probability takes a third of it.

    Raises:
        subprocess.CalledProcessError, subprocess.TimeoutExpired: The run failed or took too long.
    """
    steady = {"STEADY_STEP_MS": steady_ms, "STEADY_UPDATE_S": update_s, "STEADY_TRAIN_MS": train_ms}
    env = {**os.environ, **settings, "RUN_DIR": str(folder)}
    env |= {name: str(value) for name, value in steady.items() if value is not None}
    paths = [*map(str, modules), *([str(STEADY_STEP)] if steady_ms or update_s or train_ms else [])]
    if paths:
        env["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.log").open("a") as log:
        command = ["bash", str(RECIPE), *overrides]
        subprocess.run(command, env=env, stdout=log, stderr=log, check=True, timeout=timeout)
