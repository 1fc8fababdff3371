"""Runs of ``recipes/run_tiny_cpu.sh``, as benchmarks make them."""

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
    """Overrides: prompts of an update, samples of each, slots of a replica; an update is trained in as many parts as
    there are ranks."""
    share = batch * samples // ranks
    return [
        *(f"data.train_batch_size={batch}", f"{ROLLOUT}.n={samples}", f"{ROLLOUT}.max_num_seqs={slots}"),
        f"actor_rollout_ref.actor.ppo_mini_batch_size={batch}",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={share}",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu={share}",
        # of 128 tokens: vLLM would take 1 GiB in each replica
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
    """Make a run, or go on with it; what it says goes to the folder's name with ``.log``.

    Args:
        folder: ``RUN_DIR``.
        settings: Further variables of the recipe.
        overrides: Of hydra.
        steady_ms: Milliseconds that a decoding step takes at least (:mod:`benchmarks.steady_step`).
        update_s: Seconds that an update of the actor takes at least.
        modules: Further folders from which the run's processes import.
        timeout: Seconds.
        train_ms: Milliseconds that an update of the actor takes at least for each sample, and thrice its old
            log-probability.

    Raises:
        subprocess.CalledProcessError, subprocess.TimeoutExpired: It failed, or took too long.
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
