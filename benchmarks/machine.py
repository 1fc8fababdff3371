"""Machine and commit of a measurement, and its printed rows."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any


def describe() -> str:
    """Return processor, cores and Python version as text."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}"


@cache
def commit() -> str:
    """Return the checked-out commit at the first call, with a mark if files were changed."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"


def about(benchmark: str) -> dict[str, Any]:
    """Return the fields of every row."""
    return {"benchmark": benchmark, "machine": describe(), "commit": commit()}


def print_row(row: dict[str, Any], as_json: bool, text: str = "") -> None:
    """Print a row of figures as JSON, with machine and commit if it lacks them, or as text."""
    print(json.dumps({"machine": describe(), "commit": commit(), **row}) if as_json else text or row, flush=True)
