"""Which replica serves which sample, at the size of DAPO on 32 and 128 replicas: what it is worth and what it costs.

    python -m benchmarks.real_sizes routing [--json] [--quick] [--replicas N ...] [--arm NAME ...] [--steps N]
        [--epochs N]

The real router and coordinator with all they drive (forecasts, placement, pool, reports), over real asyncio; engines
are simulated in virtual time (:mod:`benchmarks.real_sizes.routing_world`): a 32B model over four H800s each, reckoned,
every sample a token a step, whoever its neighbours are: what siblings save is not in these seconds. Updates of 512
prompts x 16 samples, on engines that share the actor's GPUs; responses log-normal among prompts and within each, 4,000
tokens on average, 20,480 at most. An epoch is 17,398 prompts, in another order each time; ``--steps`` after the first
``--steps`` updates it is begun anew, so that a second epoch's prompts are the first's (``--epochs``: how often).

`siblings_met`: share of samples that were at their replica beside a sibling or after one, within their step;
`siblings`: how many of the other 15 (:mod:`benchmarks.meetings`). `requests_to_mean`, `cached_to_mean`: the most
requests (tokens in KV caches) at a replica over the mean of all, both summed over time; `tokens_to_mean`: the most
tokens that a replica made in a step over the mean. `prompts_a_node`: share of an epoch's prompts that a node of eight
replicas served, the most of any; `history_gib`: of that many of 17,398 prompts with 16 responses; `home`: of the second
epoch's samples the share that came to a node which had served their prompt. `copies_a_prompt`: nodes but the first,
the trainer's, that fetch a prompt's history in a step; `copied_gib_a_step`: what they fetch, where it has one epoch.
`rollout_s`: a step's, virtual.

Times are processor time of one thread: microseconds of a routing decision and of a report of an attempt; milliseconds
that the coordinator's loop stands still at most (`coordinator_still_ms`) and takes for a step all in all; messages are
those that router and coordinator get for each sample. Sending and pickling, which Ray does, are not in them.
"""

from __future__ import annotations

import json
import logging
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.machine import commit, describe
from benchmarks.meetings import meetings
from benchmarks.real_sizes.routing_world import MOST_TOKENS, Ran, World, tokens_by
from verl_rhyme.checks.preflight.history_room import RESPONSE_BYTES, TOKEN_BYTES
from verl_rhyme.planning.profile import profile

PROMPTS, BATCH, SAMPLES, REPLICAS_A_NODE = 17_398, 512, 16, 8
MEAN_TOKENS = 4000
PROFILE = "qwen2.5-32b-h800-tp4"
#: Policy, and its options.
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "least_loaded": ("least_loaded", {}),
    "longest_first": ("longest_first", {}),
    "histopipe": ("histopipe", {}),
}


def _lengths(prompts: int, epoch: int) -> np.ndarray:
    """int[prompts, SAMPLES], tokens of each response."""
    hard = np.random.default_rng(7).lognormal(0.0, 0.7, (prompts, 1))
    drawn = hard * np.random.default_rng(100 + epoch).lognormal(0.0, 0.4, (prompts, SAMPLES))
    return np.clip(drawn / np.exp(0.7**2 / 2 + 0.4**2 / 2) * MEAN_TOKENS, 1, MOST_TOKENS).astype(int)


def drive(arm: str, replicas: int, batch: int, steps: int, epochs: int) -> World:
    """Epochs of ``steps`` updates."""
    policy, options = ARMS[arm]
    lengths = np.stack([_lengths(steps * batch, epoch) for epoch in range(epochs)])
    world = World(policy, options, replicas, profile(PROFILE)[0], lengths, batch, REPLICAS_A_NODE)
    world.run(epochs * steps)
    return world


def routed(world: World, steps: list[Ran]) -> dict[str, Any]:
    """Where samples met, and how even the loads were."""
    replicas = len(world.replicas)
    found = [meetings(s.groups, s.replicas, np.array(s.began), np.array(s.ended)) for s in steps]
    made = [tokens_by(step, replicas) for step in steps]
    loads = {
        "requests_to_mean": np.concatenate([np.array(step.running, dtype=float) for step in steps]),
        "cached_to_mean": np.concatenate([np.array(step.cached, dtype=float) for step in steps]),
    }
    return {
        "siblings_met": round(float(np.mean([each.met for each in found])), 4),
        "siblings": round(float(np.mean([each.siblings for each in found])), 2),
        **{name: round(float(load.max(1).sum() / load.mean(1).sum()), 3) for name, load in loads.items()},
        "tokens_to_mean": round(float(np.mean([tokens.max() / tokens.mean() for tokens in made])), 3),
        "rollout_s": round(float(np.mean([step.seconds for step in steps])), 1),
    }


