"""Metrics by step, from verl's ``file`` logger."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from . import metrics

#: Step number (from 1) to metric name to value.
Steps = dict[int, dict[str, Any]]

#: File of verl's ``file`` logger in a run folder.
METRICS_FILE = "metrics.jsonl"


def parse_lines(lines: Iterable[bytes | str], source: object) -> Iterator[tuple[int, dict[str, Any]]]:
    """Parse lines of verl's ``file`` logger, ``{"step": int, "data": {name: value}}``; skip others with a warning."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            yield int(row["step"]), dict(row["data"])
        except (ValueError, KeyError, TypeError) as error:
            warnings.warn(f"{source}, line {number} is not a line of metrics and is skipped ({error})", stacklevel=2)


def from_metrics(path: str | os.PathLike[str]) -> Steps:
    """Read the training steps of verl's metrics file. A resumed run appends to it; its steps replace earlier ones from
    its first step on.
    """
    steps: Steps = {}
    file = Path(path)
    for step, data in parse_lines(file.read_bytes().splitlines() if file.is_file() else (), file):
        if metrics.EPOCH not in data:  # of a validation
            continue
        while steps and next(reversed(steps)) > step:
            steps.popitem()
        steps.setdefault(step, {}).update(data)
    return steps
