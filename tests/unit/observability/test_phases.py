"""Phases of a starting run, from log lines of Ray, verl and vLLM (tests/e2e checks that they still print these)."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_rhyme.observability.phases import FIRST, Phases

#: (log line, phase that begins there), from runs of recipes/run_tiny_cpu.sh.
STARTING = [
    ("UserWarning: Disabled critic as algorithm.adv_estimator != gae.", FIRST),
    ("ray init kwargs: {'num_cpus': 16, 'runtime_env': {}}", "Ray's cluster"),
    ("2026-01-02 03:31:43,509\tINFO worker.py:2038 -- Started a local Ray instance.", "trainer's process imports verl"),
    ("\x1b[36m(TaskRunnerV1 pid=9)\x1b[0m           'train_batch_size': 16,", "trainer's process imports verl"),
    ("\x1b[36m(TaskRunnerV1 pid=9)\x1b[0m INFO:2026-01-02 03:32:05,094:Total training steps: 1", "workers start"),
    ("\x1b[36m(WorkerDict pid=10)\x1b[0m INFO: Platform override from VERL_PLATFORM: cpu", "workers load the model"),
    (
        "\x1b[36m(TaskRunnerV1 pid=9)\x1b[0m INFO:x:actor and ref model engine initialized",
        "the reward workers",
    ),
    ("\x1b[36m(TaskRunnerV1 pid=9)\x1b[0m INFO:x:reward loop manager initialized", "vLLM's servers start"),
    ("\x1b[36m(vLLMHttpServer pid=11)\x1b[0m ['serve',", "vLLM's engines start"),
    ("\x1b[36m(WorkerDict pid=10)\x1b[0m INFO:x:Memory cleanup attempt 1", "vLLM's engines start"),
    ("(vLLMHttpServer pid=11) (EngineCore pid=12) WARNING 01-02 03:32:46 [cpu_worker.py:114] x", "measure its memory"),
    ("\x1b[36m(TaskRunnerV1 pid=9)\x1b[0m LLMServerManager: ['192.0.2.2:36381']", "looking for a checkpoint"),
    (
        "(TaskRunnerV1 pid=9) INFO:x:Resuming from /a{b}/global_step_4, setting global step to 4",
        "loading /a{b}/global_step_4",
    ),
    ("(TaskRunnerV1 pid=9) INFO:x:all initialize finished, ready to fit", "vLLM takes over the trainer's weights"),
]
FIRST_STEP = "the first step: rollout of 16 prompts, then training"
AGENTS = "\x1b[36m(AgentLoopWorkerTQ pid=13)\x1b[0m Using dataset class: RLHFDataset"
LOGGER = "\x1b[36m(TaskRunnerV1 pid=9)\x1b[0m Creating file logger at /run/metrics.jsonl"
TRAINING = "\x1b[36m(TaskRunnerV1 pid=9)\x1b[0m Training Progress:   0%|          | 0/1 [00:00<?, ?it/s]"
IMPORTING = "agent loop workers start and import verl"
VALIDATION = "validation before training"


@pytest.mark.parametrize(
    "end",
    [
        [(TRAINING, IMPORTING), (LOGGER, IMPORTING), (AGENTS, FIRST_STEP)],
        [(LOGGER, VALIDATION), (AGENTS, VALIDATION), (TRAINING, FIRST_STEP), (AGENTS, FIRST_STEP)],
    ],
    ids=["at once", "after validation"],
)
def test_every_phase_is_reported(tmp_path: Path, end: list[tuple[str, str]]) -> None:
    log = tmp_path / "train.log"
    log.write_text("an earlier run: ray init kwargs: {}\n")
    phases = Phases(log, begin=log.stat().st_size)
    for line, phase in [*STARTING, *end]:
        with log.open("a") as file:
            file.write(line[:20])
            file.flush()
            before = phases.poll()
            file.write(line[20:] + "\n")
        assert phase in phases.poll(), line
        assert before != phases.poll() or phase in before, "an incomplete line does not count"


def test_a_log_that_does_not_exist_yet(tmp_path: Path) -> None:
    assert Phases(tmp_path / "train.log").poll() == FIRST
