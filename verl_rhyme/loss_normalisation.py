"""Where the order of training changes what verl's loss is divided by: told at the start, and by the preflight.

verl averages an optimizer step's loss in one of several ways (``actor.loss_agg_mode``; ``agg_loss`` in its
``trainer/ppo/core_algos.py``). What is divided by the tokens that are in the step, or by its longest response, depends
on what else is in it. A batch as it was loaded has a mixture of lengths, and that hardly matters; sorted, the steps
differ by their lengths, so that a token's weight does (docs/sorted.md, "The order and the gradient"). Divided by the
number of responses, which verl takes from the config, it has the same weight in any company.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import OmegaConf

from verl_rhyme.combinations import Refusal
from verl_rhyme.config import CONFIG_PATH, TOPOLOGIES, RhymeConfig
from verl_rhyme.scheduling import rules

_ACTOR = "actor_rollout_ref.actor"


def contradictions(config: Any, rhyme: RhymeConfig | None) -> Iterator[Refusal]:
    """What weighs responses by the company in which they are trained, and what to set instead. None of it is refused:
    ``token-mean`` is verl's default.

    Args:
        config: verl's whole config; ``data``, ``trainer.v1`` and the actor's are read.
        rhyme: Our tree in it; ``None`` without rhyme.
    """
    if rhyme is None or rhyme.sorting.mode is None:
        return
    keys = (f"{_ACTOR}.loss_agg_mode", "data.train_batch_size", f"{_ACTOR}.ppo_mini_batch_size")
    average, batch, mini_batch = (OmegaConf.select(config, key) for key in keys)
    if None in (average, batch, mini_batch):  # no whole config: verl has its say
        return
    sorting, several = rhyme.sorting, int(mini_batch) < int(batch)
    chosen = _chosen_by_length(rhyme, str(config.trainer.v1.trainer_mode))
    horizon = f"{_ACTOR}.loss_scale_factor={config.data.max_response_length}"
    by_horizon = f"{_ACTOR}.loss_agg_mode=seq-mean-token-sum-norm with {horizon} (tokens weigh the same everywhere)"
    by_response = "seq-mean-token-mean (responses do)"
    if average == "token-mean" and chosen:
        yield Refusal(
            f"{_ACTOR}.loss_agg_mode=token-mean with {CONFIG_PATH}.sorting.harvest=shortest: each update is divided by "
            "its own tokens, and an update has what is finished first: a token of a short response weighs more than in "
            "a batch as it was loaded",
            f"leave it (verl's default), or set {by_horizon}, {by_response}, or {CONFIG_PATH}.sorting.harvest=loaded",
        )
    if average == "token-mean" and several and sorting.order:
        yield Refusal(
            f"{_ACTOR}.loss_agg_mode=token-mean with {CONFIG_PATH}.sorting.order={sorting.order:g} and mini-batches of "
            f"{mini_batch} of {batch} prompts: each of them is divided by its own tokens, and they differ in length",
            f"drop sorting.order, set {_ACTOR}.ppo_mini_batch_size={batch}, {by_horizon} or {by_response}",
        )
    fixed = OmegaConf.select(config, f"{_ACTOR}.loss_scale_factor") is not None
    if average == "seq-mean-token-sum-norm" and not fixed and (chosen or sorting.order):
        yield Refusal(
            f"{_ACTOR}.loss_agg_mode=seq-mean-token-sum-norm without {_ACTOR}.loss_scale_factor: each micro-batch is "
            "divided by its longest response, and sorted ones differ in that",
            f"set {horizon}",
        )


def _chosen_by_length(rhyme: RhymeConfig, trainer_mode: str) -> bool:
    """An update has the shortest of several that are loaded."""
    try:
        found = rules.of_options(rhyme.sorting, apart=TOPOLOGIES.get(trainer_mode) == "separate")
    except ValueError:  # options that exclude each other: combinations.py tells it
        return False
    return found.harvest == "shortest" and found.load_batches(None) > 1
