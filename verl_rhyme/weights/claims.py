"""Owners of weight folders: a process claims a folder, takes over that of a dead process, and removes other dead ones'.

An owner holds the lock of its folder's lock file until it ends, and signs the file with its host.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
import uuid
from pathlib import Path

from verl_rhyme.history.ownership import Owner, is_own_folder, lock
from verl_rhyme.weights.folder import Folder, WeightsError, lock_of

logger = logging.getLogger(__name__)

#: Default location: memory, which all processes of a node share.
SHARED_MEMORY = Path("/dev/shm")
#: Seconds that a process may live on after Ray reports its death.
_DYING_S = 5.0
_PREFIX = "verl_rhyme_weights_"


def claim(root: Path = SHARED_MEMORY, heir_of: str | None = None) -> Folder:
    """Make a folder of this process in ``root``, and remove the folders of dead processes there.

    ``heir_of``, the folder of a dead process, is taken over with its complete versions if it still exists. Raises
    WeightsError if the folder cannot be made.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        if heir_of is not None and _take_over(Path(heir_of)):
            return Folder(heir_of)
        path = root / f"{_PREFIX}{uuid.uuid4().hex}"
        while (held := lock(lock_of(path), create=True)) is None:
            time.sleep(0.001)  # another process's cleanup holds the lock briefly; it leaves unsigned locks alone
        Owner.here("").sign(held)
        _remove_abandoned(root)
        path.mkdir(mode=0o700)
    except OSError as error:
        raise WeightsError(
            f"cannot make a folder for weights in {root} ({error.strerror}): set "
            "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.relay.folder to another one"
        ) from error
    return Folder(path)


def _take_over(path: Path) -> bool:
    until = time.monotonic() + _DYING_S
    while is_own_folder(path) and time.monotonic() < until:
        if (held := _lock_dead(path)) is not None:
            Owner.here("").sign(held)
            return True
        time.sleep(_DYING_S / 50)
    return False


def _lock_dead(path: Path) -> int | None:
    """Take and return a dead owner's lock; it must have signed on this host: from elsewhere the lock proves nothing."""
    try:
        held = lock(lock_of(path))
    except OSError:  # removed meanwhile, or another user's
        return None
    if held is not None and ((owner := Owner.of(lock_of(path))) is None or owner.is_foreign()):
        os.close(held)
        return None
    return held


def _remove_abandoned(root: Path) -> None:
    for file in root.glob(f"{_PREFIX}*.lock"):
        path = file.with_suffix("")
        if (held := _lock_dead(path)) is None:
            continue
        try:
            if is_own_folder(path):
                shutil.rmtree(path)
            if not os.path.lexists(path):
                lock_of(path).unlink()
        except OSError as error:  # the run can go on
            logger.warning("cannot remove %s, the weight folder of an ended run: %s", path, error.strerror)
        finally:
            os.close(held)
