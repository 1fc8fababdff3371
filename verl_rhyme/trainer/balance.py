"""Compares generation with training; reports in metrics and log whether one replica more or less would be better.

Where rollout continues while the actor trains, a step shows one of two times. If generation is slower, the trainer
waits for its batch; if generation is faster, the batch is ready before. ``T_train = step - waited`` and
``T_gen = step - ahead`` go into the elastic rule (:class:`~verl_rhyme.planning.elastic.Elastic`).

:mod:`~verl_rhyme.trainer.reserve` carries the advice out, if enabled.
"""

from __future__ import annotations

import logging
from statistics import median

import numpy as np

from verl_rhyme.observability import metrics as names
from verl_rhyme.planning.elastic import Elastic, Limits
from verl_rhyme.planning.times import Work, rollout
from verl_rhyme.processes.messages import Reply, RunSettings
from verl_rhyme.trainer.observers import Observer, Step

logger = logging.getLogger(__name__)


class Balance(Observer):
    """Compares the steps of a run.

    Args:
        setting: Settings of the run: rules, cost of a replica.
        limits: Limits of the elastic rule.

    Attributes:
        advice: Advice of the latest step: 1, one replica more; -1, one less; 0, no change.
    """

    def __init__(self, setting: RunSettings, limits: Limits | None = None) -> None:
        self._setting = setting
        self._limits = Limits() if limits is None else limits
        self.advice = 0
        self._elastic: Elastic | None = None
        self._work: Work | None = None
        self._scale = 1.0
        self._reported = 0
        self._failed = False

    def on_step(self, step: Step) -> dict[str, float]:
        """Set :attr:`advice` and return metrics; none if rollout stands still while the actor trains."""
        self.advice = 0
        reply, seconds = step.reply, step.seconds
        ahead = None if reply is None else reply.metrics.get(names.STREAM_AHEAD)
        if reply is None or ahead is None or not (seconds > 0 and step.replicas):
            return {}
        try:
            return self._observe(step.replicas, seconds, min(step.waited, seconds), min(ahead, seconds), reply)
        except Exception:  # advice must not end a run
            if not self._failed:
                logger.warning("generation and training could not be compared (logged once)", exc_info=True)
            self._failed = True
            return {}

    def _observe(self, replicas: int, step: float, waited: float, ahead: float, reply: Reply) -> dict[str, float]:
        real = [tag for tag in reply.tags if not tag.get("is_padding", False)]
        lengths = np.array([tag["response_len"] for tag in real], dtype=float)
        prompts = np.mean([tag["seq_len"] for tag in real]) - np.mean(lengths)
        rules = self._setting.rules
        group = max(1, rules.batch_samples // rules.batch_prompts)
        self._work = Work(np.maximum(lengths, 1.0), len(real), group, max(0.0, float(prompts)))
        if reply.paces:  # scale the cost model to this machine, as measured training seconds are this machine's
            rows = min(self._setting.cost.slots, max(1, len(real) // replicas))
            self._scale = median(reply.paces.values()) / self._setting.cost.step.seconds(rows)
        if self._elastic is None:
            limits = self._limits
            self._elastic = Elastic(self._predict, min(max(replicas, limits.least), limits.most), limits)
        self._elastic.changed(replicas)
        advice = self._elastic.observe(step - ahead, step - waited)
        if advice.change and advice.change != self._reported:
            logger.info(
                "%d replicas: %s would be better (generation %+.1f s against training, %.1f s a replica): %s",
                *(replicas, "one more" if advice.change > 0 else "one less", advice.delta, advice.saving, advice.why),
            )
        self._reported = self.advice = advice.change
        return {names.STREAM_BEHIND: advice.delta, names.STREAM_ELASTIC: float(advice.change)}

    def _predict(self, replicas: int) -> float:
        assert self._work is not None
        cost, bound = self._setting.cost.slowed(self._scale), self._setting.rules.max_staleness
        return float(rollout(cost, replicas, self._work, bound))  # without training, with which it is compared
