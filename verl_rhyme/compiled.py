"""Decorator of the functions that numba compiles: without the GIL, once a machine, with the machine code on disk."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit

from verl_rhyme.config.checks import Unusable


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    """Return ``function`` compiled at its first call, or loaded from numba's cache, with further options of numba.

    Raises Unusable if no folder of the cache can be written.
    """
    try:
        return njit(cache=True, nogil=True, **options)(function)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        given, own = os.environ.get("NUMBA_CACHE_DIR"), Path(inspect.getfile(function)).parent / "__pycache__"
        places = [*([f"NUMBA_CACHE_DIR={given}"] if given else []), str(own), "the user's cache folder (~/.cache)"]
        raise Unusable(
            f"numba's cache of compiled functions cannot be written: tried {', '.join(places)}",
            "set NUMBA_CACHE_DIR to a folder that can be written, in the environment of all processes of the run",
        ) from error
