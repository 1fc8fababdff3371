"""How near the planner's split is to the best one, by simulating all of them; and what two sites of two kinds are
worth.

    python -m benchmarks.studies.allocation [--json] [--quick] [--bound K]

``splits``: on one site of Qwen2.5-32B's profile (tensor parallel 4, reckoned), each split of the nodes is run through
the simulator under the rules of ``full`` at each bound of staleness. ``near`` is the simulated step of the planner's
split over that of the best simulated one; ``half`` and ``published`` the same of half the GPUs each and of Algorithm 1
as published (with our estimates of rollout alone and of training, and as many GPUs as hold the model at least; all
others roll out); ``estimate`` how far the planner's step is off, at its split.

``kinds``: StreamRL's cost-effectiveness (arXiv:2504.15930, section 6): generation on H20 at another site beside H800
alone, in trained samples for the price. Published: 1.23 to 1.33. The H800 of both are as many; of H20 there are as many
as are wanted, up to 128. Both are the planner's best by cost, among steps no longer than those of H800 alone.

Rooflines, not measurements: the figures say what the planner does with such curves.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.machine import commit, describe
from verl_rhyme.planning.cost import TrainingCost
from verl_rhyme.planning.planner import Problem, Split, plan
from verl_rhyme.planning.planner import split as reckoned
from verl_rhyme.planning.times import Work, rollout
from verl_rhyme.scheduling.rules import Rules
from verl_rhyme.simulation import plan_file
from verl_rhyme.simulation.run import Simulation
from verl_rhyme.simulation.scenario import Scenario, Streaming
from verl_rhyme.simulation.workload import Lengths

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)

PLANS = Path(__file__).parents[2] / "examples" / "plan"
BOUNDS = (0, 1, 2, 4)
#: GPUs of the site, prompts of a batch, median length of a response.
SIZES = [(64, 64, 1000), (64, 64, 2500), (128, 64, 1000), (128, 64, 2500)]
GROUP, PROMPT_TOKENS, LIMIT = 8, 300, 20480
#: Batches of a simulated run, and those of its beginning that do not count.
BATCHES, FIRST = 14, 4
TP = "qwen2.5-32b-h800-tp4"


def lengths(median: float) -> Lengths:
    """Of DAPO's shape (examples/simulate/dapo32b.yaml), with another median."""
    return Lengths({50: median, 90: 3.6 * median, 99: 7.2 * median}, LIMIT)


