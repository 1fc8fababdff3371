"""Shared code of the parts: rows, arguments and timing."""

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
    """Print a row at once."""
    print(json.dumps(figures), flush=True)


def parse_arguments() -> argparse.Namespace:
    """Return ``quick`` (small sizes) and ``one`` (the only arm to run in this process)."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--one", default="")
    return parser.parse_args()


def quick() -> bool:
    """Return whether ``--quick`` is set."""
    return bool(parse_arguments().quick)


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def milliseconds(call: Callable[[], object], rounds: int) -> float:
    """Return the median time by the device's clock if it has one; two calls warm up."""
    times = []
    for _ in range(rounds + 2):
        if device().type == "cuda":
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            call()
            ended.record()
            torch.cuda.synchronize()
            times.append(began.elapsed_time(ended))
        else:
            at = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - at))
    return statistics.median(times[2:])
