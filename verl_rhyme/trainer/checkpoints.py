"""verl's checkpoint folders ``global_step_N``: whether a run resumes, and this package's files in them."""

from __future__ import annotations

import logging
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path
from verl.utils.tracking import FileLogger

logger = logging.getLogger(__name__)

#: File with the prompts in flight, next to verl's ``transfer_queue``.
STATE_FILE = "rhyme_sorted.json"
#: Entries of the history (with the temporary names of its replacement), and the prompts in flight.
OURS = ("history", ".history.old", ".history.new", STATE_FILE)
_STEP = re.compile(r"global_step_(\d+)")
_TRACKER = "latest_checkpointed_iteration.txt"


def continue_metrics(config: Any) -> None:
    """Make verl's file logger continue the metrics of a run that resumes (``patches/verl_continue_metrics.py``)."""
    mode, folder = (OmegaConf.select(config, f"trainer.{key}") for key in ("resume_mode", "default_local_dir"))
    FileLogger.resumed = mode == "resume_path" or (mode == "auto" and find_latest_ckpt_path(folder) is not None)


def remove_orphans(folder: Path, step: int) -> None:
    """Remove this package's files of checkpoints in ``trainer.default_local_dir`` without an actor: verl removed it
    (``max_actor_ckpt_to_keep``), or the run was killed before it was written. No run resumes from them. Kept are the
    newest, of ``step``, and the one that verl's tracker names. If the newest has no actor, its weights are written
    elsewhere or later: then nothing is removed. Errors are logged."""
    if not (folder / f"global_step_{step}" / "actor").is_dir():
        return
    kept = {step}
    with suppress(OSError, ValueError):
        kept.add(int((folder / _TRACKER).read_text()))
    try:
        checkpoints = list(folder.iterdir())
    except OSError as error:
        logger.warning("files of removed checkpoints could not be deleted: %s", error)
        return
    for checkpoint in checkpoints:
        match = _STEP.fullmatch(checkpoint.name)
        if (
            match is None
            or int(match[1]) in kept
            or os.path.islink(checkpoint)
            or os.path.lexists(checkpoint / "actor")
        ):
            continue
        try:
            for path in (checkpoint / name for name in OURS):
                if path.is_symlink():
                    continue
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("files of a removed checkpoint could not be deleted: %s", error)
        with suppress(OSError):  # not empty
            checkpoint.rmdir()
