"""The rules of a rollout: what is loaded, when a batch is harvested, what becomes of what runs, how stale it gets.

A mode is a name for a set of rules (:data:`MODES`). Scheduler, coordinator and workers ask the rules and know no mode.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from omegaconf import OmegaConf

from verl_rhyme.config import TOPOLOGIES, RhymeConfig, SortingConfig, sorting_unit

#: What becomes of a running response at a version change. ``regenerate``: it is cut short and generated anew, its text
#: at most a draft. ``continue``: it is cut short and goes on where it stood. ``keep_running``: it is not cut short.
OnInterrupt = Literal["regenerate", "continue", "keep_running"]

#: What is trained together: all samples of a prompt in one batch (GRPO, RLOO, DAPO), or each as it comes (PPO,
#: REINFORCE++).
Unit = Literal["group", "trajectory"]

#: Which prompts of a load are started first: as they were loaded, or by the length that is expected of them.
StartOrder = Literal["load", "longest", "shortest"]

#: When prompts are loaded: some update batches together, and no others before all of these are trained (``group``); or
#: as many as may be begun, always (``rolling``); or so many update batches, always (``refill``): SortedRL without its
#: loading rule, for comparison. What is short goes before what is long again and again, until no prompts are left.
Load = Literal["group", "rolling", "refill"]

#: What an update batch is taken from: the shortest groups that are there, or the prompts that were loaded first, all of
#: which it waits for.
HarvestOrder = Literal["shortest", "loaded"]

#: What ``sorting.mode`` stands for.
MODES: dict[str, dict[str, Any]] = {
    "on_policy": {"on_interrupt": "regenerate", "max_staleness": 0},
    "partial": {"on_interrupt": "continue"},
    "histopipe": {"harvest": "loaded"},
    "stream": {},
}
#: What an update batch is taken from where nothing is said.
_HARVEST: dict[str, HarvestOrder] = {"stream": "loaded"}
#: What ``histopipe`` is beside that, by ``through_training``: of engines apart from the actor each begins its share of
#: the next step when its share of this one is done (RhymeRL, arXiv:2508.18588); else a step is strictly synchronous.
_HISTOPIPE: dict[bool, dict[str, Any]] = {
    True: {"on_interrupt": "continue", "max_staleness": 1, "load": "rolling"},
    False: {"on_interrupt": "regenerate", "max_staleness": 0, "load": "group", "group_batches": 1},
}
#: What ``stream`` is beside that, by whether tokens of earlier policies are trained (StreamRL, arXiv:2504.15930):
#: if not, nothing runs when the policy changes; if so, prompts are loaded as others leave.
_STREAM: dict[bool, dict[str, Any]] = {
    False: {"on_interrupt": "keep_running", "load": "group", "group_batches": 1},
    True: {"on_interrupt": "continue", "load": "rolling"},
}


@dataclass(frozen=True)
class Rules:
    """What the scheduler goes by.

    Attributes:
        batch_prompts: Prompts of an update batch.
        batch_samples: Trajectories of an update batch.
        group_batches: ``load="group"``: update batches of prompts that are loaded together; ``"refill"``: that are
            here at all times.
        on_interrupt: See :data:`OnInterrupt`.
        max_staleness: Policy versions between a trained token and the policy it trains, at most; 0 is on-policy.
        unit: See :data:`Unit`.
        start_order: See :data:`StartOrder`.
        probe: One sample of a prompt runs first, and the others start when it has come to its end: its length tells
            theirs.
        load: See :data:`Load`. Prompts that were dropped are replaced at all times.
        harvest: See :data:`HarvestOrder`.
        harvest_tokens: Harvest also when so many tokens are finished, though the batch is not full; ``None``: never.
        redraft: ``regenerate``: the text of what was cut short becomes the draft.
        stop_wait: Seconds for which stopped engines wait at most for attempts that are busy elsewhere, and for the
            update batch's rewards.
        through_training: Engines run on between a harvest and the next version of the policy, whose weights cut short
            what runs (``regenerate``, ``continue``).
        one_by_one: Replicas take the weights of a new version each for itself: some serve an older one for a while, and
            what needs the new one waits there.
        draft_ahead: On-policy and ``through_training``: samples start while the actor trains, too. What they say
            before the new version is at most a draft of what is generated under it, and counts as wasted.

    Raises:
        ValueError: Rules that contradict each other; the message says how to mend them.
    """

    batch_prompts: int
    batch_samples: int
    group_batches: int = 4
    on_interrupt: OnInterrupt = "regenerate"
    max_staleness: int = 0
    unit: Unit = "group"
    start_order: StartOrder = "load"
    probe: bool = False
    load: Load = "group"
    harvest: HarvestOrder = "shortest"
    harvest_tokens: int | None = None
    redraft: bool = True
    stop_wait: float = 30.0
    through_training: bool = False
    one_by_one: bool = False
    draft_ahead: bool = False

    def __post_init__(self) -> None:
        if self.batch_prompts < 1 or self.batch_samples < self.batch_prompts or self.group_batches < 1:
            raise ValueError(f"an update batch needs prompts, a sample of each, and a load at least one batch: {self}")
        for name, kind in (
            ("load", Load),
            ("harvest", HarvestOrder),
            ("on_interrupt", OnInterrupt),
            ("unit", Unit),
            ("start_order", StartOrder),
        ):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}, not {getattr(self, name)!r}")
        if self.max_staleness < 0:
            raise ValueError(f"max_staleness must be at least 0, not {self.max_staleness}")
        if self.max_staleness == 0 and self.on_interrupt == "continue":
            raise ValueError(
                "on_interrupt=continue trains tokens of earlier policies: max_staleness must be at least 1, or "
                "on_interrupt=regenerate"
            )
        if self.max_staleness == 0 and self.runs_on and (self.group_batches > 1 or self.harvest_tokens is not None):
            raise ValueError(
                "on_interrupt=keep_running with max_staleness=0 needs that nothing runs when the version changes: "
                "group_batches=1 and harvest_tokens=null (all that is loaded is trained at once), or max_staleness at "
                "least 1, or on_interrupt=regenerate"
            )
        if self.harvest == "loaded" and self.harvest_tokens is not None:
            raise ValueError(
                "harvest=loaded trains whole batches as they were loaded: set harvest_tokens=null, or harvest=shortest"
            )
        if self.draft_ahead:
            self._check_draft_ahead()

    def _check_draft_ahead(self) -> None:
        if not self.through_training:
            raise ValueError(
                "draft_ahead=true needs engines that run while the actor trains (through_training: engines apart from "
                "the actor); or set draft_ahead=false"
            )
        if self.max_staleness > 0:
            raise ValueError(
                f"draft_ahead=true with max_staleness={self.max_staleness}: what is generated while the actor trains "
                "is trained itself then, not only drafted from; set draft_ahead=false, or max_staleness=0 with "
                "on_interrupt=regenerate"
            )
        if self.on_interrupt != "regenerate":
            raise ValueError(
                f"draft_ahead=true with on_interrupt={self.on_interrupt} and max_staleness=0: what starts while the "
                "actor trains has to be generated anew; set on_interrupt=regenerate, or draft_ahead=false"
            )

    def load_batches(self, batches_left: int | None) -> int:
        """Update batches of prompts that are here, or on their way, at a time; no more than there are left to train."""
        batches = self.max_staleness + 1 if self.load == "rolling" else self.group_batches
        return max(0, batches if batches_left is None else min(batches, batches_left))

    @property
    def queue_entries(self) -> int:
        """Entries that a run has in TransferQueue at a time, at most: of each sample one, of each that is regenerated
        also the response that it is drafted from; of each prompt one; those of the batch that is trained meanwhile. A
        tenth more, for its storage units do not get equal shares. An agent loop that gives several trajectories a
        sample has more.
        """
        batches = self.load_batches(None) + 1
        samples = self.batch_samples * (2 if self.on_interrupt == "regenerate" and self.redraft else 1)
        return math.ceil(1.1 * batches * (samples + self.batch_prompts))

    @property
    def stops(self) -> bool:
        """Engines are stopped at a harvest: what runs ends, or is given up, before the batch is taken."""
        return not (self.through_training or self.runs_on)

    @property
    def spans_versions(self) -> bool:
        """What runs may have tokens of earlier policies that will be trained: its age is known before it ends."""
        return self.runs_on or (self.through_training and self.continues)

    @property
    def starts_through_training(self) -> bool:
        """Samples start and run at all times, also between a harvest and the next version."""
        if self.max_staleness == 0:  # what would start then could not be trained
            return self.through_training and self.draft_ahead
        return self.runs_on or self.through_training

    @property
    def continues(self) -> bool:
        """What was cut short, by a version change or otherwise, goes on where it stood."""
        return self.on_interrupt != "regenerate"

    @property
    def runs_on(self) -> bool:
        """What runs is not cut short at a version change: engines are not stopped for it."""
        return self.on_interrupt == "keep_running"


def named(mode: str, **rules: Any) -> Rules:
    """A set of rules by its name, with ``rules`` for all that the set leaves open.

    Raises:
        ValueError: There is no such set, or the rules contradict each other.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
    fixed = MODES[mode]
    rules["harvest"] = rules.get("harvest") or _HARVEST.get(mode, "shortest")
    if mode == "histopipe":
        fixed = {**fixed, **_HISTOPIPE[bool(rules.get("through_training"))]}
    if mode == "stream":
        fixed = {**fixed, **_STREAM[rules.get("max_staleness", 0) > 0]}
    return Rules(**{**rules, **fixed})


