"""Is generation behind training, and would a replica more or less mend it? Advice in the metrics and in the log.

Where rollout goes on while the actor trains, a step shows one of two things. Either the trainer waited for its batch:
by so much generation is slower. Or the batch was whole before the trainer came for it: by so much it is faster. With
both known, ``T_train = step - waited`` and ``T_gen = step - ahead`` go into the elastic rule
(:class:`~verl_rhyme.planning.elastic.Elastic`).

Whether anything comes of the advice is :mod:`~verl_rhyme.trainer.reserve`'s.
"""

from __future__ import annotations

import logging
from statistics import median

import numpy as np

from verl_rhyme.observability import metrics as names
from verl_rhyme.planning.elastic import Elastic, Limits
from verl_rhyme.planning.times import Work, rollout
from verl_rhyme.processes.messages import Reply, Setting
from verl_rhyme.trainer.observers import Observer, Step

logger = logging.getLogger(__name__)


class Balance(Observer):
    """One for a run.

    Args:
        setting: What the coordinator goes by: rules, what a replica costs.
        limits: Of the rule.

    Attributes:
        advice: What the latest step says: 1, a replica more would do better; -1, one less; 0, neither.
    """

    def __init__(self, setting: Setting, limits: Limits | None = None) -> None:
        self._setting = setting
        self._limits = Limits() if limits is None else limits
        self.advice = 0
        self._elastic: Elastic | None = None
        self._work: Work | None = None
        self._scale = 1.0
        self._told = 0
        self._failed = False

    def on_step(self, step: Step) -> dict[str, float]:
        """Metrics and :attr:`advice`; none where rollout stands still while the actor trains."""
        self.advice = 0
        reply, seconds = step.reply, step.seconds
        ahead = None if reply is None else reply.metrics.get(names.STREAM_AHEAD)
        if reply is None or ahead is None or not (seconds > 0 and step.replicas):
            return {}
        try:
            return self._observe(step.replicas, seconds, min(step.waited, seconds), min(ahead, seconds), reply)
        except Exception:  # advice alone
            if not self._failed:
                logger.warning("generation and training could not be compared (told once)", exc_info=True)
            self._failed = True
            return {}

    def _observe(self, replicas: int, step: float, waited: float, ahead: float, reply: Reply) -> dict[str, float]:
        real = [tag for tag in reply.tags if not tag.get("is_padding", False)]
        lengths = np.array([tag["response_len"] for tag in real], dtype=float)
        prompts = np.mean([tag["seq_len"] for tag in real]) - np.mean(lengths)
        rules = self._setting.rules
        group = max(1, rules.batch_samples // rules.batch_prompts)
        self._work = Work(np.maximum(lengths, 1.0), len(real), group, max(0.0, float(prompts)))
        if reply.paces:  # beside seconds of training, those of generation are to be this machine's
            rows = min(self._setting.cost.slots, max(1, len(real) // replicas))
            self._scale = median(reply.paces.values()) / self._setting.cost.step.seconds(rows)
        if self._elastic is None:
            limits = self._limits
            self._elastic = Elastic(self._predict, min(max(replicas, limits.least), limits.most), limits)
        self._elastic.changed(replicas)
        advice = self._elastic.observe(step - ahead, step - waited)
        if advice.change and advice.change != self._told:
            logger.info(
                "%d replicas: %s would do better (generation %+.1f s against training, %.1f s a replica): %s",
                *(replicas, "one more" if advice.change > 0 else "one less", advice.delta, advice.saving, advice.why),
            )
        self._told = self.advice = advice.change
        return {names.STREAM_BEHIND: advice.delta, names.STREAM_ELASTIC: float(advice.change)}

    def _predict(self, replicas: int) -> float:
        assert self._work is not None
        cost, bound = self._setting.cost.slowed(self._scale), self._setting.rules.max_staleness
        return float(rollout(cost, replicas, self._work, bound))  # alone: it is compared with training
