"""What a figure was measured on."""

from __future__ import annotations

import os
import platform
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