def of_options(
    options: SortingConfig,
    *,
    apart: bool,
    batch_prompts: int = 1,
    samples: int = 1,
    unit: str = "group",
    relayed: bool = False,
    drafts: bool = True,
) -> Rules:
    """The rules that a run's options stand for; an option has the name of its rule.

    Args:
        options: With a ``mode``.
        apart: Engines have devices of their own, and may run while the actor trains.
        batch_prompts: Of an update batch.
        samples: Of a prompt.
        unit: What ``options.unit`` comes to.
        relayed: Weights go by the relay, from which a replica may take a new version when it will.
        drafts: Drafting is on.

    Raises:
        ValueError: See :func:`named`.
    """
    shared = {of.name for of in fields(Rules)} & {of.name for of in fields(SortingConfig)}
    given = {name: getattr(options, name) for name in shared}
    given |= {"unit": unit, "redraft": options.redraft and drafts, "draft_ahead": options.draft_ahead and apart}
    given |= {"batch_prompts": batch_prompts, "batch_samples": batch_prompts * samples, "through_training": apart}
    found = named(str(options.mode), **given)
    if apart and relayed and (found.max_staleness > 0 or found.runs_on):
        on_interrupt: OnInterrupt = "keep_running" if options.keep_running else found.on_interrupt
        found = replace(found, one_by_one=True, on_interrupt=on_interrupt)
    return found


def of_config(config: Any, rhyme: RhymeConfig | None) -> Rules | None:
    """The rules that a run's config stands for; ``None`` without a ``sorting.mode``.

    Args:
        config: verl's whole config (a ``DictConfig``); what of it is missing is as :func:`of_options` has it.
        rhyme: Our tree in it; ``None`` without rhyme.

    Raises:
        ValueError: See :func:`named`.
    """
    if rhyme is None or rhyme.sorting.mode is None:
        return None
    rollout = "actor_rollout_ref.rollout"
    return of_options(
        rhyme.sorting,
        apart=TOPOLOGIES.get(str(OmegaConf.select(config, "trainer.v1.trainer_mode"))) == "separate",
        batch_prompts=int(OmegaConf.select(config, "data.train_batch_size") or 1),
        samples=int(OmegaConf.select(config, f"{rollout}.n") or 1),
        unit=sorting_unit(rhyme.sorting.unit, str(OmegaConf.select(config, "algorithm.adv_estimator"))),
        relayed=OmegaConf.select(config, f"{rollout}.checkpoint_engine.backend") == "relay",
        drafts=rhyme.drafting.enable,
    )
