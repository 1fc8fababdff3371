"""SortedRL's parts side by side: real verl, vLLM and the tiny world, one replica.

    python -m benchmarks.sorted [--json | --table] [--quick] [--arm ARM] [--seed N] [--runs N] [--out DIR] [SETTING]

Arms take turns; each run is one seed's, and its row is kept in ``--out``: started again, what is there is not run
again, so that ``--runs 1`` goes on by one run. With no run left to make, or ``--runs 0``, it shows what there is: of
each arm what its seeds say together, with ``--json`` every run's row before, with ``--table`` as in docs/studies/sorted.md.

A setting is a regime and an algorithm, as in ``steady-grpo``. Where it is steady a decoding step takes at least 25 ms,
whatever is in it (:mod:`benchmarks.steady_step`), as on a GPU; bare, all share this machine's cores. The engine has
slots for all samples of an update, as where SortedRL found most of them idle; ``queued-grpo`` is steady, too, with a
quarter of the slots and steps of 12 ms. ``flat-grpo`` has steps of 70 ms, within which this machine makes those of full
batches of drafts, too, so that they take no longer either. Algorithms are GRPO, REINFORCE++ and PPO with a critic.
Every arm trains the same prompts, and as many samples; arms with larger batches in fewer steps. After the last epoch
verl validates on held-out puzzles. ``learning-grpo`` is ``steady-grpo`` for five epochs in place of two, with a
validation after each of them, and twice the held-out answers.

Figures of speed are of loads after the first epoch into which no validation came, held-out accuracy and what it took to
get there of the whole run. Seconds are those of verl's steps, which validation is not in. Engines of a sorted rollout
generate for training while the trainer validates: to the seconds until an accuracy is reached those are added
(:func:`benchmarks.sorted_measures.while_validating`), in full, though validation has the slots then.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import sorted_measures, tiny_run
from benchmarks.machine import commit, describe
from benchmarks.real_run import Cell, Kept
from benchmarks.tiny_run import RHYME, ROLLOUT
from examples.tiny_world.untie import untie

PROMPTS, BATCH, SAMPLES, LOAD = 64, 8, 8, 4
SEEDS = (1, 2, 3)
MODEL = Path(__file__).parents[1] / "examples/tiny_world/models/qwen2"

#: Of each its estimator of advantages and the engine that trains. verl's FSDP critic needs flash-attn, which a CPU has
#: not, and its Megatron critic a model whose embeddings are not tied.
ALGORITHMS = {"grpo": ("grpo", "fsdp"), "reinforce++": ("reinforce_plus_plus", "fsdp"), "ppo": ("gae", "megatron")}
#: Arms that are systems, as opposed to parts of one taken away.
SYSTEMS = (
    *("sync", "sync, large batch", "sync, drafts", "sync, large batch, drafts"),
    *("sorted", "sorted, undrafted", "sorted, coupled"),
    *("partial", "partial, 3 versions", "partial, rolling", "partial, rolling, 3 versions"),
)


@dataclass(frozen=True)
class Setting:
    """``algorithm``: of :data:`ALGORITHMS`; ``step_ms``: least milliseconds of a decoding step; ``slots``: of the
    engine; ``answers``: to each of 64 held-out puzzles, after each epoch or the last; ``arms``: ``None``: all."""

    algorithm: str
    step_ms: float | None = 25.0
    slots: int = 64
    epochs: int = 2
    answers: int = 2
    each_epoch: bool = False
    arms: tuple[str, ...] | None = None


SETTINGS = {
    **{f"steady-{algorithm}": Setting(algorithm) for algorithm in ALGORITHMS},
    **{f"bare-{algorithm}": Setting(algorithm, step_ms=None, arms=SYSTEMS) for algorithm in ALGORITHMS},
    "queued-grpo": Setting("grpo", step_ms=12.0, slots=16),
    "flat-grpo": Setting("grpo", step_ms=70.0, arms=(*SYSTEMS, "no oversubscription")),
    "learning-grpo": Setting(
        "grpo", epochs=5, answers=4, each_epoch=True, arms=("sync", "sync, large batch", "sorted", "partial")
    ),
}


@dataclass(frozen=True)
class Arm:
    """``system``: the recipe's ``RHYME``; ``batches``: update batches that verl is given as one, ``mini_batches`` the
    optimizer steps that it makes of them; ``sorting``: values of our options."""

    system: str
    batches: int = 1
    mini_batches: int = 1
    variables: tuple[tuple[str, str], ...] = ()
    sorting: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()

    @property
    def samples(self) -> int:
        """Of a step."""
        return self.batches * BATCH * SAMPLES

    def options(self) -> list[str]:
        """What differs from the recipe, beside :meth:`settings`."""
        return [
            f"data.train_batch_size={self.batches * BATCH}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={self.batches * BATCH // self.mini_batches}",
            *(f"{RHYME}.sorting.{option}" for option in self.sorting),
            *self.overrides,
        ]

    def settings(self) -> dict[str, str]:
        return {"RHYME": self.system, **dict(self.variables)}


#: As SortedRL has it: what is regenerated is drawn with fresh noise.
_FRESH = (("SORTED_COUPLED", "0"),)
_SORTED = Arm("sorted", variables=_FRESH, sorting=(f"group_batches={LOAD}",))
_WHOLE = ("group_batches=1", "harvest=loaded", "order=1")


def _with(*sorting: str) -> Arm:
    return replace(_SORTED, sorting=(*_SORTED.sorting, *sorting))


#: docs/studies/sorted.md tells what each of them is (``sync`` validates before it trains, too).
ARMS = {
    "sync": Arm("off", overrides=("trainer.val_before_train=true",)),
    "sync, large batch": Arm("off", batches=LOAD, mini_batches=LOAD),
    "sync, drafts": Arm("histospec"),
    "sync, large batch, drafts": Arm("histospec", batches=LOAD, mini_batches=LOAD),
    "sorted": _SORTED,
    "sorted, undrafted": replace(_SORTED, overrides=(f"{RHYME}.drafting.enable=false",)),
    "sorted, coupled": replace(_SORTED, variables=()),
    "partial": replace(_SORTED, variables=(("SORTED_MODE", "partial"),)),
    "partial, 3 versions": Arm(
        "sorted", variables=(("SORTED_MODE", "partial"),), sorting=(f"group_batches={LOAD}", "max_staleness=3")
    ),
    "partial, rolling": Arm("sorted", variables=(("SORTED_MODE", "partial"),), sorting=("load=rolling",)),
    "partial, rolling, 3 versions": Arm(
        "sorted", variables=(("SORTED_MODE", "partial"),), sorting=("load=rolling", "max_staleness=3")
    ),
    "short first": _with("start_order=shortest"),
    "long first": _with("start_order=longest"),
    "finished batch sorted": Arm("sorted", variables=_FRESH, batches=LOAD, mini_batches=LOAD, sorting=_WHOLE),
    "no grouped loading": _with("load=refill"),
    "no oversubscription": _with("oversubscription=1"),
    "one batch loaded": Arm("sorted", variables=_FRESH, sorting=("group_batches=1",)),
    "update as large as the load": Arm("sorted", variables=_FRESH, batches=LOAD, sorting=("group_batches=1",)),
}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)


def cells(settings: Iterable[str], seeds: Iterable[int] = SEEDS) -> Iterator[Cell]:
    """Runs in their order: by seeds, in each by settings, in each all arms."""
    return (
        Cell(setting, arm, seed) for seed in seeds for setting in settings for arm in SETTINGS[setting].arms or ARMS
    )


def overrides(cell: Cell) -> list[str]:
    """What hydra is told of a run."""
    arm, setting = ARMS[cell.arm], SETTINGS[cell.setting]
    epochs = 1 if setting.each_epoch else setting.epochs
    return [
        *tiny_run.sizes(BATCH, SAMPLES, setting.slots, 1),
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={4 * SAMPLES}",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu={4 * SAMPLES}",
        *(f"{ROLLOUT}.val_kwargs.{option}" for option in (f"n={setting.answers}", "do_sample=true", "temperature=1.0")),
        *(f"trainer.test_freq={epochs * PROMPTS // (arm.batches * BATCH)}", "trainer.save_freq=-1"),
        f"algorithm.adv_estimator={ALGORITHMS[setting.algorithm][0]}",
        *arm.options(),
    ]


def train(cell: Cell, out: Path, quick: bool = False) -> None:
    """Make a run; ``quick``: of one epoch of half the prompts."""
    folder = cell.folder(out)
    setting = SETTINGS[cell.setting]
    prompts, epochs = (PROMPTS // 2, 1) if quick else (PROMPTS, setting.epochs)
    settings = {"EPOCHS": str(epochs), "PROMPTS": str(prompts), "SEED": str(cell.seed)}
    settings["ENGINE"] = ALGORITHMS[setting.algorithm][1]
    if settings["ENGINE"] == "megatron":
        settings["MODEL"] = str(_untied(out))
    shutil.rmtree(folder, ignore_errors=True)  # of a run that did not come to its end
    tiny_run.train(folder, settings | ARMS[cell.arm].settings(), overrides(cell), setting.step_ms, timeout=1800)


def _untied(out: Path) -> Path:
    """The tiny world's model with an output embedding of its own."""
    model = out.absolute() / "qwen2_untied"
    if not model.exists():
        model.parent.mkdir(parents=True, exist_ok=True)
        untie(MODEL, model)
    return model


