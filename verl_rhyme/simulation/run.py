"""A run in virtual time: replicas, rollout, rewards, training and weight syncs.

The rollout is training's own (:class:`~verl_rhyme.scheduling.rollout.Rollout` with its rules, scheduler and ledger), as
are placement and the length predictor; what stands in is who carries their messages, the engines and the clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from verl_rhyme.observability.batches import Occupancy
from verl_rhyme.scheduling.attempts import Attempt, Ended, Start
from verl_rhyme.scheduling.cost import ReplicaCost, TrainingCost
from verl_rhyme.scheduling.expectations import Expectations
from verl_rhyme.scheduling.placement import Placement
from verl_rhyme.scheduling.placement import Request as Asked
from verl_rhyme.scheduling.rollout import Rollout
from verl_rhyme.scheduling.rules import Rules
from verl_rhyme.simulation.cluster import Cluster
from verl_rhyme.simulation.engine import Engine, Request, Segment
from verl_rhyme.simulation.workload import Prompt


@dataclass(frozen=True)
class Drafts:
    """What drafting does to a request, by the epochs that its prompt was seen in before.

    Attributes:
        acceptance: Tokens a step, for prompts seen 0, 1, ... times; the last one for more.
        overhead: Verified draft tokens for each token gained.
    """

    acceptance: tuple[float, ...] = (1.0,)
    overhead: float = 1.5

    def __post_init__(self) -> None:
        if not self.acceptance or min(self.acceptance) < 1 or self.overhead < 1:
            raise ValueError(f"acceptance lengths must be at least 1, as must the overhead, not {self}")

    def of(self, seen: int) -> tuple[float, float]:
        """Tokens a step, and draft tokens a step."""
        pace = self.acceptance[min(seen, len(self.acceptance) - 1)]
        return pace, (pace - 1) * self.overhead


@dataclass(frozen=True)
class Scenario:
    """A cluster and what it runs.

    Attributes:
        replicas: Their costs, one each.
        rules: The scheduler's.
        training: What an update costs.
        colocated: Engines stand still while the actor trains; else they have GPUs of their own.
        placement: Policy and options (:data:`~verl_rhyme.scheduling.placement.POLICIES`).
        drafts: What drafting gains.
        limit: Samples that are given to the engines at a time; ``None``: all that may start.
        forecasts: What placement and order go by. ``history``: what the predictor expects; ``oracle``: the lengths
            there will be; ``none``: nothing.
        response_limit: Tokens a response can have.
    """

    replicas: tuple[ReplicaCost, ...]
    rules: Rules
    training: TrainingCost = field(default_factory=TrainingCost)
    colocated: bool = True
    placement: str = "least_loaded"
    options: dict[str, Any] = field(default_factory=dict)
    drafts: Drafts = field(default_factory=Drafts)
    limit: int | None = None
    forecasts: Literal["history", "oracle", "none"] = "history"
    response_limit: int = 1 << 20

    @property
    def slots(self) -> int:
        """Q of the bubble ratio."""
        return sum(cost.slots for cost in self.replicas)


@dataclass(frozen=True)
class Step:
    """An update and the rollout before it.

    Attributes:
        version: The policy that it trains.
        began, harvested, ended: Seconds: the last update's end, the harvest, this one's end.
        tokens, samples: Trained.
        wasted: Tokens made and not to be trained.
        bubble: Bubble ratio, from the last harvest to this one with engines that run on, else of the rollout alone.
        staleness: The greatest of a trained token.
        lengths: What forecasts were worth (:meth:`~verl_rhyme.lengths.quality.Quality.take`).
    """

    version: int
    began: float
    harvested: float
    ended: float
    tokens: int
    samples: int
    wasted: int
    bubble: float
    staleness: int
    lengths: dict[str, float]

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def rollout(self) -> float:
        return self.harvested - self.began


@dataclass(slots=True)
class _Sample:
    """A sample under way: of which prompt, and the version and number of the tokens that it keeps."""

    prompt: Prompt
    replica: str = ""
    first_version: int | None = None
    kept: float = 0.0
    started: int = 0  # version of its replica when it started there


class Simulation:
    """See the module.

    Args:
        scenario: What runs.
        prompts: In the order of the loader; the run ends when no whole batch is left.
        updates: After which it ends; ``None``: when the prompts do.
        segments: Where stretches of requests in slots go, with the replica's name; ``None``: nowhere.

    Attributes:
        steps: Those that ended.
        cluster: Clock and engines.
        expectations: Of lengths.
    """

    def __init__(
        self,
        scenario: Scenario,
        prompts: Iterable[Prompt],
        updates: int | None = None,
        segments: list[tuple[str, Segment]] | None = None,
    ) -> None:
        self.scenario = scenario
        self.expectations = Expectations(scenario.response_limit)
        self.steps: list[Step] = []
        self.rollout = Rollout(scenario.rules)
        drawn = {"seed": 0} if scenario.placement == "least_loaded" else {}  # the same run each time
        self.placement = Placement(scenario.placement, {**drawn, **scenario.options})
        self._prompts: Iterator[Prompt] = iter(prompts)
        self._loaded: dict[str, Prompt] = {}
        self._left: dict[str, int] = {}  # samples of each prompt that have not ended
        self._under_way: dict[str, _Sample] = {}  # by attempt
        self._seen: dict[str, int] = {}
        self._updates = updates
        self._exhausted = self._training = self._stopped = False
        self._version = self._count_loaded = 0
        self._versions: dict[str, int] = {}
        engines: dict[str, Engine] = {}
        for i, cost in enumerate(scenario.replicas):
            name = f"replica-{i}"
            told = None if segments is None else (lambda segment, name=name: segments.append((name, segment)))
            engines[name] = Engine(cost, told)
            self._versions[name] = 0
            self.placement.add(name)
            if math.isfinite(cost.room):
                self.placement.report(name, int(cost.room))
        self._occupancy = Occupancy(scenario.slots, 0.0)
        self.cluster = Cluster(engines, self._generated, self._occupancy.at)
        self._began = 0.0

    def run(self, told: Callable[[Step], object] = lambda step: None) -> list[Step]:
        """All of it; ``told`` is called with each step that ended.

        Raises:
            RuntimeError: It stands still though updates are left: a rule waits for what never comes.
        """
        self._told = told
        self._publish()
        self.cluster.run(lambda: self._ended)
        if not self._ended:
            running = self.rollout.scheduler.running
            raise RuntimeError(f"it stands still at {self.cluster.now:.1f} s with {running} samples under way")
        return self.steps

    # ---- prompts and starts ----

    @property
    def _ended(self) -> bool:
        if self._updates is not None and len(self.steps) >= self._updates:
            return True
        return self._exhausted and not self._training and not len(self.rollout.scheduler.ledger)

    def _batches_left(self) -> int | None:
        return None if self._updates is None else self._updates - self._version

    def _hand(self) -> None:
        while (wanted := self.rollout.wanted()) and not self._exhausted:
            handed = []
            for prompt in self._prompts:
                uid = str(self._count_loaded)
                self._count_loaded += 1
                self._loaded[uid] = prompt
                self._left[uid] = len(prompt.lengths)
                handed.append((uid, len(prompt.lengths)))
                if len(handed) == wanted:
                    break
            self._exhausted = len(handed) < wanted
            self.rollout.hand(handed)
            prompts = {uid: self._loaded[uid] for uid, _ in handed}
            expected = self.expectations.hand({uid: prompt.key for uid, prompt in prompts.items()})
            if self.scenario.forecasts == "oracle":
                expected = {uid: float(prompt.lengths.mean()) for uid, prompt in prompts.items()}
            if self.scenario.forecasts != "none":
                self.rollout.expect(expected)

    def _dispatch(self) -> None:
        if self._stopped:
            return
        self._hand()
        starts = self.rollout.fill(self.scenario.limit)
        if starts:
            self._start(starts)

    def _start(self, starts: list[Start]) -> None:
        self.placement.expect(len(starts))
        attempts = [Attempt.named(start.name) for start in starts]
        prompts = [self._loaded[attempt.uid] for attempt in attempts]
        predicted: list[float | None] = [None] * len(starts)
        if self.scenario.forecasts == "oracle":
            predicted = [float(p.lengths[a.number]) for p, a in zip(prompts, attempts, strict=True)]
        elif self.scenario.forecasts == "history":
            predicted = self.expectations.predictor.forecast([prompt.key for prompt in prompts]).mean().tolist()
        touched = set()
        for start, attempt, prompt, tokens in zip(starts, attempts, prompts, predicted, strict=True):
            before = self._under_way.pop(start.predecessor, None) if start.predecessor else None
            sample = _Sample(prompt)
            if start.partial and before is not None:
                sample.kept, sample.first_version = before.kept, before.first_version
            name = self._name(attempt)
            asked = Asked(
                id=name,
                key=prompt.key,
                sample=attempt.number,
                attempt=attempt.attempt,
                group=len(prompt.lengths),
                prompt_tokens=prompt.tokens,
                response_tokens=None if tokens is None else int(tokens),
            )
            sample.replica = replica = self.placement.acquire(asked)
            sample.started = self._versions[replica]
            self._under_way[start.name] = sample
            pace, drafts = self.scenario.drafts.of(self._seen.get(prompt.key, 0))
            length = int(prompt.lengths[attempt.number])
            self.cluster.engines[replica].submit(
                Request(
                    *(start.name, prompt.key, prompt.tokens, length, sample.kept, start.priority, pace, drafts),
                ),
                self.cluster.now,
            )
            touched.add(replica)
        for replica in touched:
            self.cluster.touch(replica)

    @staticmethod
    def _name(attempt: Attempt) -> str:
        return f"{attempt.uid}-{attempt.number}"

    # ---- ends ----

    def _generated(self, replica: str, request: Request) -> None:
        name = str(request.name)
        sample, attempt = self._under_way[name], Attempt.named(name)
        self.placement.release(self._name(attempt), replica)
        first = sample.started if sample.first_version is None else sample.first_version
        self.rollout.ended(Ended(name, "generated", int(request.tokens), first))
        prompt = sample.prompt
        self.expectations.generated(*attempt.sample, int(request.tokens))
        self._left[attempt.uid] -= 1
        if not self._left[attempt.uid]:
            self._seen[prompt.key] = self._seen.get(prompt.key, 0) + 1
        if self.scenario.training.reward:
            self.cluster.call(self.scenario.training.reward, lambda: self._rewarded(name))
        else:
            self._reward(name)
        self._dispatch()
        self._look()

    def _rewarded(self, name: str) -> None:
        self._reward(name)
        self._look()

    def _reward(self, name: str) -> None:
        self._under_way.pop(name, None)
        self.rollout.ended(Ended(name, "finished"))

    # ---- updates ----

    def _look(self) -> None:
        """Harvest if that may be."""
        scheduler, rules = self.rollout.scheduler, self.scenario.rules
        if self._training or not scheduler.ready():
            return
        if self._stops and not self._stopped:
            self._stopped = True
            self._interrupt()
        self._settle()
        bubble = self._occupancy.take()
        batch = self.rollout.take()
        self._training = True
        self.expectations.keep(self.rollout.needs_prompt)
        tokens = sum(batch.harvest.lengths)
        harvested, began = self.cluster.now, self._began
        training = self.scenario.training
        prompts = sum(self._loaded[uid].tokens for uid, _ in batch.harvest.samples)
        seconds = training.seconds(tokens + prompts)
        for uid in {uid for uid, _ in batch.harvest.samples}:
            if uid not in scheduler.ledger:
                del self._loaded[uid], self._left[uid]

        def ended() -> None:
            self._began = self.cluster.now
            self.steps.append(
                Step(
                    *(batch.version, began, harvested, self._began, tokens, len(batch.harvest.samples)),
                    *(batch.counts.wasted_tokens, bubble, max(batch.harvest.staleness), self.expectations.measures()),
                )
            )
            self._told(self.steps[-1])
            self._version += 1
            self._publish()

        self.cluster.call(seconds + training.sync, ended)
        if rules.starts_through_training:
            self._dispatch()

    @property
    def _stops(self) -> bool:
        rules = self.scenario.rules
        return self.scenario.colocated or (rules.max_staleness == 0 and not rules.draft_ahead)

    def _interrupt(self) -> None:
        """All that runs is cut short."""
        for replica, engine in self.cluster.engines.items():
            for request, emitted in engine.withdraw_all(self.cluster.now):
                name = str(request.name)
                sample, attempt = self._under_way[name], Attempt.named(name)
                self.placement.release(self._name(attempt), replica)
                tokens = int(emitted)
                if tokens and sample.first_version is None:
                    sample.first_version = sample.started
                sample.kept = emitted
                self.rollout.ended(Ended(name, "interrupted", tokens, sample.first_version if tokens else None))
            self.cluster.touch(replica)

    def _publish(self) -> None:
        """The engines have the weights of the current version."""
        if self._version and not self._stops and not self.scenario.rules.runs_on:
            self._interrupt()
        for replica, engine in self.cluster.engines.items():
            self._versions[replica] = self._version
            engine.forget()
        self._training = self._stopped = False
        if self.scenario.colocated:
            self._settle()
            self._occupancy.take()
        self.rollout.publish(self._version, self._batches_left())
        self.placement.forget()
        for name in self.rollout.take_abandoned():
            self._withdraw(name)
        self._dispatch()
        self._look()

    def _withdraw(self, name: str) -> None:
        sample = self._under_way.pop(name, None)
        if sample is None:
            return
        engine = self.cluster.engines[sample.replica]
        if name in engine.names():
            engine.withdraw(name, self.cluster.now)
            self.placement.release(self._name(Attempt.named(name)), sample.replica)
            self.cluster.touch(sample.replica)

    def _settle(self) -> None:
        """Count until now."""
        self._occupancy.at(self.cluster.now, sum(engine.running for engine in self.cluster.engines.values()))