def simulated(problem: Problem, train: int, rollout: int, median: float) -> float:
    """Seconds of a step."""
    [pool] = problem.pools
    prompts = problem.work.samples // GROUP
    assert pool.training is not None
    cost = TrainingCost(token=pool.training.token / train, update=pool.training.update, sync=problem.weights)
    of = (next(iter(pool.replicas.values())),) * (rollout // 4)
    batch = prompts * GROUP
    scenario = Scenario(
        of,
        Rules(prompts, batch, problem.max_staleness, separate=True, relayed=True),
        cost,
        Streaming(batch // 8),
        colocated=False,
        placement="longest_first",
        forecasts="none",
        response_limit=LIMIT,
    )
    made = lengths(median).epochs(prompts * BATCHES, GROUP, 1, PROMPT_TOKENS)
    steps = Simulation(scenario, made).run()[FIRST:]
    return (steps[-1].ended - steps[0].began) / len(steps)


def splits(quick: bool, bounds: Sequence[int] = BOUNDS) -> Iterator[dict[str, Any]]:
    """One row for each size and bound."""
    sizes = [(32, 16, 1000)] if quick else SIZES
    for gpus, prompts, median in sizes:
        changes = [f"sites.0.gpus={gpus}", f"kinds.0.profiles=[{TP}]", f"batch.prompts={prompts}"]
        changes += [f"batch.samples={GROUP}", "batch.percentiles=null", "batch.percentiles={50: 1, 90: 2}"]
        loaded = plan_file.load(PLANS / "one_site.yaml", changes)
        made = lengths(median).epochs(prompts * BATCHES, GROUP, 1, PROMPT_TOKENS)
        all_lengths = np.concatenate([prompt.lengths for prompt in made]).astype(float)
        work = Work(all_lengths, prompts * GROUP, GROUP, PROMPT_TOKENS)
        for bound in bounds:
            yield _splits(replace(loaded.problem, work=work, max_staleness=bound), median)


def _splits(problem: Problem, median: float) -> dict[str, Any]:
    [pool] = problem.pools
    assert pool.training is not None
    nodes = pool.gpus // pool.node
    possible = [y * pool.node for y in range(1, nodes) if not pool.check_training(problem.model, y * pool.node)]
    took = {y: simulated(problem, y, pool.gpus - y, median) for y in possible}
    best = min(took, key=lambda y: took[y])
    began = time.perf_counter()
    found = plan(problem)
    planned = time.perf_counter() - began
    ours = simulated(problem, found.best.train_gpus, found.best.rollout_gpus, median)

    def p_gen(n: int) -> float:
        return float(rollout(pool.replicas[4], 2.0 * n, problem.work))

    def p_train(n: int) -> float:
        assert pool.training is not None
        return float(pool.training.seconds(pool.node * n, problem.work.trained_tokens))

    theirs = max(possible[0], pool.node * _published(p_gen, p_train, nodes)[1])  # it knows no memory
    half = min(possible, key=lambda y: abs(y - pool.gpus / 2))
    return {
        "part": "splits",
        "max_staleness": problem.max_staleness,
        "gpus": pool.gpus,
        "samples": problem.work.samples,
        "median": median,
        "train_gpus": {"plan": found.best.train_gpus, "best": best, "published": theirs, "half": half},
        "rollout_gpus": found.best.rollout_gpus,
        "step_s": round(ours, 1),
        "best_s": round(took[best], 1),
        "near": round(ours / took[best], 3),
        "published": round(took[theirs] / took[best], 3),
        "half": round(took[half] / took[best], 3),
        "estimate": round(found.best.step / ours - 1, 3),
        "plan_s": round(planned, 2),
        "simulated": len(took),
    }


def _published(p_gen: Callable[[int], float], p_train: Callable[[int], float], nodes: int) -> tuple[int, int]:
    """Algorithm 1 within a data centre: nodes that roll out and that train; the fewest of equally fast ones."""
    pairs = ((x, y) for x in range(1, nodes) for y in range(1, nodes - x + 1))
    return min(pairs, key=lambda pair: (max(p_gen(pair[0]), p_train(pair[1])), sum(pair), pair))


#: GPUs that H800 alone has, median length of a response.
KINDS = [(64, 1000), (64, 2500), (128, 2500), (128, 5000)]


def kinds(quick: bool) -> Iterator[dict[str, Any]]:
    """One row for each setting: H800 alone, and with H20 to generate."""
    for gpus, median in KINDS[1:2] if quick else KINDS:
        of = lengths(median).percentiles
        percentiles = "{" + ", ".join(f"{p}: {tokens}" for p, tokens in of.items()) + "}"
        changes = [f"sites.0.gpus={gpus}", f"batch.percentiles={percentiles}", "slowest=null"]
        both = plan_file.load(PLANS / "two_sites.yaml", changes).problem
        alone = replace(both, pools=[pool for pool in both.pools if pool.kind == "h800"])
        one = plan(replace(alone, objective="time")).best
        two = plan(replace(both, objective="cost", slowest=one.step)).best
        same = _with_h20(both, one)
        yield {
            "part": "kinds",
            "gpus": gpus,
            "median": median,
            "alone": _row(one),
            "with_h20": _row(two),
            "samples_per_price": round(_ratio(one, two), 3),
            "published": [1.23, 1.33],
            "same_training": None if same is None else round(_ratio(one, same), 3),
            "transfer_share": round(two.transfer / two.step, 4),
        }


def _with_h20(problem: Problem, one: Split) -> Split | None:
    """The same GPUs train, and H20 generate, as many as make the step no longer."""
    [h20] = [pool for pool in problem.pools if pool.kind == "h20"]
    tried = (reckoned(problem, (one.train, one.train_gpus), (h20, x), tp) for tp in h20.replicas for x in h20.shares(8))
    fast = [split for split in tried if split.step <= 1.01 * one.step]
    return min(fast, key=lambda split: split.cost or 0.0, default=None)


def _ratio(one: Split, two: Split) -> float:
    assert one.cost is not None
    assert two.cost is not None
    return one.cost / two.cost


def _row(split: Split) -> dict[str, Any]:
    of = {"train": split.train_gpus, "rollout": {split.rollout.kind: split.rollout_gpus}, "tp": split.tp}
    return {**of, "step_s": round(split.step, 1), "cost_per_1000": round(1000 * (split.cost or 0.0), 2)}


@app.command()
def main(
    as_json: Annotated[bool, typer.Option("--json", help="One object a line.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="One small setting of each part.")] = False,
    bound: Annotated[int, typer.Option(help="Splits at one bound of staleness alone.")] = -1,
) -> None:
    """All rows."""
    about = {"machine": describe(), "commit": commit()}
    near = []
    given = [bound] if bound >= 0 else BOUNDS
    for rows in (splits(quick, given), [] if bound >= 0 else kinds(quick)):
        for row in rows:
            near += [row["near"]] if "near" in row else []
            if as_json:
                print(json.dumps({"benchmark": "allocation", **row, **about}), flush=True)
            else:
                print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    if not as_json:
        print(f"the planner's split over the best simulated one: median {statistics.median(near)}, worst {max(near)}")


if __name__ == "__main__":
    app()