def histories(world: World, first: list[Ran], second: list[Ran]) -> dict[str, Any]:
    """What nodes served, and whether prompts came home."""
    served: dict[int, set[int]] = {}
    for step in first:
        for uid, replica in zip(step.groups, step.replicas, strict=True):
            served.setdefault(replica // world.replicas_a_node, set()).add(world.prompt(uid)[1])
    home = [
        world.prompt(uid)[1] in served.get(replica // world.replicas_a_node, ())
        for step in second
        for uid, replica in zip(step.groups, step.replicas, strict=True)
    ]
    share = max(map(len, served.values())) / world.lengths.shape[1]
    prompt = world.samples * (TOKEN_BYTES * float(world.lengths.mean()) + RESPONSE_BYTES)
    return {
        "nodes": -(-len(world.replicas) // world.replicas_a_node),
        "prompts_a_node": round(share, 4),
        "history_gib": round(share * PROMPTS * prompt / 2**30, 2),
        "history_gib_of_all": round(PROMPTS * prompt / 2**30, 2),
        "home": round(float(np.mean(home)), 4),
    }


def fetched(world: World, steps: list[Ran]) -> dict[str, Any]:
    """How many nodes besides the first, the trainer's, fetch a prompt's history in a step, mean; and of how much."""
    nodes: set[tuple[int, str, int]] = set()
    for number, step in enumerate(steps):
        for uid, replica in zip(step.groups, step.replicas, strict=True):
            if node := replica // world.replicas_a_node:
                nodes.add((number, uid, node))
    copies = len(nodes) / sum(len(set(step.groups)) for step in steps)
    prompt = world.samples * (TOKEN_BYTES * float(world.lengths.mean()) + RESPONSE_BYTES)
    return {"copies_a_prompt": round(copies, 2), "copied_gib_a_step": round(copies * world.batch * prompt / 2**30, 2)}


def costs(world: World, steps: int) -> dict[str, Any]:
    """Processor time and messages of router and coordinator."""
    samples = steps * world.batch * world.samples
    told, router = world.coordinator, world.router
    decided, ended = (np.array(of) / 1e3 for of in (router.slices["acquire_server"], told.slices["Coordinator.ended"]))
    stills = {name.rpartition(".")[2]: max(slices) / 1e6 for name, slices in told.slices.items() if slices}
    longest = sorted(stills, key=lambda name: -stills[name])[:3]
    return {
        "decision_us": round(float(np.median(decided)), 1),
        "decision_us_p99": round(float(np.percentile(decided, 99)), 1),
        "report_us": round(float(np.median(ended)), 1),
        "report_us_p99": round(float(np.percentile(ended, 99)), 1),
        "coordinator_step_ms": round(sum(map(sum, told.slices.values())) / steps / 1e6),
        "coordinator_us_a_sample": round(sum(map(sum, told.slices.values())) / samples / 1e3, 1),
        "coordinator_still_ms": {name: round(stills[name], 1) for name in longest},
        "messages_a_sample": {
            "router": round(sum(router.messages.values()) / samples, 2),
            "coordinator": round(sum(told.messages.values()) / samples, 2),
        },
    }


def main(
    as_json: Annotated[bool, typer.Option("--json", help="one object a line")] = False,
    quick: Annotated[bool, typer.Option(help="16 replicas, 64 prompts an update")] = False,
    replicas: Annotated[list[int] | None, typer.Option(help="default: 32 and 128")] = None,
    arm: Annotated[list[str] | None, typer.Option(help="may be given again; default: all")] = None,
    steps: Annotated[int, typer.Option(help="updates of each epoch", min=1)] = 4,
    epochs: Annotated[int, typer.Option(min=2)] = 2,
) -> None:
    """Drive every arm on every fleet, and print a line for each."""
    if unknown := sorted(set(arm or ()) - set(ARMS)):
        raise typer.BadParameter(f"no arm {', '.join(unknown)}; there are: {'; '.join(ARMS)}")
    logging.getLogger("verl_rhyme").setLevel(logging.ERROR)  # in virtual time a minute's patience is over at once
    batch, steps = (64, 2) if quick else (BATCH, steps)
    about = {"benchmark": "real_sizes", "part": "routing", "machine": describe(), "commit": commit()}
    for count in replicas or ([16] if quick else [32, 128]):
        for name in arm or ARMS:
            world = drive(name, count, batch, steps, epochs)
            first, second = world.steps[:steps], world.steps[steps : 2 * steps]
            row = {
                "arm": name,
                "replicas": count,
                "in_flight": batch * world.samples,
                "epochs": epochs,
                "steps": epochs * steps,
                **routed(world, world.steps),
                "siblings_met_first_epoch": routed(world, first)["siblings_met"],
                **histories(world, first, second),
                **fetched(world, world.steps),
                **costs(world, epochs * steps),
            }
            print(json.dumps({**about, **row}) if as_json else row, flush=True)
