"""A run's rollout without its messages: the flow of samples from prompts to batches, and which report counts.

It surrounds the :class:`~verl_rhyme.scheduling.scheduler.Scheduler`, which counts tokens and versions;
:mod:`.content` has what ended attempts leave. It is a pure state machine too; the coordinator
(``coordinator/coordinator.py``) carries its messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from verl_rhyme.scheduling.attempts import ABORTED, Attempt, AttemptReport, Record, Start
from verl_rhyme.scheduling.batch import Batch, StepCounts
from verl_rhyme.scheduling.content import QueueContent
from verl_rhyme.scheduling.dispatch import Dispatch
from verl_rhyme.scheduling.group_filter import GroupFilter
from verl_rhyme.scheduling.recovery import Recovery
from verl_rhyme.scheduling.retries import TRIES, Retries, RolloutError
from verl_rhyme.scheduling.rules import Rules
from verl_rhyme.scheduling.samples import IN_PROGRESS, State
from verl_rhyme.scheduling.scheduler import Scheduler

#: Attempt numbers reserved for each generation.
_ATTEMPTS = 1 << 10


class Rollout:
    """The rollout's state machine.

    The caller reads :meth:`missing_prompts`, passes prompts to :meth:`add_prompts`, sends what :meth:`fill` and
    :meth:`pop_abandoned` return, and passes reports to :meth:`ended`. In between it calls the scheduler as that class
    describes. ``filters`` is the metric of the :class:`GroupFilter` (``None``: no group is dropped). ``generation`` is
    the number of this rollout among those that resume one another; it keeps attempts unique. After ``outage_s`` seconds
    without a successful sample the run ends (:mod:`.retries`). ``dispatch`` makes its :class:`Dispatch`.
    """

    def __init__(
        self,
        rules: Rules,
        filters: str | None = None,
        generation: int = 0,
        outage_s: float = math.inf,
        dispatch: Callable[[Scheduler], Dispatch] = Dispatch,
    ) -> None:
        self.scheduler = Scheduler(rules)
        self.dispatch = dispatch(self.scheduler)
        self.scheduler.first_attempt = generation * _ATTEMPTS
        self._generation = generation
        self._filter = GroupFilter(filters)
        self.content = QueueContent(self.scheduler)
        self.retries = Retries(outage_s)
        self._expected: dict[str, float] = {}  # expected tokens by waiting prompt, where known
        self._abandoned: list[Attempt] = []  # attempts to be ended
        self._failed = 0
        self.dropped_samples = 0  # of dropped prompts, since the last pop_wasted()
        self._warnings: list[str] = []
        # Number of samples by finished prompt that was in no streamed part yet, in the order of finishing.
        self._finished_groups: dict[str, int] = {}
        self._new_part = False  # whether a new streamed part is possible

    @property
    def rules(self) -> Rules:
        return self.scheduler.rules

    @property
    def filtered(self) -> dict[float, int]:
        """Groups dropped since the last batch, by their common score."""
        return dict(self._filter.dropped)

    # ---- prompts ----

    def add_prompts(self, prompts: Iterable[tuple[str, int]]) -> None:
        """Add prompts (uid and number of samples) to the stock of waiting prompts; known prompts are ignored."""
        for uid, samples in prompts:
            if uid not in self.scheduler.ledger:
                self.content.stock.setdefault(uid, samples)

    def expect(self, tokens: Mapping[str, float]) -> None:
        for uid, length in tokens.items():
            if not math.isfinite(length):
                continue
            if uid in self.content.stock:
                self._expected[uid] = length
            else:
                self.scheduler.expect(uid, length)

    def missing_prompts(self) -> int:
        return max(0, self.scheduler.loadable() - len(self.content.stock))

    # ---- versions ----

    def publish(self, version: int, batches_left: int | None) -> None:
        """Make the policy ``version`` the current one (:meth:`Scheduler.begin`); stale samples are regenerated."""
        self.retries.proven |= version > 0  # also of a run that resumes
        attempts = self.attempts() if self.scheduler.has_stale(version) else []
        in_progress = {attempt.sample: attempt for attempt in attempts}
        for sample in self.scheduler.begin(version, batches_left):
            self.content.waste(sample)
            if sample in in_progress:  # some still wait for a reward
                self._abandoned.append(in_progress[sample])
        self._new_part = True

    # ---- attempts ----

    def attempts(self, states: Iterable[State] = IN_PROGRESS) -> list[Attempt]:
        """Return the latest attempts at samples in these states."""
        samples = (sample for state in states for sample in self.scheduler.ledger.samples(state))
        return [Attempt(prompt.uid, number, sample.attempt) for prompt, number, sample in samples]

    def fill(self, limit: int | None = None, min_starts: int = 1, now: float = 0.0) -> list[Start]:
        """Load waiting prompts and start samples, as far as the scheduler allows (:meth:`Scheduler.dispatch`)."""
        self.load_prompts()
        self.retries.release(now)
        started = self.scheduler.dispatch(limit, min_starts, self.retries.waiting.keys())
        if not started:  # as after most events
            return []
        attempts = [self.content.latest(*sample) for sample in started]
        tokens = [self.content.kept_tokens(*sample) for sample in started]
        starts = []
        for attempt, kept, assignment in zip(attempts, tokens, self.dispatch.assign(attempts, tokens), strict=True):
            before = self.content.reports.get(attempt.sample) if kept or self.rules.redrafts else None
            predecessor, stored = (before.attempt, before.stored) if before else (None, False)
            starts.append(Start(attempt, predecessor, kept > 0, stored, assignment, self.rules.continues))
        return starts

    def load_prompts(self) -> None:
        while self.content.stock and self.scheduler.loadable():  # a prompt put off makes room for another
            uid = next(iter(self.content.stock))
            self.scheduler.load(uid, self.content.stock.pop(uid))
            if (expected := self._expected.pop(uid, None)) is not None:
                self.scheduler.expect(uid, expected)

    def ended(self, report: AttemptReport, now: float = 0.0) -> list[Record]:
        """Record the report of an attempt's end at ``now``; a report that no caller waits for changes nothing.

        Return the records of requests that were not reported before (a report repeats those of attempts it continued
        from). Raises :class:`RolloutError` if no sample succeeds or the filter dropped too many consecutive groups, and
        RuntimeError if its tokens come from a policy version that is not allowed.
        """
        attempt = report.attempt
        self.dispatch.ended(attempt, report.tokens if report.status == "generated" else None)
        records = self._ended(report, now)
        kept = self.content.reports.get(attempt.sample)
        if report.leaves_turns and (kept is None or kept.attempt != attempt):
            self.content.obsolete.append(attempt)
        return records

    def _ended(self, report: AttemptReport, now: float) -> list[Record]:
        attempt, status = report.attempt, report.status
        sample = self.content.sample(attempt)
        if sample is None or sample.state not in IN_PROGRESS:
            return []
        if status in ("failed", "lost"):
            error = report.error if status == "failed" else f"it could not start: {report.error}"
            tries = report.tries if status == "failed" else 0
            if not self._try_again(*attempt.sample, error, now, report.broken, tries):
                return []
            if sample.state == "generated" or not report.tokens:
                self.scheduler.abandon(*attempt.sample)  # what it left before remains
                return []
        if status == "finished":
            if sample.state == "generated":
                self._finish(report, now)
        elif sample.state == "running":
            new = self.content.replace(report)
            if status == "generated":
                self.scheduler.step.interrupted += sum(record.get("stop_reason") in ABORTED for record in new)
                self._generated(report)
            elif not self.scheduler.interrupt(*attempt.sample, report.tokens, report.first_version):
                self.content.waste(attempt.sample)
            return new
        return []

    def _finish(self, report: AttemptReport, now: float) -> None:
        self.content.finish(report)
        if not report.empty:
            self.retries.succeeded(report.attempt.sample, now)
        self.scheduler.finish(*report.attempt.sample)
        self._check_finished(report.attempt.uid, now)

    def lost(self, attempts: Iterable[Attempt], turns: Iterable[Attempt] = ()) -> list[Attempt]:
        """Abandon attempts that no process runs any more; return those whose samples start again.

        ``turns``: ended attempts whose turns are lost. Samples that would go on from them start over; so do generated
        ones, whose turns are lost with the attempt.
        """
        attempts, turns = list(attempts), list(turns)
        for attempt in attempts:
            self.dispatch.ended(attempt)
        generated, in_progress = {*self.attempts(("generated",))}, {*self.attempts()}
        lost = [attempt for attempt in attempts if attempt in in_progress]
        for attempt in lost:
            self.scheduler.abandon(*attempt.sample)
        unrewarded = [attempt for attempt in lost if attempt in generated]
        self.scheduler.step.unrewarded += len(unrewarded)
        for attempt in [*turns, *unrewarded]:
            report = self.content.reports.get(attempt.sample)
            if report is None or report.attempt != attempt or report.status == "finished":
                continue
            if self.scheduler.ledger.prompt(attempt.uid).samples[attempt.number].state == "pending":
                self.content.start_over(*attempt.sample)
            else:  # an attempt that began without them runs on another worker
                self.content.forget(attempt.sample)
        return lost

    def abandon_running(self) -> list[Attempt]:
        """Abandon and return attempts that have not reported although engines are stopped, if they cannot continue."""
        running = self.attempts(("running",)) if self.rules.stops and not self.rules.continues else []
        for attempt in running:
            self.scheduler.abandon(*attempt.sample)
        self._abandoned += running
        return running

    def pop_abandoned(self) -> list[Attempt]:
        """Return the attempts, since the last call, that are to end without a report."""
        abandoned, self._abandoned = self._abandoned, []
        for attempt in abandoned:
            self.dispatch.ended(attempt)
        return abandoned

    def pop_warnings(self) -> list[str]:
        warnings, self._warnings = self._warnings + self._filter.warnings, []
        self._filter.warnings = []
        return warnings

    # ---- batches ----

    def part(self, samples: int) -> list[Attempt]:
        """Return attempts for a streamed part of the next batch: finished whole groups that the batch contains in any
        case.

        They were in no part before and are in the order in which their groups finished; with fewer than ``samples``
        there is no part. Where batches are taken in loading order (``Rules.take``), a part changes nothing. Elsewhere
        it has the groups that finished first, which need not be the shortest. Trajectories that are trained one by one
        (``Rules.unit``) are included once all samples of their prompt are finished.
        """
        if not self._new_part or sum(self._finished_groups.values()) < samples:
            return []
        self._new_part = False
        found = self.scheduler.reserve(self._finished_groups, samples)
        for uid in found:
            del self._finished_groups[uid]
        return [report.attempt for uid in found for report in self.content.stored(self.scheduler.ledger.prompt(uid))]

    def take(self) -> Batch:
        """Return the update batch (:meth:`Scheduler.collect`) and the statistics since the last one.

        Raises :class:`RolloutError` without any trajectory, and RuntimeError if a sample exceeds the staleness bound.
        """
        collected = self.scheduler.collect()
        self.retries.trained()
        for staleness in collected.staleness:  # a last check before training
            if not 0 <= staleness <= self.rules.max_staleness:
                raise _lagging(staleness, self.rules)
        reports = [self.content.reports.pop(sample) for sample in collected.samples]
        stored = [report for report in reports if report.stored]
        if not stored:
            raise RolloutError(
                f"the agent loop returned no trajectory for any of the {len(collected.samples)} samples of a batch: "
                "check the agent loop (actor_rollout_ref.rollout.agent)"
            )
        for sample in self.scheduler.retire():
            self.content.waste(sample)
        self.content.wasted += [record for report in reports if not report.stored for record in report.records]
        for uid, _ in collected.samples:
            self._finished_groups.pop(uid, None)
        batch = Batch(
            collected=collected,
            attempts=[report.attempt for report in stored],
            version=self.scheduler.version,
            trained=[record for report in stored for record in report.records],
            ran=self.content.ran,
            wasted=self.pop_wasted(),
            counts=self.scheduler.step,
            left=self.scheduler.ledger.tally.samples["finished"],
            failed=self._failed,
            filtered=self.filtered,
        )
        self.content.ran, self._failed = [], 0
        self._filter.dropped.clear()
        self.scheduler.step = StepCounts()
        return batch

    def pop_wasted(self) -> list[Record]:
        """Return the requests, since the last call, whose tokens will not be trained; forget what was kept of prompts
        that have left."""
        wasted, self.content.wasted, self.dropped_samples = self.content.wasted, [], 0
        self.dispatch.retain(self.content.needs_prompt)
        return wasted

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; :meth:`restore` needs them and the content of the queue."""
        return {
            **self.scheduler.state_dict(),
            **self.content.state_dict(),
            "generation": self._generation,
            "failed": self._failed,
            "filtered": list(self.filtered.items()),
            "filter": self._filter.state_dict(),
            "failures": self.retries.state_dict(),
        }

    def restore(
        self,
        state: dict[str, Any],
        version: int,
        batches_left: int,
        known: Mapping[Attempt, AttemptReport | None],
        prompts: Collection[str],
        added: Iterable[tuple[str, int]] = (),
        now: float = 0.0,
    ) -> list[str]:
        """Restore the rollout from an earlier :meth:`state_dict` and the newer ``known`` attempts (:class:`Recovery`).

        ``prompts`` have available data; ``added`` ones came since the state was saved. Return the ids of prompts whose
        data are lost; other prompts replace them.
        """
        self.scheduler.load_state_dict(state)
        self._failed = state["failed"]
        self._filter.load_state_dict(state.get("filter", {}), state["filtered"])
        self.retries.load_state_dict(state.get("failures", []))
        self.content.stock = dict([*state["stock"], *added])
        self.scheduler.batches_left = batches_left
        prompt_limit = self._whole_updates(self.scheduler.prompt_limit())  # nothing was trained since
        empty = [AttemptReport(Attempt.named(name), "finished", empty=True) for name in state["empty"]]
        recovery = Recovery(self.scheduler, {report.attempt: report for report in empty} | dict(known))
        gone = recovery.load(self.content.stock, prompts, prompt_limit)
        self._failed += len(gone)
        recovery.remember(map(Attempt.named, state["reports"]))
        # publish() forgets the reports of stale samples, but newer ones are of attempts that regenerated them
        newer = {s: report for s, report in recovery.reports.items() if report.attempt > self.content.latest(*s)}
        self.content.reports = {s: report for s, report in recovery.reports.items() if s not in newer}
        self.publish(version, batches_left)
        self.content.reports.update(newer)
        for attempt in recovery.place(self.content.reports):
            self.content.waste(attempt.sample)
            self._abandoned.append(attempt)
        for prompt in list(self.scheduler.ledger):
            self._check_finished(prompt.uid, now)
        self.scheduler.set_prompt_limit(prompt_limit)
        return gone

    # ---- within ----

    def _whole_updates(self, prompt_limit: int) -> int:
        """Round a number of prompts up to whole batches, since it may come from other rules."""
        rules = self.scheduler.rules
        if rules.refill == "always" or rules.unit == "trajectory" or rules.batches % 1:
            return prompt_limit
        return math.ceil(prompt_limit / rules.batch_prompts) * rules.batch_prompts

    def _generated(self, report: AttemptReport) -> None:
        if self.scheduler.generate(*report.attempt.sample, report.tokens, report.first_version):
            return
        if self.rules.stops:
            assert report.first_version is not None
            raise _lagging(self.scheduler.version - report.first_version, self.rules)
        self.content.waste(report.attempt.sample)
        self._abandoned.append(report.attempt)  # its reward is not needed

    def _try_again(self, uid: str, number: int, error: str, now: float, broken: bool = False, tries: int = 1) -> bool:
        """Record a failed sample; if it failed too often, drop its prompt and return ``False``."""
        self.scheduler.step.failed += tries > 0
        others = self.scheduler.in_progress - (self.scheduler.ledger.prompt(uid).samples[number].state in IN_PROGRESS)
        error = f"sample {number} of prompt {uid}: {error}"
        if self.retries.failed((uid, number), error, now, others, broken, tries):
            return True
        self._warnings.append(f"another prompt replaces one that failed {TRIES} times, while others succeed: {error}")
        self._drop(uid)
        self._failed += 1
        return False

    def _check_finished(self, uid: str, now: float) -> None:
        """Offer a finished group for a part; start it again without a trajectory; or drop it, by the filter."""
        prompt = self.scheduler.ledger.prompt(uid)
        if not prompt.complete("finished"):
            return
        stored = self.content.stored(prompt)
        if not stored:
            error = "the agent loop returned no trajectory for any sample of the prompt"
            # Once more, because a tool may answer otherwise; the model draws the same.
            if self._try_again(uid, 0, error, now, broken=True, tries=TRIES // 2):
                for number in range(len(prompt.samples)):
                    self.content.start_over(uid, number)
        elif not self._filter.keeps([report.scores for report in stored]):
            self._drop(uid)
        else:
            self._finished_groups[uid], self._new_part = len(prompt.samples), True

    def _drop(self, uid: str) -> None:
        self._finished_groups.pop(uid, None)
        self._new_part = True  # another prompt moves up to the next batch
        samples = self.scheduler.ledger.prompt(uid).samples
        self.dropped_samples += len(samples)
        self.retries.forget((uid, number) for number in range(len(samples)))
        for number, sample in enumerate(samples):
            self.content.forget((uid, number))
            if sample.state in IN_PROGRESS:
                self._abandoned.append(Attempt(uid, number, sample.attempt))
        self.scheduler.drop(uid)


def _lagging(staleness: int, rules: Rules) -> RuntimeError:
    return RuntimeError(
        f"a trajectory has staleness {staleness}, and 0 to {rules.max_staleness} is allowed (max_staleness): check "
        "whether a rollout server runs without the latest weights (metrics training/off_policy/*)"
    )
