"""Compare placement policies at the size of DAPO on 32 and 128 replicas: their gain and their cost.

    python -m benchmarks.real_sizes routing [--json] [--quick] [--replicas N ...] [--arm NAME ...] [--steps N]
        [--epochs N]

The real router and coordinator with forecasts, placement, worker pool and reports run on real asyncio. Engines are
simulated in virtual time (:mod:`benchmarks.real_sizes.routing_world`): an estimated 32B model on four H800s each, one
token per sample and step. Savings by siblings are not in these seconds. Training batches have 512 prompts x 16 samples,
on engines that share the trainer's GPUs. Response lengths are log-normal among prompts and within each, with a mean of
4,000 tokens and at most 20,480. An epoch has 17,398 prompts in a new order. ``--epochs`` repeats the first ``--steps``
batches, so that the second epoch has the first's prompts.

`siblings_met`: share of samples that run on their replica with or after a sibling in the same step; `siblings`: how
many of the other 15. `requests_to_mean`, `cached_to_mean`: the highest number of requests
(tokens in KV caches) at a replica over the mean, both summed over time; `tokens_to_mean`: the highest number of tokens
that a replica generates in a step over the mean. `prompts_a_node`: share of an epoch's prompts that a node of eight
replicas serves, the maximum; `history_gib`: the history of that many of 17,398 prompts with 16 responses; `home`: share
of the second epoch's samples on a node that served their prompt before. `copies_a_prompt`: nodes except the first, the
trainer's, that fetch a prompt's history in a step; `copied_gib_a_step`: their data for a history of one epoch.
`rollout_s`: virtual seconds of a step. ``--staleness 1``: engines are separate and continue responses under new
policies, and the trainer takes parts; ``--known``: the coordinator knows the lengths of that many prompts, 64 each.

Times are CPU time of one thread: microseconds of a routing decision and of an attempt's report. `coordinator_still_ms`
is the longest time that the coordinator's loop is blocked; `coordinator_step_ms` its total per step. Messages are those
to router and coordinator per sample. Sending and pickling by Ray are not included.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.machine import commit, describe
from benchmarks.real_sizes.routing_world import MOST_TOKENS, Ran, World, tokens_by
from verl_rhyme.checks.preflight.history_size import RESPONSE_BYTES, TOKEN_BYTES
from verl_rhyme.planning import roofline
from verl_rhyme.planning.architecture import PUBLISHED, Architecture

PROMPTS, BATCH, SAMPLES, REPLICAS_A_NODE = 17_398, 512, 16, 8
MEAN_TOKENS = 4000
COST = roofline.replica(Architecture.read(PUBLISHED["Qwen/Qwen2.5-32B"]), roofline.GPUS["H800"], 4)
#: Placement policy with its options.
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "least_loaded": ("least_loaded", {}),
    "longest_first": ("longest_first", {}),
    "histopipe": ("histopipe", {}),
}


def _lengths(prompts: int, epoch: int) -> np.ndarray:
    """Return int[prompts, SAMPLES], the tokens of each response."""
    hard = np.random.default_rng(7).lognormal(0.0, 0.7, (prompts, 1))
    drawn = hard * np.random.default_rng(100 + epoch).lognormal(0.0, 0.4, (prompts, SAMPLES))
    return np.clip(drawn / np.exp(0.7**2 / 2 + 0.4**2 / 2) * MEAN_TOKENS, 1, MOST_TOKENS).astype(int)


def drive(arm: str, replicas: int, batch: int, steps: int, epochs: int, staleness: int, known: int) -> World:
    """Run epochs of ``steps`` training steps."""
    policy, options = ARMS[arm]
    lengths = np.stack([_lengths(steps * batch, epoch) for epoch in range(epochs)])
    world = World(policy, options, replicas, COST, lengths, batch, REPLICAS_A_NODE, staleness, known)
    world.run(epochs * steps)
    return world


def siblings(step: Ran) -> np.ndarray:
    """Return for each sample how many siblings its replica's drafter knows: samples of the group that start on the same
    replica before the sample ends; int64 [samples]."""
    began, ended = np.array(step.began), np.array(step.ended)
    together: dict[tuple[str, int], list[int]] = defaultdict(list)
    for row, place in enumerate(zip(step.groups, step.replicas, strict=True)):
        together[place].append(row)
    found = np.zeros(len(began), dtype=np.int64)
    for rows in together.values():
        found[rows] = np.searchsorted(np.sort(began[rows]), ended[rows], side="left") - 1
    return np.maximum(found, 0)  # a sample that ends at its start


def routed(world: World, steps: list[Ran]) -> dict[str, Any]:
    """Return figures of shared replicas and of the balance."""
    replicas = len(world.replicas)
    found = [siblings(step) for step in steps]
    made = [tokens_by(step, replicas) for step in steps]
    loads = {
        "requests_to_mean": np.concatenate([np.array(step.running, dtype=float) for step in steps]),
        "cached_to_mean": np.concatenate([np.array(step.cached, dtype=float) for step in steps]),
    }
    return {
        "siblings_met": round(float(np.mean([(each > 0).mean() for each in found])), 4),
        "siblings": round(float(np.mean([each.mean() for each in found])), 2),
        **{name: round(float(load.max(1).sum() / load.mean(1).sum()), 3) for name, load in loads.items()},
        "tokens_to_mean": round(float(np.mean([tokens.max() / tokens.mean() for tokens in made])), 3),
        "rollout_s": round(float(np.mean([step.seconds for step in steps])), 1),
    }


def histories(world: World, first: list[Ran], second: list[Ran]) -> dict[str, Any]:
    """Return the prompts that nodes served, and the samples on a node that served their prompt before."""
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
    """Return the mean number of nodes, without the trainer's, that fetch a prompt's history in a step, and its size."""
    nodes: set[tuple[int, str, int]] = set()
    for number, step in enumerate(steps):
        for uid, replica in zip(step.groups, step.replicas, strict=True):
            if node := replica // world.replicas_a_node:
                nodes.add((number, uid, node))
    copies = len(nodes) / sum(len(set(step.groups)) for step in steps)
    prompt = world.samples * (TOKEN_BYTES * float(world.lengths.mean()) + RESPONSE_BYTES)
    return {"copies_a_prompt": round(copies, 2), "copied_gib_a_step": round(copies * world.batch * prompt / 2**30, 2)}


def costs(world: World, steps: int) -> dict[str, Any]:
    """Return CPU time and messages of router and coordinator."""
    samples = steps * world.batch * world.samples
    coordinator, router = world.coordinator, world.router
    decided, ended = (
        np.array(of) / 1e3 for of in (router.slices["acquire_server"], coordinator.slices["Coordinator.report_ended"])
    )
    stills = {name.rpartition(".")[2]: max(slices) / 1e6 for name, slices in coordinator.slices.items() if slices}
    longest = sorted(stills, key=lambda name: -stills[name])[:3]
    return {
        "decision_us": round(float(np.median(decided)), 1),
        "decision_us_p99": round(float(np.percentile(decided, 99)), 1),
        "report_us": round(float(np.median(ended)), 1),
        "report_us_p99": round(float(np.percentile(ended, 99)), 1),
        "coordinator_step_ms": round(sum(map(sum, coordinator.slices.values())) / steps / 1e6),
        "coordinator_us_a_sample": round(sum(map(sum, coordinator.slices.values())) / samples / 1e3, 1),
        "coordinator_still_ms": {name: round(stills[name], 1) for name in longest},
        "messages_a_sample": {
            "router": round(sum(router.messages.values()) / samples, 2),
            "coordinator": round(sum(coordinator.messages.values()) / samples, 2),
        },
    }


def main(
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per line")] = False,
    quick: Annotated[bool, typer.Option(help="16 replicas, batches of 64 prompts")] = False,
    replicas: Annotated[list[int] | None, typer.Option(help="default: 32 and 128")] = None,
    arm: Annotated[list[str] | None, typer.Option(help="repeat for several; default: all")] = None,
    steps: Annotated[int, typer.Option(help="training steps of each epoch", min=1)] = 4,
    epochs: Annotated[int, typer.Option(min=2)] = 2,
    staleness: Annotated[int, typer.Option(help="0: engines stop while the actor trains; else separate, in parts")] = 0,
    known: Annotated[int, typer.Option(help="prompts with known lengths")] = 0,
) -> None:
    """Run each arm with each number of replicas, and print a row for each."""
    if unknown := sorted(set(arm or ()) - set(ARMS)):
        raise typer.BadParameter(f"unknown arm {', '.join(unknown)}; known: {'; '.join(ARMS)}")
    logging.getLogger("verl_rhyme").setLevel(logging.ERROR)  # in virtual time, timeouts pass at once
    batch, steps = (64, 2) if quick else (BATCH, steps)
    about = {"benchmark": "real_sizes", "part": "routing", "machine": describe(), "commit": commit()}
    for count in replicas or ([16] if quick else [32, 128]):
        for name in arm or ARMS:
            world = drive(name, count, batch, steps, epochs, staleness, known)
            first, second = world.steps[:steps], world.steps[steps : 2 * steps]
            row = {
                "arm": name,
                "replicas": count,
                "in_flight": batch * world.samples,
                "staleness": staleness,
                "known": known,
                "epochs": epochs,
                "steps": epochs * steps,
                **routed(world, world.steps),
                "siblings_met_first_epoch": routed(world, first)["siblings_met"],
                **histories(world, first, second),
                **fetched(world, world.steps),
                **costs(world, epochs * steps),
            }
            print(json.dumps({**about, **row}) if as_json else row, flush=True)
