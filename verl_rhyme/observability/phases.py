"""Start-up phase of a run, read from the lines of Ray, verl and vLLM in its log."""

from __future__ import annotations

import os
import re
from pathlib import Path

_MARKS = (
    (r"ray init kwargs: ", "Ray's cluster"),
    (r"Started a local Ray instance|Connected to Ray cluster", "the trainer's process imports verl"),
    (r"Total training steps: ", "the training workers start and import verl"),
    (r"\(WorkerDict pid=", "the training workers load the model"),
    (r"actor and ref model engine initialized", "the reward workers"),
    (r"reward loop manager initialized", "vLLM's servers start and import vLLM"),
    (r"HttpServer pid=.*(?:'serve'|arg_utils|\[vllm\.py)", "vLLM's engines start"),
    (r"\(EngineCore[^)]* pid=", "vLLM's engines load the model and measure its memory"),
    (r"LLMServerManager: \[|checkpoint engine manager initialized", "looking for a checkpoint"),
    (r"Resuming from (\S+),", r"loading \1"),
    (r"all initialize finished, ready to fit", "vLLM takes over the trainer's weights"),
    (r"Creating file logger at ", "validation before training"),
    (r"Training Progress:", "the agent loop workers start and import verl"),
    (r"AgentLoopWorker\w* pid=.*Using dataset class", "the first step: rollout{of}, then training"),
)

#: Pattern of a log line and the phase that begins there, in the order of a start.
MARKS = tuple((re.compile(pattern), phase) for pattern, phase in _MARKS)

FIRST = "Python, and verl reads the configuration"

_BATCH = re.compile(r"'train_batch_size': (\d+)")


class Phases:
    """Follower of a log that keeps the furthest of the :data:`MARKS` reached.

    Args:
        log: Log file; may appear late.
        begin: Offset of this run's part of the file, in bytes.
    """

    def __init__(self, log: str | os.PathLike[str], begin: int = 0) -> None:
        self._log = Path(log)
        self._offset = begin
        self._seen: dict[int, str] = {}
        self._of = ""

    def poll(self) -> str:
        """Return the current phase."""
        try:
            with self._log.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            new = b""
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            if match := _BATCH.search(line):
                self._of = f" of {match[1]} prompts"
            for number, (pattern, phase) in enumerate(MARKS):
                if number not in self._seen and (match := pattern.search(line)):
                    self._seen[number] = match.expand(phase)
        reached = sorted(self._seen)
        last = len(MARKS) - 1
        if reached[-2:] != [last - 1, last]:  # validation before the first step starts agent loop workers, too
            reached = [number for number in reached if number != last]
        return self._seen[reached[-1]].replace("{of}", self._of) if reached else FIRST
