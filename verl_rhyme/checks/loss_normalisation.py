"""Where the order of training changes what verl's loss is divided by: told at the start, and by the preflight.

verl averages an optimizer step's loss in one of several ways (``actor.loss_agg_mode``; ``agg_loss`` in its
``trainer/ppo/core_algos.py``). What is divided by the tokens that are in the step, or by its longest response, depends
on what else is in it. A batch as it was loaded has a mixture of lengths, and that hardly matters; sorted, the steps
differ by their lengths, so that a token's weight does (docs/pipeline.md, "The order and the gradient"). Divided by the
number of responses, which verl takes from the config, it has the same weight in any company.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import OmegaConf

from verl_rhyme.checks.combinations import Refusal
from verl_rhyme.config import CONFIG_PATH, RhymeConfig
from verl_rhyme.scheduling.rules import of_config

_ACTOR = "actor_rollout_ref.actor"


def contradictions(config: Any, rhyme: RhymeConfig | None) -> Iterator[Refusal]:
    """What weighs responses by the company in which they are trained, and what to set instead. None of it is refused:
    ``token-mean`` is verl's default.

    Args:
        config: verl's whole config; ``data``, ``trainer.v1`` and the actor's are read.
        rhyme: Our tree in it; ``None`` without rhyme.

    Raises:
        ValueError: Options exclude each other (:func:`~verl_rhyme.scheduling.rules.of_config`).
    """
    rules = of_config(config, rhyme)
    if rules is None or rules.take != "finished" or rules.batches <= 1:  # updates as they were loaded
        return
    average = OmegaConf.select(config, f"{_ACTOR}.loss_agg_mode")
    horizon = f"{_ACTOR}.loss_scale_factor={OmegaConf.select(config, 'data.max_response_length')}"
    if average == "token-mean":
        yield Refusal(
            f"{_ACTOR}.loss_agg_mode=token-mean with {CONFIG_PATH}.scheduling.take=finished: tokens of short responses "
            "weigh more, since updates of short ones are divided by fewer tokens",
            f"set {_ACTOR}.loss_agg_mode=seq-mean-token-sum-norm and {horizon}: tokens then weigh the same",
        )
    if average == "seq-mean-token-sum-norm" and OmegaConf.select(config, f"{_ACTOR}.loss_scale_factor") is None:
        yield Refusal(
            f"{_ACTOR}.loss_agg_mode=seq-mean-token-sum-norm without {_ACTOR}.loss_scale_factor: each micro-batch is "
            "divided by its longest response, and sorted ones differ in that",
            f"set {horizon}",
        )
