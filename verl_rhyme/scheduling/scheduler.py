"""The pipeline's scheduler: which prompts to load, which samples to start, when to collect a batch and from what.

Invariants with the default rules (:mod:`verl_rhyme.scheduling.rules` defines the terms):

- At most n update batches of prompts are in flight. Prompts are loaded, and start, when a policy is published.
- The oldest batch starts first. Within it, the prompts with the longest expected responses start first
  (:mod:`.admission`).
- A running response continues under a new version. Each token keeps its version and log-probability.
- Whole groups are trained as they finish. An update batch consists of the first of them (:mod:`.collection`).
- A training step waits only for samples that would otherwise exceed ``max_staleness``. Samples that exceed it anyway
  are regenerated.

On-policy, more than one batch may start too; samples that a training step leaves out are regenerated. Their prompts may
be put off (:mod:`.tail_batching`).

An attempt can be lost with its worker or its report. On-policy it can also be busy outside the engine (a tool) when the
engine stops. The scheduler abandons an attempt that no process runs any more, or that has kept the others waiting for
too long. The sample then starts again as a new attempt. So does a failed one, later (:mod:`.retries`).

The scheduler is a pure state machine: events are method calls, and time is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from itertools import islice
from typing import Any

from verl_rhyme.scheduling.admission import startable
from verl_rhyme.scheduling.batch import Collected, StepCounts
from verl_rhyme.scheduling.collection import batch, fills_batch, is_rewarded, lacks_due, reservable
from verl_rhyme.scheduling.ledger import Ledger
from verl_rhyme.scheduling.rules import STOP_WAIT_S, Rules
from verl_rhyme.scheduling.samples import IN_PROGRESS, State
from verl_rhyme.scheduling.tail_batching import TailBatching


class Scheduler:
    """The scheduler's state machine. The order of calls in a training step::

        begin(version) -> stale samples             the policy is new
        loadable() -> load(uid, n) ...              until it returns 0; also between the events below
        dispatch() -> samples to start
        generate(...), finish(...), drop(...) ...   until has_batch(); abandon(...) if lost
        interrupt(...), finish(...) ...             once the engines were stopped, until has_settled()
        abandon(...) ...                            what still runs
        collect()                                   the update batch, if ready(); else continue with dispatch()

    Where engines do not stop (``Rules.stops``), events and ``dispatch()`` occur at all times, also between
    ``collect()`` and ``begin()``. A batch is then collected once has_batch(), has_settled() and ready() hold. New
    weights may reach engines before ``begin()`` or after it; so may the reports of the responses that they interrupt.
    An impossible event raises ValueError (:class:`Ledger`).
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.ledger = Ledger(rules.unit)
        self.version = 0
        self.batches_left: int | None = None
        #: Minimum number of a new attempt: higher than those of earlier attempts that may still report.
        self.first_attempt = 0
        self.step = StepCounts()
        self._training = False  # a batch was collected, and its policy is not published yet
        self._replacements = 0  # replacements still to be loaded; negative: so many dropped prompts are not replaced
        self._reserved: dict[str, None] = {}  # prompts reserved for streamed parts, in order
        self._tail = TailBatching(rules, self.ledger)

    # ---- loading ----

    def loadable(self) -> int:
        return max(0, int(min(self.prompt_limit() - self._held, self._tail.needed(self.batches_left))))

    def prompt_limit(self) -> int:
        """Return the most prompts in flight, replacements included, prompts put off excluded."""
        if len(self.ledger) and self.rules.refill == "when_empty":
            return len(self.ledger) + self._replacements
        left = math.inf if self.batches_left is None else max(0, self.batches_left)
        batches = 1 if self._tail.own_round else min(self.rules.batches, left)
        return math.ceil(round(batches * self.rules.batch_prompts, 6))

    def set_prompt_limit(self, prompt_limit: int) -> None:
        """Set the :meth:`prompt_limit` until all loaded prompts are trained, where they are then loaded together."""
        self._replacements = prompt_limit - self._held if len(self.ledger) else 0

    @property
    def _held(self) -> int:
        """Prompts in flight, without prompts put off; single trajectories leave their prompts, and count as a share."""
        if self.rules.refill == "when_empty":
            return len(self.ledger) - len(self.ledger.put_off)
        return (self.ledger.size - self.ledger.size_put_off) * self.rules.batch_prompts // self.rules.batch_size

    def load(self, uid: str, samples: int) -> None:
        limit = self.prompt_limit()
        self.ledger.load(uid, samples)
        self.set_prompt_limit(limit)
        self.step.loaded += 1

    def expect(self, uid: str, tokens: float) -> None:
        if uid in self.ledger:
            self._tail.expect(uid, tokens, self.batches_left)
            self.ledger.prompt(uid).expected = tokens

    def dispatch(
        self, limit: int | None = None, min_starts: int = 1, waiting: Collection[tuple[str, int]] = ()
    ) -> list[tuple[str, int]]:
        """Start pending samples but ``waiting`` ones, in the engine's order (:mod:`.admission`).

        At most ``limit`` samples run then. At least ``min_starts`` start at once, since each call costs a message.
        """
        room = None if limit is None else limit - self.running
        if (room is not None and room < min_starts) or self.ledger.tally.samples["pending"] <= len(waiting):
            return []
        pending = startable(self.rules, self.ledger, self._training)
        started = list(islice((sample for sample in pending if sample not in waiting), room))
        for uid, number in started:
            sample = self.ledger.move(uid, number, "running")
            sample.attempt = max(sample.attempt + 1, self.first_attempt)
            if self.rules.continues:  # else its one version is reported with it
                sample.run_from(self.version)
        return started

    def oldest_version(self, uid: str) -> int:
        """Return the oldest policy version that may generate samples of a prompt which start now.

        Older tokens would be too stale when they are trained. It is 0 unless replicas take versions one by one.
        """
        rules = self.rules
        if not rules.one_by_one:
            return 0
        if rules.take != "loaded":  # any of the next training steps may take it
            return self.version
        newest = self.version + self._training  # later: a deadlock, as its training step waits for this sample
        update = self.ledger.place(self.ledger.prompt(uid)) // rules.batch_prompts
        return max(0, min(newest, newest - rules.max_staleness + update))

    @property
    def running(self) -> int:
        return self.ledger.tally.samples["running"]

    @property
    def in_progress(self) -> float:
        """Number of samples that may still succeed; unlimited during training, in which engines may stand still."""
        samples = self.ledger.tally.samples
        return math.inf if self._training else sum(samples[state] for state in IN_PROGRESS)

    # ---- events, of loaded prompts ----

    def generate(self, uid: str, number: int, tokens: int, first_version: int | None) -> bool:
        """Record a generated response; one without policy tokens counts as generated by the current policy.

        Return whether it may be trained. Else (its replica lagged) it is regenerated, and the caller ends the attempt.
        """
        oldest = self._version_of(tokens, first_version)
        sample = self.ledger.move(uid, number, "generated")
        sample.tokens, sample.first_version = tokens, oldest
        return not self._regenerate_stale(uid, number)

    def finish(self, uid: str, number: int) -> None:
        """Record the reward of a generated response."""
        self.ledger.move(uid, number, "finished")

    def interrupt(self, uid: str, number: int, tokens: int, first_version: int | None) -> bool:
        """Record an interrupted response; return whether the next attempt continues from it, else it is a draft."""
        oldest = self._version_of(tokens, first_version) if tokens else None
        self.step.interrupted += 1
        goes_on = self.rules.keeps and (oldest is None or oldest >= self._oldest_trained)
        if not goes_on:
            self.step.wasted_tokens += tokens
            oldest = None
        sample = self.ledger.move(uid, number, "pending")
        sample.tokens, sample.first_version = tokens, oldest
        return goes_on

    def abandon(self, uid: str, number: int) -> None:
        """Abandon an attempt that failed, or that no process runs any more and whose end was not reported.

        Its text from before remains: the kept one, or the generated one.
        """
        sample = self.ledger.move(uid, number, "pending")
        self.step.abandoned += 1
        if not (self.rules.keeps and sample.tokens):
            self._regenerate(uid, number)

    def start_over(self, uid: str, number: int) -> None:
        """Nothing is left of a sample's text, not even a draft."""
        self._regenerate(uid, number)
        self.ledger.prompt(uid).samples[number].tokens = 0

    def drop(self, uid: str) -> None:
        """Drop a prompt that failed or was filtered; another prompt may be loaded in its place."""
        self.step.wasted_tokens += self.ledger.prompt(uid).untrained_tokens
        self.step.dropped += 1
        self.ledger.drop(uid)
        self._reserved.pop(uid, None)
        self._replacements += 1

    # ---- collection ----

    def has_batch(self, rewarded: bool = False) -> bool:
        """Return whether a batch is full and no sample that must be trained in it still runs; never during training.

        The engines may then be stopped. (If they run on, the batch may be collected as soon as it :meth:`has_settled`.)
        With ``rewarded`` only rewarded samples count: a reward may still drop a prompt.
        """
        if self._training or lacks_due(self.rules, self.ledger, self.version, rewarded):
            return False
        return fills_batch(self.rules, self.ledger, self.loadable(), rewarded)

    def has_settled(self, stopped_s: float) -> bool:
        """Return whether everything that the batch waits for has arrived.

        ``stopped_s`` are seconds since the engines were stopped, or (engines that run on) since the batch was full.
        Until :data:`~.rules.STOP_WAIT_S` the scheduler waits for rewards of the coming batch, and on-policy for the
        ends of attempts that the stop interrupts; other rewards change nothing. A response with a slow reward is not
        replaced by a later one; otherwise, on-policy, slowly judged responses would be regenerated.
        """
        if stopped_s >= STOP_WAIT_S:
            return True
        if self.rules.stops and not self.rules.continues and self.running:
            return False
        if not self.has_batch():  # no reward can change that
            return True
        if not self.ready():
            return False
        if not self.ledger.tally.samples["generated"]:
            return True
        return is_rewarded(self.rules, self.ledger, self.version, self._reserved)

    def reserve(self, uids: Iterable[str], samples: int = 1) -> list[str]:
        """Reserve finished prompts for streamed parts of the next batch, which then contains them in any case.

        Return the newly reserved ones (:func:`~.collection.reservable`); none with fewer than ``samples`` samples.
        """
        if self._training:
            return []
        found = reservable(self.rules, self.ledger, self.version, uids, self._reserved)
        if sum(len(self.ledger.prompt(uid).samples) for uid in found) < samples:
            return []
        self._reserved.update(dict.fromkeys(found))
        return found

    def ready(self) -> bool:
        return self.has_batch(rewarded=True)

    def collect(self) -> Collected:
        """Return the update batch, and mark its samples as trained. Raises ValueError unless it is :meth:`ready`."""
        if not self.ready():
            raise ValueError("no update batch can be collected yet: call ready() first")
        taken = batch(self.rules, self.ledger, self.version, "finished", reserved=self._reserved)
        taken.sort(key=lambda at: at[0].samples[at[1]].tokens)
        samples = [prompt.samples[number] for prompt, number in taken]
        collected = Collected(
            samples=[(prompt.uid, number) for prompt, number in taken],
            lengths=[sample.tokens for sample in samples],
            waited=[prompt.waited for prompt, _ in taken],
            staleness=[self.version - sample.known_version for sample in samples],
            unit=self.rules.unit,
        )
        self._training, self._reserved = True, {}
        for uid, number in collected.samples:
            self.ledger.train(uid, number)
        self.ledger.count_step()
        if self.batches_left is not None:
            self.batches_left -= 1
        self._tail.choose_round(self.batches_left)
        return collected

    def retire(self) -> list[tuple[str, int]]:
        """Regenerate pending samples whose kept text no later policy continues; return them. After :meth:`collect`."""
        if self.rules.continues:
            return []
        samples = [(p.uid, number) for p, number, sample in self.ledger.samples("pending") if sample.kept_tokens]
        for sample in samples:
            self._regenerate(*sample)
        return samples

    def begin(self, version: int, batches_left: int | None = None) -> list[tuple[str, int]]:
        """Make the policy ``version``, a count of training steps, the current one.

        No more prompts are loaded than ``batches_left`` updates train. Return samples whose text is too stale to be
        trained: finished, generated, kept or (where it spans versions) running. They are regenerated, and the caller
        ends attempts at them. Other running samples are judged at their report.
        """
        self.version, self._training, self._reserved = version, False, {}
        self.batches_left = batches_left
        self._tail.release_for_the_last(batches_left)  # a resumed run may have other rules, or fewer steps left
        if not self.has_stale(version):
            return []
        states: tuple[State, ...] = (*IN_PROGRESS, "finished", "pending")
        samples = [(prompt.uid, number) for state in states for prompt, number, _ in self.ledger.samples(state)]
        return [sample for sample in samples if self._regenerate_stale(*sample)]

    def has_stale(self, version: int) -> bool:
        """Return whether the text of a sample is too stale to be trained by the policy ``version``."""
        return min(self.ledger.tally.held, default=version) < version - self.rules.max_staleness

    # ---- checkpoints: plain values for JSON ----

    def state_dict(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "owed": self._replacements,
            "expected": list(self._tail.expected),
            "own_round": self._tail.own_round,
            "ledger": self.ledger.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.version, self._replacements = state["version"], state["owed"]
        self._reserved = {}  # the trainer requests them again
        self._tail.restore(state["expected"], state["own_round"])
        self.ledger.load_state_dict(state["ledger"])

    def restore(
        self, uid: str, number: int, attempt: int, state: State, tokens: int, first_version: int | None
    ) -> bool:
        """Restore a pending sample from newer evidence, after ``load_state_dict`` and (of a newer policy) ``begin``.

        ``tokens`` are all of the response, those it continues from (``running``), or those before the interruption
        (``pending``: interrupted or never started); earlier ones are not counted again. ``first_version`` is that of
        the oldest. Return, as :meth:`generate` and :meth:`interrupt`, whether its text may be trained or continued.
        """
        if state in ("generated", "finished"):
            first_version = self._version_of(tokens, first_version)
        if state in ("pending", "running") and not (self.rules.keeps and tokens):
            first_version = None
        continues = self.rules.keeps and (first_version is None or first_version >= self._oldest_trained)
        if not continues and (state == "pending" or (state == "running" and not self.rules.continues)):
            first_version = None  # its text is a draft
        sample = self.ledger.move(uid, number, state, restored=True)
        sample.attempt, sample.tokens, sample.first_version = attempt, tokens, first_version
        if state == "running" and self.rules.continues:
            sample.run_from(self.version)
        return continues if state == "pending" else not self._regenerate_stale(uid, number)

    # ---- within ----

    @property
    def _oldest_trained(self) -> int:
        return self.version - self.rules.max_staleness

    def _version_of(self, tokens: int, first_version: int | None) -> int:
        if tokens and first_version is None:
            raise ValueError(f"a response has {tokens} tokens without a policy version, so its staleness is unknown")
        return self.version if first_version is None else first_version

    def _regenerate_stale(self, uid: str, number: int) -> bool:
        sample = self.ledger.prompt(uid).samples[number]
        oldest = sample.oldest_version
        if oldest is None or oldest >= self._oldest_trained:
            return False
        self.step.stale += sample.state != "pending"
        self._regenerate(uid, number)
        return True

    def _regenerate(self, uid: str, number: int) -> None:
        self.step.wasted_tokens += self.ledger.prompt(uid).samples[number].kept_tokens
        self.ledger.move(uid, number, "pending").first_version = None
