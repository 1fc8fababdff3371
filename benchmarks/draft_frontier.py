"""Compare our drafts with arctic-inference's at equal verification, from the rows of ``draft_quality``.

    python -m benchmarks.draft_frontier [--json] [RESULTS.jsonl]

The adaptive drafter with several minimum probabilities spans a frontier: tokens per step over verified tokens per
token. For each row of arctic, the frontier is interpolated at arctic's verified tokens per token. A row outside the
frontier has no figure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

RESULTS = Path(__file__).with_name("results") / "draft_quality.jsonl"
OURS, THEIRS = "adaptive floor ", "arctic factor "


def frontier(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each trace, set of epochs and arm of arctic within the frontier."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["trace"], row["epochs"]), []).append(row)
    for (trace, epochs), group in groups.items():
        ours = sorted(
            (row["verified_per_token"], row["tokens_per_step"]) for row in group if row["arm"].startswith(OURS)
        )
        for row in group:
            at = row["verified_per_token"]
            if row["arm"].startswith(THEIRS) and ours and ours[0][0] <= at <= ours[-1][0]:
                tokens = float(np.interp(at, *zip(*ours, strict=True)))
                yield {
                    "trace": trace,
                    "epochs": epochs,
                    "against": row["arm"],
                    "verified_per_token": at,
                    "theirs": row["tokens_per_step"],
                    "ours": round(tokens, 3),
                    "ratio": round(tokens / row["tokens_per_step"], 3),
                }


def main(
    results: Annotated[Path, typer.Argument(help="rows of draft_quality --json")] = RESULTS,
    as_json: Annotated[bool, typer.Option("--json", help="one object a line")] = False,
) -> None:
    """Print the ratios."""
    lines = results.read_text().splitlines()
    for row in frontier(json.loads(line) for line in lines if line.startswith("{")):
        print(
            json.dumps(row)
            if as_json
            else f"{row['trace']:12} {row['epochs']:6} {row['against']:16} at {row['verified_per_token']:5.2f}: "
            f"{row['ours']:6.3f} for {row['theirs']:6.3f}, {row['ratio']:.2f}"
        )


if __name__ == "__main__":
    typer.run(main)
