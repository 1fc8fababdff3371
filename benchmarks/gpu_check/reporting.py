"""What the parts share: how they tell, and how they time."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

#: Entries of Qwen2.5's vocabulary as its larger models pad it.
VOCABULARY = 152_064


def report(**figures: Any) -> None:
    """A row, at once."""
    print(json.dumps(figures), flush=True)


def asked() -> argparse.Namespace:
    """``quick``: small sizes; ``one``: this arm alone, in this process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--one", default="")
    return parser.parse_args()


def quick() -> bool:
    """Whether ``--quick`` was asked for."""
    return bool(asked().quick)


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def milliseconds(call: Callable[[], object], rounds: int) -> float:
    """Median, of the device's own clock where it has one; the first two are not counted."""
    found = []
    for _ in range(rounds + 2):
        if device().type == "cuda":
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            call()
            ended.record()
            torch.cuda.synchronize()
            found.append(began.elapsed_time(ended))
        else:
            at = time.perf_counter()
            call()
            found.append(1e3 * (time.perf_counter() - at))
    return statistics.median(found[2:])
