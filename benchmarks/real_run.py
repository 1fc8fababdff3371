"""What benchmarks of real runs share: runs that are kept, that no response is wrong, figures as they are printed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import typer

from verl_rhyme.observability import metrics
from verl_rhyme.simulation import recorded


@dataclass(frozen=True)
class Cell:
    """One run."""

    setting: str
    arm: str
    seed: int

    def folder(self, out: Path) -> Path:
        parts = (self.setting, self.arm, f"seed {self.seed}")
        return out.absolute().joinpath(*(part.replace(",", "").replace(":", "").replace(" ", "_") for part in parts))


class Kept:
    """Rows of the runs that a folder has."""

    def __init__(self, out: Path) -> None:
        self._file = out / "rows.jsonl"
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def left(self, wanted: Iterable[Cell]) -> list[Cell]:
        """Runs that are not made yet."""
        done = {cell for cell, _ in self.by_cell()}
        return [cell for cell in wanted if cell not in done]

    def complete(
        self,
        wanted: Sequence[Cell],
        runs: int | None,
        make: Callable[[Cell], dict[str, Any] | None],
        tell: Callable[[dict[str, Any]], object],
    ) -> list[dict[str, Any]] | None:
        """Make what is left, one run after another, and keep each as soon as it is there.

        Args:
            wanted: Runs.
            runs: To make at most; ``None``: all.
            make: A run's row; ``None`` where it cannot be made here.
            tell: Shows a row that came.

        Returns:
            Rows of the wanted settings and arms; ``None``: there is more to make (with ``runs=0`` what there is).
        """
        left = self.left(wanted)
        for cell in left[:runs]:
            if (row := make(cell)) is not None:
                self.add(row)
                tell(row)
        if runs and len(left) > runs:
            typer.echo(f"{len(left) - runs} runs are left", err=True)
            return None
        kinds = {(cell.setting, cell.arm) for cell in wanted}
        return [row for row in self.rows if (row["setting"], row["arm"]) in kinds]

    def by_cell(self) -> list[tuple[Cell, dict[str, Any]]]:
        return [(Cell(row["setting"], row["arm"], row["seed"]), row) for row in self.rows]

    def replace(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        self._file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        with self._file.open("a") as file:
            file.write(json.dumps(row) + "\n")


def faults(
    run: recorded.Run, by_step: Mapping[int, dict[str, Any]], samples: int, limit: int, staleness: int
) -> dict[str, Any]:
    """``spanning``: responses that several replicas made; ``faults``: what is wrong with any response, in words.

    Args:
        run: Its event log.
        by_step: Metrics of its steps. A trainer that is killed between a step's checkpoint and its metrics has none of
            that step.
        samples: Of an update.
        limit: Tokens that a response may have.
        staleness: Policy versions between a token and the policy that it trains, at most.
    """
    request = run.requests
    rows = np.flatnonzero(request["trained"])
    attempts: dict[tuple[str, int], list[int]] = {}
    for row in rows[np.lexsort((request["started_at"][rows], request["attempt"][rows]))].tolist():
        attempts.setdefault((str(request["uid"][row]), int(request["sample"][row])), []).append(row)
    found = []
    trained = len(np.unique(request["step"][rows]))
    if len(attempts) != trained * samples:
        found.append(f"{len(attempts)} samples were trained in {trained} steps of {samples}")
    for step, row in by_step.items():
        made = int(request["response_tokens"][rows[request["step"][rows] == step]].sum())
        told = round(row[metrics.RESPONSE_LENGTH_MEAN] * samples)
        if made != told:
            found.append(f"step {step} trained {told} tokens; the engines made {made}")
    for (uid, number), own in attempts.items():
        versions = request["policy_version_end"][own]
        late = request["step"][own[-1]] - 1 - request["policy_version_start"][own].min()
        if request["response_tokens"][own].sum() > limit:
            found.append(f"{uid}-{number} is longer than {limit} tokens")
        if (np.diff(versions) < 0).any() or late > staleness:
            found.append(f"{uid}-{number} is of versions {versions.tolist()}, {late} behind")
        if (request["stop_reason"][own[:-1]] != "aborted").any():
            found.append(f"{uid}-{number} went on after its end")
    spanning = [own for own in attempts.values() if len(set(request["replica"][own])) > 1]
    return {"spanning": len(spanning), "faults": found}


def short(value: float | int | None) -> float | int | None:
    """Four digits; ``None`` for what is no number."""
    if value is None or isinstance(value, int):
        return value
    return float(f"{value:.4g}") if np.isfinite(value) else None
