"""What is ours in verl's checkpoint folders ``global_step_N``: it goes when verl has removed the weights there."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

#: Prompts in flight, beside verl's ``transfer_queue``.
STATE_FILE = "rhyme_sorted.json"
#: Of the history (also the names of one that is just being replaced), the ranker, and the prompts in flight.
OURS = ("history", ".history.old", ".history.new", "ranker", STATE_FILE)
_STEP = re.compile(r"global_step_(\d+)")
_TRACKER = "latest_checkpointed_iteration.txt"


def remove_orphans(folder: Path, step: int) -> Iterator[OSError]:
    """Remove what is ours of checkpoints that have no actor: verl removed it (``max_actor_ckpt_to_keep``), or a run was
    killed before it was written. Nothing resumes from them.

    Where the newest checkpoint has no actor here, weights are written elsewhere or later: then nothing goes.

    Args:
        folder: ``trainer.default_local_dir``.
        step: The newest checkpoint's; it stays, and so does the one that verl's tracker names.

    Yields:
        Why something could not be removed; the rest is.
    """
    if not (folder / f"global_step_{step}" / "actor").is_dir():
        return
    kept = {step}
    with suppress(OSError, ValueError):
        kept.add(int((folder / _TRACKER).read_text()))
    for checkpoint in folder.iterdir():
        found = _STEP.fullmatch(checkpoint.name)
        if found is None or int(found[1]) in kept or checkpoint.is_symlink() or os.path.lexists(checkpoint / "actor"):
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