def measure(cell: Cell, folder: Path) -> dict[str, Any]:
    """A run's row."""
    arm = ARMS[cell.arm]
    figures = sorted_measures.measure(folder, arm.samples, PROMPTS * SAMPLES, LOAD * BATCH * SAMPLES)
    return {"setting": cell.setting, "arm": cell.arm, "seed": cell.seed, "optimizer_steps": arm.mini_batches, **figures}


def _told(row: dict[str, Any]) -> str:
    which = f"seed {row['seed']}" if "seed" in row else f"{row['runs']} runs"
    return f"{row['setting']:18} {row['arm']:28} {which}: " + ", ".join(
        f"{name} {row[name]}" for name in sorted_measures.TOLD if row.get(name) is not None
    )


@app.command()
def main(
    settings: Annotated[list[str] | None, typer.Argument(help="default: all")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one object a line")] = False,
    table: Annotated[bool, typer.Option("--table", help="what the seeds say together, as a table")] = False,
    quick: Annotated[bool, typer.Option(help="half an epoch of one arm by each algorithm (six minutes)")] = False,
    arm: Annotated[list[str] | None, typer.Option(help="may be given again; default: all")] = None,
    runs: Annotated[int | None, typer.Option(help="to make at most; 0: only show what there is")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="may be given again; default: 1, 2 and 3")] = None,
    out: Annotated[Path, typer.Option(help="where the runs are kept")] = Path("runs/sorted"),
    again: Annotated[bool, typer.Option(help="measure kept runs anew")] = False,
) -> None:
    """Train, measure, print."""
    chosen = settings or list(SETTINGS)
    for kind, given, known in (("setting", chosen, SETTINGS), ("arm", arm or (), ARMS)):
        if unknown := sorted(set(given) - set(known)):
            raise typer.BadParameter(f"no {kind} {'; '.join(unknown)}; there are: {'; '.join(known)}")
    wanted = [cell for cell in cells(chosen, dict.fromkeys(seed or SEEDS)) if not arm or cell.arm in arm]
    if quick:
        out = out / "quick"
        wanted = [Cell(setting, (arm or ["sorted"])[0], 1) for setting in chosen if setting.startswith("steady")]
    kept = Kept(out)
    about = {"benchmark": "sorted", "machine": describe(), "commit": commit()}
    if again:
        kept.replace(
            [{**row, **measure(cell, cell.folder(out)), "measured_by": commit()} for cell, row in kept.by_cell()]
        )

    def make(cell: Cell) -> dict[str, Any]:
        train(cell, out, quick)
        return {**about, **measure(cell, cell.folder(out))}

    shown = kept.complete(wanted, runs, make, lambda row: as_json or print(_told(row), flush=True))
    if shown is None:
        return
    shown = [row for row in shown if row["seed"] in (seed or SEEDS)]
    order = [*((setting, arm) for setting in SETTINGS for arm in ARMS)]
    together = sorted(sorted_measures.together(shown), key=lambda row: order.index((row["setting"], row["arm"])))
    if table:
        print("\n".join(sorted_measures.table(together)))
        return
    for row in [*(shown if as_json else []), *({**about, "together": True, **row} for row in together)]:
        print(json.dumps(row) if as_json else _told(row), flush=True)


if __name__ == "__main__":
    app()
