"""This package's files in verl's checkpoint folders ``global_step_N``; removed once verl has removed the weights."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

#: File with the prompts in flight, next to verl's ``transfer_queue``.
STATE_FILE = "rhyme_sorted.json"
#: Entries of the history (with the temporary names of its replacement), the ranker, and the prompts in flight.
OURS = ("history", ".history.old", ".history.new", "ranker", STATE_FILE)
_STEP = re.compile(r"global_step_(\d+)")
_TRACKER = "latest_checkpointed_iteration.txt"


def remove_orphans(folder: Path, step: int) -> Iterator[OSError]:
    """Remove this package's files of checkpoints without an actor: verl removed it (``max_actor_ckpt_to_keep``), or the
    run was killed before it was written. No run resumes from them.

    If the newest checkpoint has no actor, its weights are written elsewhere or later: then nothing is removed.

    Args:
        folder: ``trainer.default_local_dir``.
        step: Step of the newest checkpoint, which is kept, as is the one that verl's tracker names.

    Yields:
        Errors of single checkpoints; the others are still removed.
    """
    if not (folder / f"global_step_{step}" / "actor").is_dir():
        return
    kept = {step}
    with suppress(OSError, ValueError):
        kept.add(int((folder / _TRACKER).read_text()))
    for checkpoint in folder.iterdir():
        match = _STEP.fullmatch(checkpoint.name)
        if match is None or int(match[1]) in kept or checkpoint.is_symlink() or os.path.lexists(checkpoint / "actor"):
            continue
        try:
            for name in OURS:
                _remove(checkpoint / name)
        except OSError as error:
            yield error
        with suppress(OSError):  # not empty
            checkpoint.rmdir()


def _remove(path: Path) -> None:
    if path.is_symlink():
        return
    with suppress(FileNotFoundError):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
