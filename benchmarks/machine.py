"""What a figure was measured on."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from pathlib import Path


def describe() -> str:
    """Processor, cores and Python, in words."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}"


@cache
def commit() -> str:
    """The commit that was checked out when this was first asked, with a mark where files were changed since."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"
