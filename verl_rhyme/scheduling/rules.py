"""The pipeline's rules: how many batches are in flight, how stale a trained token may be, and the papers' variants.

Every schedule is a value of :class:`Rules`; presets are settings of it (:mod:`verl_rhyme.config.presets`). Scheduler,
coordinator and workers ask the rules and know no preset.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from omegaconf import OmegaConf

from verl_rhyme.config import TOPOLOGIES, RhymeConfig, SchedulingConfig, trained_unit

#: What is trained together: all samples of a prompt in one batch (GRPO, RLOO, DAPO), or each as it comes (PPO,
#: REINFORCE++).
Unit = Literal["group", "trajectory"]

#: What an update batch is taken from: groups as they finish, or the prompts that were loaded first, all of which it
#: waits for.
Take = Literal["finished", "loaded"]

#: When prompts are loaded: whenever fewer batches are in flight than may be, or when all that were loaded are trained
#: (SortedRL, arXiv:2603.23414, section 3).
Refill = Literal["always", "when_empty"]

#: What happens to a running response at a new version. ``continue``: it is interrupted and goes on where it stood.
#: ``finish``: its replica takes the version when it has finished. ``regenerate``: it is interrupted and generated
#: again, its text at most a draft.
AtVersion = Literal["continue", "finish", "regenerate"]

#: On-policy, where nothing is set. Batches that are loaded together, as SortedRL does, where what is interrupted drafts
#: from its own text with its own noise, so that generating it again costs little and its length stays.
LOADED_BATCHES = 3.0
#: Elsewhere tail batching (RollPacker, NSDI'26): batches in flight, and the share of prompts put off.
TAIL_BATCHES, TAIL_SHARE = 1.125, 0.25

#: Seconds for which stopped engines wait for samples that are busy elsewhere (a tool, a judge), and an update batch for
#: its rewards.
STOP_WAIT_S = 30.0


@dataclass(frozen=True)
class Rules:
    """What the scheduler goes by.

    Attributes:
        batch_prompts: Prompts of an update batch.
        batch_samples: Trajectories of an update batch.
        max_staleness: Policy versions between a trained token and the policy it trains, at most (k); 0 is on-policy.
        in_flight: Update batches in flight at most; may be a fraction. ``None``: see :attr:`batches`.
        put_off: On-policy: share of prompts, those expected longest, that wait for a round of their own.
        unit: See :data:`Unit`.
        take: See :data:`Take`.
        refill: See :data:`Refill`. Prompts that were dropped are replaced at all times.
        at_version: See :data:`AtVersion`; ``None``: see :attr:`version_rule`.
        start_early: Prompts also start between the collection of a batch and its policy, as in verl's separate_async
            (simulated only: verl's own trainer runs it).
        separate: Engines have devices of their own, and run while the actor trains.
        relayed: Replicas take a new version each for itself, by the relay of weights.
        drafts: Text that is generated again is drafted from.

    Raises:
        ValueError: Rules that contradict each other; the message says how to mend them.
    """

    batch_prompts: int
    batch_samples: int
    max_staleness: int = 1
    in_flight: float | None = None
    put_off: float = 0.0
    unit: Unit = "group"
    take: Take = "finished"
    refill: Refill = "always"
    at_version: AtVersion | None = None
    start_early: bool = False
    separate: bool = False
    relayed: bool = False
    drafts: bool = True

    def __post_init__(self) -> None:
        if self.batch_prompts < 1 or self.batch_samples < self.batch_prompts:
            raise ValueError(f"an update batch needs prompts, and a sample of each: {self}")
        for name, kind in (("unit", Unit), ("take", Take), ("refill", Refill)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}, not {getattr(self, name)!r}")
        if self.at_version not in (None, *get_args(AtVersion)):
            raise ValueError(f"at_version must be null, {', '.join(get_args(AtVersion))}, not {self.at_version!r}")
        if self.max_staleness < 0:
            raise ValueError(f"max_staleness must be at least 0 (versions), not {self.max_staleness}")
        if self.in_flight is not None and not 1 <= self.in_flight < math.inf:
            raise ValueError(f"in_flight must be null, or at least 1 (update batches), not {self.in_flight}")
        if not 0 <= self.put_off < 1:
            raise ValueError(f"put_off must be at least 0 and below 1 (a share of prompts), not {self.put_off}")
        on_policy = self.max_staleness == 0
        if on_policy and self.at_version in ("continue", "finish"):
            raise ValueError(
                f"at_version={self.at_version} trains tokens of earlier policies: set max_staleness to at least 1, or "
                "leave at_version out"
            )
        if on_policy and self.start_early:
            raise ValueError("start_early=true trains tokens of earlier policies: set max_staleness to at least 1")
        if on_policy and self.take == "loaded" and self.batches > 1:
            raise ValueError(
                f"in_flight={self.in_flight} with take=loaded and max_staleness=0: what starts ahead could not be "
                "trained; set take=finished, or max_staleness to at least 1"
            )
        if not on_policy and self.refill == "always" and self.batches > self.max_staleness + 1:
            raise ValueError(
                f"in_flight={self.in_flight} with max_staleness={self.max_staleness}: what starts so far ahead could "
                f"not be trained in time; set in_flight to at most {self.max_staleness + 1}, or raise max_staleness"
            )
        if self.put_off and not self.rounds:
            raise ValueError(
                f"put_off={self.put_off} is for max_staleness=0 with refill=always and take=finished: elsewhere long "
                "responses run on while others are trained; set put_off=0"
            )
        if self.at_version == "finish" and not (self.separate and self.relayed):
            raise ValueError(
                "at_version=finish needs replicas that take versions one by one: set trainer_mode=separate_async and "
                "checkpoint_engine.backend=relay, or leave at_version out"
            )

    @property
    def batches(self) -> float:
        """Update batches in flight at most (n).

        ``in_flight``, or what the bound lets be in flight where batches are taken as they were loaded, as published;
        else 1 on-policy (with ``put_off`` :data:`TAIL_BATCHES`), and ``1 + k / 2``, at least 2: a trained group is
        ``n - 1`` versions old on average (Little's law).
        """
        if self.in_flight is not None:
            return self.in_flight
        if self.take == "loaded":
            return self.max_staleness + 1
        if self.max_staleness == 0:
            return TAIL_BATCHES if self.put_off else 1
        return max(2, 1 + self.max_staleness / 2)

    @property
    def samples_in_flight(self) -> int:
        """Samples that may be started and not yet finished, at most."""
        return math.ceil(self.batches * self.batch_samples)

    @property
    def rounds(self) -> bool:
        """Tail batching: on-policy, more prompts start than an update trains, and those that an update passed by wait
        for a round of their own."""
        return (
            self.max_staleness == 0
            and self.refill == "always"
            and self.take == "finished"
            and (self.batches > 1 or self.put_off > 0)
        )

    @property
    def version_rule(self) -> AtVersion:
        """``at_version``, or what ``None`` stands for."""
        if self.at_version is not None:
            return self.at_version
        if self.max_staleness > 0:
            return "continue"
        return "finish" if self.separate and self.batches <= 1 else "regenerate"  # nothing runs then

    @property
    def summary(self) -> str:
        """The rules in one line."""
        return (
            f"max_staleness {self.max_staleness}, in_flight {self.batches:g}, put_off {self.put_off:g}, "
            f"take {self.take}, refill {self.refill}, at_version {self.version_rule}, unit {self.unit}"
        )

    @property
    def finishes(self) -> bool:
        """What runs is not interrupted at a new version."""
        return self.version_rule == "finish"

    @property
    def continues(self) -> bool:
        """What was interrupted, by a new version or otherwise, goes on where it stood."""
        return self.version_rule != "regenerate"

    @property
    def redrafts(self) -> bool:
        """What was interrupted is generated again, with its own text as draft."""
        return self.drafts and not self.continues

    @property
    def stops(self) -> bool:
        """Engines stop when a batch is collected: what runs finishes, or is given up, before the batch is taken."""
        return not self.separate or (self.max_staleness == 0 and not self.finishes)

    @property
    def spans_versions(self) -> bool:
        """What runs may have tokens of earlier policies that will be trained: its staleness is known before it ends."""
        return self.finishes or (self.separate and self.continues)

    @property
    def starts_through_training(self) -> bool:
        """Samples run also while the actor trains."""
        return self.separate and self.max_staleness > 0

    @property
    def one_by_one(self) -> bool:
        """Replicas take a new version each for itself: some serve an older one for a while, and what needs the new one
        waits there."""
        return self.separate and self.relayed and not self.stops


def of_options(
    options: SchedulingConfig,
    max_staleness: int,
    *,
    separate: bool,
    batch_prompts: int = 1,
    samples: int = 1,
    unit: Unit = "group",
    relayed: bool = False,
    drafts: bool = True,
    coupled: bool = True,
) -> Rules:
    """The rules that a run's options stand for.

    Args:
        options: Experts' options of scheduling.
        max_staleness: The bound, in policy versions.
        separate: Engines have devices of their own.
        batch_prompts: Prompts of an update batch.
        samples: Samples of a prompt.
        unit: What ``options.unit`` comes to.
        relayed: Weights go by the relay.
        drafts: Drafting is on, also from a response's own text.
        coupled: So is coupled sampling, at ``max_staleness=0``: else interrupting many shortens what is trained.

    Raises:
        ValueError: The rules contradict each other.
    """
    in_flight, put_off, refill = options.in_flight, options.put_off, options.refill
    if max_staleness == 0 and options.take == "finished":
        if drafts and coupled and not put_off:
            whole = (in_flight or LOADED_BATCHES) % 1 == 0  # a load is whole updates
            refill = refill or ("when_empty" if whole else "always")
            if in_flight is None and refill == "when_empty":
                in_flight = LOADED_BATCHES
        elif (in_flight, put_off, refill) == (None, None, None):
            put_off = TAIL_SHARE
    return Rules(
        batch_prompts=batch_prompts,
        batch_samples=batch_prompts * samples,
        max_staleness=max_staleness,
        in_flight=in_flight,
        put_off=put_off or 0.0,
        unit=unit,
        take=options.take,
        refill=refill or "always",
        at_version=options.at_version,
        separate=separate,
        relayed=separate and relayed,
        drafts=drafts,
    )


def of_config(config: Any, rhyme: RhymeConfig | None) -> Rules | None:
    """The rules that a run's config stands for; ``None`` without a ``max_staleness``.

    Args:
        config: verl's whole config (a ``DictConfig``); what of it is missing is as :func:`of_options` has it.
        rhyme: Our tree in it; ``None`` without rhyme.

    Raises:
        ValueError: See :func:`of_options`.
    """
    if rhyme is None or rhyme.max_staleness is None:
        return None
    rollout = "actor_rollout_ref.rollout"
    return of_options(
        rhyme.scheduling,
        rhyme.max_staleness,
        separate=TOPOLOGIES.get(str(OmegaConf.select(config, "trainer.v1.trainer_mode"))) == "separate",
        batch_prompts=int(OmegaConf.select(config, "data.train_batch_size") or 1),
        samples=int(OmegaConf.select(config, f"{rollout}.n") or 1),
        unit=trained_unit(rhyme.scheduling.unit, str(OmegaConf.select(config, "algorithm.adv_estimator"))),
        relayed=OmegaConf.select(config, f"{rollout}.checkpoint_engine.backend") == "relay",
        drafts=rhyme.drafting.enable and rhyme.drafting.policy == "adaptive",
        coupled=rhyme.coupled,
    )
