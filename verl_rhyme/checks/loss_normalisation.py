"""Warn of loss averages under which sorting by length changes the weight of a token.

verl averages the loss of an optimizer step in one of several ways (``actor.loss_agg_mode``; ``agg_loss`` in its
``trainer/ppo/core_algos.py``). Some divide by the tokens of the step or by its longest response, so that the weight of
a token depends on the other responses of the step. That hardly matters for batches of mixed lengths. Sorted batches
differ in length, and so do the weights of their tokens (docs/pipeline.md, "The order and the gradient"). An average
over the number of responses, which verl takes from the config, gives a token the same weight in every step.
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
    """Yield loss averages that depend on the order of training, with remedies. They only warn: ``token-mean`` is verl's
    default.

    Args:
        config: verl's whole config; the sections ``data``, ``trainer.v1`` and the actor's are read.
        rhyme: Rhyme tree of the config; ``None`` without rhyme.

    Raises:
        ValueError: Options exclude each other (:func:`~verl_rhyme.scheduling.rules.of_config`).
    """
    rules = of_config(config, rhyme)
    if rules is None or rules.take != "finished" or rules.batches <= 1:  # batches are trained as they were loaded
        return
    average = OmegaConf.select(config, f"{_ACTOR}.loss_agg_mode")
    horizon = f"{_ACTOR}.loss_scale_factor={OmegaConf.select(config, 'data.max_response_length')}"
    if average == "token-mean":
        yield Refusal(
            f"{_ACTOR}.loss_agg_mode=token-mean with {CONFIG_PATH}.scheduling.take=finished: tokens of short responses "
            "weigh more, since the loss of a batch of short responses is divided by fewer tokens",
            f"set {_ACTOR}.loss_agg_mode=seq-mean-token-sum-norm and {horizon}: all tokens then weigh the same",
        )
    if average == "seq-mean-token-sum-norm" and OmegaConf.select(config, f"{_ACTOR}.loss_scale_factor") is None:
        yield Refusal(
            f"{_ACTOR}.loss_agg_mode=seq-mean-token-sum-norm without {_ACTOR}.loss_scale_factor: the loss of each "
            "micro-batch is divided by its longest response, which varies between sorted micro-batches",
            f"set {horizon}",
        )
