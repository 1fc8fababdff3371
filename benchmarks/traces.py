"""Record traces of training runs, and load them for replay with any drafter.

    python -m benchmarks.traces record OUT.parquet [--env MODEL=llama ...] [-- hydra overrides]
    python -m benchmarks.traces convert RUN_DIR OUT.parquet

A trace has every trained response of a run: step, epoch, prompt (key and tokens), sample, tokens, log-probs, reward.
Tokens that the policy did not generate, such as a tool's answer, have the log-prob NaN.
``record`` makes a training run in the real stack (``recipes/run_tiny_cpu.sh``). ``convert`` reads any run that logged
its responses (``actor_rollout_ref.rollout.custom.rhyme.events.responses=true``), including yours.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import typer

from verl_rhyme.observability import events

ROOT = Path(__file__).parents[1]
FOLDER = Path(__file__).parent / "traces"
_COLUMNS = ["step", "epoch", "prompt_key", "sample", "reward", "prompt", "tokens", "logprobs"]
_RESPONSES_ON = "actor_rollout_ref.rollout.custom.rhyme.events.responses=true"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)


@dataclass(frozen=True, slots=True)
class Response:
    """One row of a trace; arrays as in :data:`verl_rhyme.observability.events.RESPONSES`."""

    id: str
    step: int
    epoch: int
    key: bytes
    sample: int
    reward: float
    prompt: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray

    def turns(self) -> list[Response]:
        """Return each turn of the policy as a response whose prompt is all that was before it."""
        policy = np.diff(~np.isnan(self.logprobs), prepend=False, append=False)
        ends = np.flatnonzero(policy).reshape(-1, 2)
        return [
            replace(
                self,
                id=f"{self.id}-{turn}",
                prompt=np.concatenate([self.prompt, self.tokens[:begin]]),
                tokens=self.tokens[begin:end],
                logprobs=self.logprobs[begin:end],
            )
            for turn, (begin, end) in enumerate(ends)
        ]

    def of_policy(self) -> Response:
        """Return the response without the tokens that the policy did not generate, as the history has it."""
        policy = ~np.isnan(self.logprobs)
        return replace(self, tokens=self.tokens[policy], logprobs=self.logprobs[policy])


def load(path: str | os.PathLike[str]) -> list[list[Response]]:
    """Return a trace's responses by step, in the order of their prompts and samples.

    Raises:
        SystemExit: The file is not a trace.
    """
    try:
        rows = pq.read_table(path, columns=_COLUMNS).to_pylist()
    except (OSError, pa.ArrowInvalid) as error:
        raise SystemExit(
            f"{path} is not a trace ({type(error).__name__}) -> make one from a run with events.responses=true: "
            "python -m benchmarks.traces convert RUN_DIR OUT.parquet"
        ) from None
    steps: dict[int, list[Response]] = {}
    for i, row in enumerate(rows):
        steps.setdefault(row["step"], []).append(
            Response(
                id=str(i),
                step=row["step"],
                epoch=row["epoch"],
                key=row["prompt_key"],
                sample=row["sample"],
                reward=row["reward"],
                prompt=np.array(row["prompt"], dtype=np.int32),
                tokens=np.array(row["tokens"], dtype=np.int32),
                logprobs=np.array(row["logprobs"], dtype=np.float32),
            )
        )
    return [sorted(steps[step], key=lambda r: (r.key, r.sample)) for step in sorted(steps)]


@app.command()
def convert(run_dir: Path, out: Path) -> None:
    """Collect the responses that a run logged into one file."""
    table = events.read_responses(run_dir / "checkpoints" / "events")
    if not len(table):
        raise SystemExit(f"{run_dir} logged no responses; train it with {_RESPONSES_ON}")
    # Three digits of a log-prob are enough, and compress well.
    logprobs = table["logprobs"].combine_chunks()
    rounded = np.round(logprobs.values.to_numpy(zero_copy_only=False), 3)
    table = table.set_column(
        table.schema.get_field_index("logprobs"), "logprobs", pa.ListArray.from_arrays(logprobs.offsets, rounded)
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, out, compression="zstd", compression_level=19)
    print(f"{out}: {len(table)} responses, {len(rounded)} tokens, {out.stat().st_size / 1e6:.1f} MB")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def record(
    context: typer.Context,
    out: Path,
    env: Annotated[list[str] | None, typer.Option(help="NAME=VALUE for recipes/run_tiny_cpu.sh")] = None,
) -> None:
    """Train for six epochs (``--env EPOCHS=N``: N epochs) and record the samples. A failed run keeps its folder."""
    if wrong := [item for item in env or [] if "=" not in item]:
        raise typer.BadParameter(f"--env {wrong[0]} is not NAME=VALUE")
    out.parent.mkdir(parents=True, exist_ok=True)
    settings = {"EPOCHS": "6", **dict(item.split("=", 1) for item in env or [])}
    run_dir = tempfile.mkdtemp()
    command = ["bash", str(ROOT / "recipes" / "run_tiny_cpu.sh"), _RESPONSES_ON, "trainer.save_freq=-1"]
    done = subprocess.run([*command, *context.args], env={**os.environ, **settings, "RUN_DIR": run_dir})
    if done.returncode:
        raise SystemExit(f"no trace: the run failed with status {done.returncode}; its folder is {run_dir}")
    convert(Path(run_dir), out)
    shutil.rmtree(run_dir)


if __name__ == "__main__":
    app()
