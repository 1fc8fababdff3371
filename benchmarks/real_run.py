"""Shared code of benchmarks of real runs: finished runs, checks of their responses, rounding of figures."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import typer

from verl_rhyme.observability import events, metrics


@dataclass(frozen=True)
class Cell:
    """One run: setting, arm and seed."""

    setting: str
    arm: str
    seed: int

    def folder(self, out: Path) -> Path:
        parts = (self.setting, self.arm, f"seed {self.seed}")
        return out.absolute().joinpath(*(part.replace(",", "").replace(":", "").replace(" ", "_") for part in parts))


class Kept:
    """Rows of the finished runs in a folder."""

    def __init__(self, out: Path) -> None:
        self._file = out / "rows.jsonl"
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def complete(
        self,
        wanted: Sequence[Cell],
        runs: int | None,
        make: Callable[[Cell], dict[str, Any]],
        report: Callable[[dict[str, Any]], object],
    ) -> list[dict[str, Any]] | None:
        """Make the missing runs one by one, and store each row at once.

        Args:
            wanted: Runs.
            runs: Maximum number of new runs; ``None``: all.
            make: Returns a run's row.
            report: Called with each new row.

        Returns:
            Rows of the wanted settings and arms, or ``None`` if runs are missing (with ``runs=0``: the stored rows).
        """
        done = {Cell(row["setting"], row["arm"], row["seed"]) for row in self.rows}
        left = [cell for cell in wanted if cell not in done]
        for cell in left[:runs]:
            self.rows.append(row := make(cell))
            with self._file.open("a") as file:
                file.write(json.dumps(row) + "\n")
            report(row)
        if runs and len(left) > runs:
            typer.echo(f"{len(left) - runs} runs are missing", err=True)
            return None
        kinds = {(cell.setting, cell.arm) for cell in wanted}
        return [row for row in self.rows if (row["setting"], row["arm"]) in kinds]


def requests_of(folder: Path) -> dict[str, np.ndarray]:
    """Return the columns of the event log's requests of a run."""
    return events.to_numpy(events.read_requests(folder / "checkpoints" / "events"))


def faults(
    request: Mapping[str, np.ndarray],
    by_step: Mapping[int, dict[str, Any]],
    samples: int,
    limit: int,
    staleness: int,
) -> dict[str, Any]:
    """Check the trained responses of a run.

    Args:
        request: Columns of the event log's requests.
        by_step: Metrics of each step. A trainer that is killed between checkpoint and metrics leaves no metrics of that
            step.
        samples: Samples per training step.
        limit: Maximum tokens of a response.
        staleness: Maximum policy versions between a token and the policy that trains on it.

    Returns:
        ``spanning``: number of responses generated on several replicas. ``faults``: messages about wrong responses.
    """
    rows = np.flatnonzero(request["trained"])
    attempts: dict[tuple[str, int], list[int]] = {}
    for row in rows[np.lexsort((request["started_at"][rows], request["request"][rows]))].tolist():
        attempts.setdefault((str(request["uid"][row]), int(request["sample"][row])), []).append(row)
    messages = []
    trained = len(np.unique(request["step"][rows]))
    if len(attempts) != trained * samples:
        messages.append(f"{len(attempts)} samples were trained in {trained} steps of {samples}")
    for step, row in by_step.items():
        made = int(request["response_tokens"][rows[request["step"][rows] == step]].sum())
        expected = round(row[metrics.RESPONSE_LENGTH_MEAN] * samples)
        if made != expected:
            messages.append(f"step {step} trained {expected} tokens; the engines generated {made}")
    for (uid, number), own in attempts.items():
        versions = request["policy_version_end"][own]
        late = request["step"][own[-1]] - 1 - request["policy_version_start"][own].min()
        if request["response_tokens"][own].sum() > limit:
            messages.append(f"{uid}-{number} is longer than {limit} tokens")
        if (np.diff(versions) < 0).any() or late > staleness:
            messages.append(f"{uid}-{number} has versions {versions.tolist()} and is {late} versions behind")
        if (request["stop_reason"][own[:-1]] != "aborted").any():
            messages.append(f"{uid}-{number} continued after its end")
    spanning = [own for own in attempts.values() if len(set(request["replica"][own])) > 1]
    return {"spanning": len(spanning), "faults": messages}


def short(value: float | int | None) -> float | int | None:
    """Round to four digits; ``None`` for a value that is not finite."""
    if value is None or isinstance(value, int):
        return value
    return float(f"{value:.4g}") if np.isfinite(value) else None
