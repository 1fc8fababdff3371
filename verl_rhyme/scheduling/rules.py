"""The pipeline's rules: the number of batches in flight, the staleness bound, and the variants of the papers.

Every schedule is a value of :class:`Rules`; presets are settings of it (:mod:`verl_rhyme.config.presets`). Scheduler,
coordinator and workers read the rules and know no preset.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from verl_rhyme.config import SchedulingConfig

#: Unit of training: all samples of a prompt in one batch (GRPO, RLOO, DAPO), or single trajectories (PPO, REINFORCE++).
Unit = Literal["group", "trajectory"]

#: Source of an update batch: groups as they finish, or the prompts that were loaded first. The batch waits for all of
#: the latter.
Take = Literal["finished", "loaded"]

#: When prompts are loaded: whenever more batches may be in flight, or when all loaded prompts are trained (SortedRL,
#: arXiv:2603.23414, section 3).
Refill = Literal["always", "when_empty"]

#: Treatment of a running response at a new version. ``continue``: its request is aborted and continues from its tokens.
#: ``finish``: its replica takes the version after it has finished. ``regenerate``: it is interrupted and regenerated,
#: with its text at most as a draft; so is, if this is set, a sample that fails under one version.
AtVersion = Literal["continue", "finish", "regenerate"]

#: On-policy default: batches that are loaded together, as in SortedRL. What is interrupted is regenerated with the same
#: noise (:mod:`verl_rhyme.sampling.noise`), so that it keeps its length.
LOADED_BATCHES = 3.0
#: Tail batching (RollPacker, NSDI'26): batches in flight.
TAIL_BATCHES = 1.125

#: Share of a sample's life in tools from which three versions of slack gain at one version's mean staleness
#: (``python -m benchmarks.agents``).
SLOW_TOOLS = 0.4

#: Seconds for which an update batch waits for rewards, and on-policy for the ends of samples that are busy elsewhere (a
#: tool).
STOP_WAIT_S = 30.0


@dataclass(frozen=True)
class Rules:
    """The scheduler's rules; :class:`SchedulingConfig` has checked the range of each option.

    Raises ValueError on contradictory rules; the message names the fix.
    """

    batch_prompts: int  # prompts of an update batch
    batch_samples: int  # trajectories of an update batch
    max_staleness: int = 1  # k: most policy versions between a trained token and the policy it trains; 0 is on-policy
    in_flight: float | None = None  # most update batches in flight; may be a fraction; None: see batches
    put_off: float = 0.0  # on-policy: share of prompts, the longest expected ones, that wait for a separate round
    unit: Unit = "group"
    take: Take = "finished"
    refill: Refill = "always"  # dropped prompts are replaced at all times
    at_version: AtVersion | None = None  # None: see version_rule
    #: Prompts also start between the collection of a batch and its policy, as in verl's separate_async (simulated only:
    #: verl's trainer runs it).
    start_early: bool = False
    separate: bool = False  # engines have separate devices and run while the actor trains
    relayed: bool = False  # each replica takes a new version by itself, through the relay of weights
    drafts: bool = True  # regenerated responses draft from their earlier text

    def __post_init__(self) -> None:
        if self.batch_prompts < 1 or self.batch_samples < self.batch_prompts:
            raise ValueError(f"an update batch needs at least one prompt, and one sample of each prompt: {self}")
        if self.in_flight == math.inf:
            raise ValueError("in_flight=inf: set a finite number of update batches, or null")
        on_policy = self.max_staleness == 0
        if on_policy and self.at_version in ("continue", "finish"):
            raise ValueError(
                f"at_version={self.at_version} trains tokens of earlier policies: set max_staleness to at least 1, or "
                "omit at_version"
            )
        if on_policy and self.start_early:
            raise ValueError("start_early=true trains tokens of earlier policies: set max_staleness to at least 1")
        if on_policy and self.take == "loaded" and self.batches > 1:
            raise ValueError(
                f"in_flight={self.in_flight} with take=loaded and max_staleness=0: samples of later batches would be "
                "too stale to train; set take=finished, or max_staleness to at least 1"
            )
        if not on_policy and self.refill == "always" and self.batches > self.max_staleness + 1:
            raise ValueError(
                f"in_flight={self.in_flight} with max_staleness={self.max_staleness}: samples of the last batches "
                f"would be too stale to train; set in_flight to at most {self.max_staleness + 1}, or raise "
                "max_staleness"
            )
        if self.put_off and not self.rounds:
            raise ValueError(
                f"put_off={self.put_off} requires max_staleness=0, refill=always and take=finished: otherwise long "
                "responses already run on while others are trained; set put_off=0"
            )
        if self.at_version == "finish" and not (self.separate and self.relayed):
            raise ValueError(
                "at_version=finish needs replicas that take versions one by one: set trainer_mode=separate_async and "
                "checkpoint_engine.backend=relay, or omit at_version"
            )

    @property
    def batches(self) -> float:
        """Most update batches in flight (n).

        It is ``in_flight`` if set. With ``take=loaded`` it is what the bound allows, as published. Otherwise it is 1
        on-policy (with ``put_off`` :data:`TAIL_BATCHES`), and else ``1 + k / 2``, at least 2. A trained group then has
        a mean staleness of ``n - 1`` versions (Little's law).
        """
        if self.in_flight is not None:
            return self.in_flight
        if self.take == "loaded":
            return self.max_staleness + 1
        if self.max_staleness == 0:
            return TAIL_BATCHES if self.put_off else 1
        return max(2, 1 + self.max_staleness / 2)

    @property
    def batch_size(self) -> int:
        """Size of an update batch in units: prompts or trajectories."""
        return self.batch_prompts if self.unit == "group" else self.batch_samples

    @property
    def samples_in_flight(self) -> int:
        """Most samples that may be started and unfinished."""
        return math.ceil(self.batches * self.batch_samples)

    @property
    def rounds(self) -> bool:
        """Tail batching: on-policy, more prompts start than a batch trains; those left out wait for their own round."""
        return (
            self.max_staleness == 0
            and self.refill == "always"
            and self.take == "finished"
            and (self.batches > 1 or self.put_off > 0)
        )

    @property
    def version_rule(self) -> AtVersion:
        if self.at_version is not None:
            return self.at_version
        if self.max_staleness > 0:
            return "continue"
        return "finish" if self.separate and self.batches <= 1 else "regenerate"  # no sample runs at a new version then

    def wants_slack(self, away: float) -> bool:
        """Whether ``max_staleness=3`` with two batches in flight gains, where samples are in tools for such a share.

        Each step then waits less for the slowest chain of tools. Two batches in flight keep the mean staleness.
        """
        loaded = self.take == "loaded" or self.refill == "when_empty"
        return self.separate and self.max_staleness in (1, 2) and self.batches == 2 and not loaded and away > SLOW_TOOLS

    @property
    def summary(self) -> str:
        return (
            f"max_staleness {self.max_staleness}, in_flight {self.batches:g}, put_off {self.put_off:g}, "
            f"take {self.take}, refill {self.refill}, at_version {self.version_rule}, unit {self.unit}"
        )

    @property
    def finishes(self) -> bool:
        """Running samples are not interrupted at a new version."""
        return self.version_rule == "finish"

    @property
    def continues(self) -> bool:
        """A running sample continues from its tokens under a new policy; until then its staleness is tracked."""
        return self.version_rule != "regenerate"

    @property
    def keeps(self) -> bool:
        """The text of an ended attempt is continued while it may be trained (at k = 0 under one version)."""
        return self.continues or (self.max_staleness == 0 and self.at_version is None)

    @property
    def redrafts(self) -> bool:
        """An interrupted sample is regenerated with its earlier text as draft."""
        return self.drafts and not self.continues

    @property
    def stops(self) -> bool:
        """Engines stop when a batch is collected; running samples wait for their return, or end where they cannot
        continue."""
        return not self.separate or (self.max_staleness == 0 and not self.finishes)

    @property
    def starts_through_training(self) -> bool:
        return self.separate and self.max_staleness > 0

    @property
    def one_by_one(self) -> bool:
        """Each replica takes a new version by itself; a request that needs it waits at a replica with an older one."""
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
) -> Rules:
    """Return the rules of a run's options: ``samples`` of a prompt, the resolved ``unit``, weights ``relayed`` or not.

    Raises ValueError on contradictory rules.
    """
    in_flight, refill = options.in_flight, options.refill
    if max_staleness == 0 and options.take == "finished" and not options.put_off:
        whole = (in_flight or LOADED_BATCHES) % 1 == 0  # whole batches are loaded together
        refill = refill or ("when_empty" if whole else "always")
        if in_flight is None and refill == "when_empty":
            in_flight = LOADED_BATCHES
    return Rules(
        batch_prompts=batch_prompts,
        batch_samples=batch_prompts * samples,
        max_staleness=max_staleness,
        in_flight=in_flight,
        put_off=options.put_off,
        unit=unit,
        take=options.take,
        refill=refill or "always",
        at_version=options.at_version,
        separate=separate,
        relayed=separate and relayed,
        drafts=drafts,
    )
