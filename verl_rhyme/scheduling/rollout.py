"""A run's rollout without its messages: under which name a sample starts, from whose text it continues, which report
counts, what an ended attempt leaves, and the content of a batch.

It surrounds the :class:`~verl_rhyme.scheduling.scheduler.Scheduler`, which counts tokens and versions. It is a pure
state machine too; the coordinator (``coordinator/coordinator.py``) carries its messages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from verl_rhyme.placement.assignment import Assignment
from verl_rhyme.scheduling.admission import priority
from verl_rhyme.scheduling.attempts import Attempt, Ended, Reported, Start, sample_of
from verl_rhyme.scheduling.batch import Batch, Record, StepCounts
from verl_rhyme.scheduling.group_filter import GroupFilter
from verl_rhyme.scheduling.recovery import Evidence, Recovery
from verl_rhyme.scheduling.retries import TRIES, Retries, RolloutError
from verl_rhyme.scheduling.rules import Rules
from verl_rhyme.scheduling.samples import IN_PROGRESS, Prompt, Sample, State
from verl_rhyme.scheduling.scheduler import Scheduler

#: Attempt numbers reserved for each generation.
_ATTEMPTS = 1 << 10
#: Of a sample without reports.
_NOTHING = Reported()


class Rollout:
    """The rollout's state machine.

    The caller reads :meth:`missing_prompts`, passes prompts to :meth:`add_prompts`, sends what :meth:`fill` and
    :meth:`pop_abandoned` return, and passes reports to :meth:`ended`. In between it calls the scheduler as that class
    describes. ``filters`` is the metric of the :class:`GroupFilter` (``None``: no group is dropped). ``generation`` is
    the number of this rollout among those that resume one another; it keeps attempt names unique. After ``outage_s``
    seconds without a successful sample the run ends (:mod:`.retries`).
    """

    def __init__(
        self, rules: Rules, filters: str | None = None, generation: int = 0, outage_s: float = math.inf
    ) -> None:
        self.scheduler = Scheduler(rules)
        self.scheduler.first_attempt = generation * _ATTEMPTS
        self._generation = generation
        self._filter = GroupFilter(filters)
        self._retries = Retries(outage_s)
        self._stock: dict[str, int] = {}  # number of samples by prompt that waits to be loaded, in order
        self._expected: dict[str, float] = {}  # expected tokens by waiting prompt, where known
        self._reported: dict[tuple[str, int], Reported] = {}  # by untrained sample
        self._ran: list[Record] = []  # records of attempts that ended since the last batch
        self._abandoned: list[str] = []  # attempts to be ended
        self._obsolete: list[str] = []  # attempts whose reports are no longer needed
        self._wasted: list[Record] = []
        self._failed = 0
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
                self._stock.setdefault(uid, samples)

    def expect(self, tokens: Mapping[str, float]) -> None:
        for uid, length in tokens.items():
            if not math.isfinite(length):
                continue
            if uid in self._stock:
                self._expected[uid] = length
            else:
                self.scheduler.expect(uid, length)

    def missing_prompts(self) -> int:
        return max(0, self.scheduler.loadable() - len(self._stock))

    # ---- versions ----

    def publish(self, version: int, batches_left: int | None) -> None:
        """Make the policy ``version`` the current one (:meth:`Scheduler.begin`); stale samples are regenerated."""
        self._retries.proven |= version > 0  # also of a run that resumes
        attempts = self.attempts() if self.scheduler.has_stale(version) else []
        in_progress = {attempt.sample: attempt.name for attempt in attempts}
        for sample in self.scheduler.begin(version, batches_left):
            self._waste(sample)
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
        self._retries.release(now)
        starts = []
        for uid, number in self.scheduler.dispatch(limit, min_starts, self._retries.waiting.keys()):
            before, name = self._predecessor(uid, number), self._latest(uid, number).name
            predecessor = None if before is None else Attempt(uid, number, before).name
            stored, kept = self._report((uid, number)).stored, self.kept_tokens(uid, number) > 0
            place = priority(self.rules, self.scheduler.ledger.prompt(uid))
            assignment = Assignment(oldest_version=self.scheduler.oldest_version(uid), priority=place)
            starts.append(Start(name, predecessor, kept, stored, assignment, self.rules.continues))
        return starts

    def next_start(self) -> float | None:
        return self._retries.next_start()

    def load_prompts(self) -> None:
        while self._stock and self.scheduler.loadable():  # a prompt put off makes room for another
            uid = next(iter(self._stock))
            self.scheduler.load(uid, self._stock.pop(uid))
            if (expected := self._expected.pop(uid, None)) is not None:
                self.scheduler.expect(uid, expected)

    def kept_tokens(self, uid: str, number: int) -> int:
        """Return the tokens from which the next attempt at a sample continues."""
        known = self._report((uid, number)).attempt is not None
        return self.scheduler.ledger.prompt(uid).samples[number].kept_tokens if known else 0

    def _predecessor(self, uid: str, number: int) -> int | None:
        if self.rules.redrafts or self.kept_tokens(uid, number):
            return self._report((uid, number)).attempt
        return None

    def ended(self, report: Ended, now: float = 0.0) -> list[Record]:
        """Record the report of an attempt's end at ``now``; a report that no caller waits for changes nothing.

        Return the records of requests that were not reported before (a report repeats those of attempts it continued
        from). Raises :class:`RolloutError` if no sample succeeds or the filter dropped too many consecutive groups, and
        RuntimeError if its tokens come from a policy version that is not allowed.
        """
        attempt = Attempt.named(report.name)
        uid, number, _ = attempt
        sample = self._sample(attempt)
        if sample is None or sample.state not in IN_PROGRESS:
            return []
        if report.status == "failed" and not self._try_again(
            uid, number, report.error, now, report.broken, report.tries
        ):
            return []
        could_not_start = f"it could not start: {report.error}"
        if report.status == "lost" and not self._try_again(uid, number, could_not_start, now, tries=0):
            return []
        if report.status in ("failed", "lost") and (sample.state == "generated" or not report.tokens):
            self.scheduler.abandon(uid, number)  # what it left before remains
        elif report.status == "finished":
            if sample.state == "generated":
                reported = self._reported[uid, number]
                reported.scores, reported.empty, reported.stored = report.scores, report.empty, not report.empty
                if not report.empty:
                    self._obsolete.append(report.name)
                    self._retries.succeeded(attempt.sample, now)
                self.scheduler.finish(uid, number)
                self._check_finished(uid, now)
        elif sample.state == "running":
            before = self._report(attempt.sample)
            if before.attempt is not None:
                self._obsolete.append(Attempt(uid, number, before.attempt).name)
            reported = self._reported[attempt.sample] = Reported.of(attempt, report.records)
            known = {record["id"] for record in before.records}
            new = [record for record in reported.records if record["id"] not in known]
            self._ran += new
            repeated = {record["id"] for record in reported.records}
            lost = [record for record in before.records if record["id"] not in repeated]  # with its turns
            self._wasted += lost
            self.scheduler.step.wasted_tokens += sum(record["response_tokens"] for record in lost)
            if report.status == "generated":
                self._generated(report, uid, number)
            elif not self.scheduler.interrupt(uid, number, report.tokens, report.first_version):
                self._waste((uid, number))
            return new
        return []

    def lost(self, names: Iterable[str], turns: Iterable[str] = ()) -> list[str]:
        """Abandon attempts that no process runs any more; return those whose samples start again.

        ``turns``: ended attempts whose turns are lost. Samples that would go on from them start over.
        """
        in_progress = {attempt.name: attempt for attempt in self.attempts()}
        lost = [name for name in names if name in in_progress]
        for name in lost:
            self.scheduler.abandon(*in_progress[name].sample)
        for attempt in map(Attempt.named, turns):
            reported = self._report(attempt.sample)
            if reported.attempt == attempt.attempt and not reported.stored:
                self._start_over(*attempt.sample)
                self._obsolete.append(attempt.name)
        return lost

    def abandon_running(self) -> list[str]:
        """Abandon and return the attempts that have not reported although the engines are stopped."""
        running = self.attempts(("running",)) if self.rules.stops else []
        for attempt in running:
            self.scheduler.abandon(*attempt.sample)
        names = [attempt.name for attempt in running]
        self._abandoned += names
        return names

    def pop_abandoned(self) -> list[str]:
        """Return the attempts, since the last call, that are to end without a report."""
        abandoned, self._abandoned = self._abandoned, []
        return abandoned

    def pop_warnings(self) -> list[str]:
        warnings, self._warnings = self._warnings + self._filter.warnings, []
        self._filter.warnings = []
        return warnings

    def outage(self, now: float) -> str:
        return self._retries.summary(now)

    def pop_obsolete(self) -> list[str]:
        """Return attempts, since the last call, that a later one replaced or whose text is in trajectories."""
        obsolete, self._obsolete = self._obsolete, []
        return obsolete

    # ---- batches ----

    def part(self, samples: int) -> list[str]:
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
        stored = [sample for uid in found for sample in self._stored(self.scheduler.ledger.prompt(uid))]
        return [self._latest(*sample).name for sample in stored]

    def take(self) -> Batch:
        """Return the update batch (:meth:`Scheduler.collect`) and the statistics since the last one.

        Raises :class:`RolloutError` without any trajectory, and RuntimeError if a sample exceeds the staleness bound.
        """
        finished = {attempt.sample: attempt.name for attempt in self.attempts(("finished",))}
        collected = self.scheduler.collect()
        self._retries.trained()
        for staleness in collected.staleness:  # a last check before training
            if not 0 <= staleness <= self.rules.max_staleness:
                raise _lagging(staleness, self.rules)
        stored = [sample for sample in collected.samples if not self._report(sample).empty]
        if not stored:
            raise RolloutError(
                f"the agent loop returned no trajectory for any of the {len(collected.samples)} samples of a batch: "
                "check the agent loop (actor_rollout_ref.rollout.agent)"
            )
        for sample in self.scheduler.retire():
            self._waste(sample)
        trained = [record for sample in collected.samples for record in self._forget(sample)]
        for uid, _ in collected.samples:
            self._finished_groups.pop(uid, None)
        batch = Batch(
            collected=collected,
            attempts=[finished[sample] for sample in stored],
            version=self.scheduler.version,
            trained=trained,
            ran=self._ran,
            wasted=self._wasted,
            counts=self.scheduler.step,
            left=len(finished) - len(collected.samples),
            failed=self._failed,
            filtered=self.filtered,
        )
        self._ran, self._wasted, self._failed = [], [], 0
        self._filter.dropped.clear()
        self.scheduler.step = StepCounts()
        return batch

    # ---- content of the queue ----

    def needs_prompt(self, uid: str) -> bool:
        return uid in self.scheduler.ledger or uid in self._stock

    def needs_turns(self, name: str) -> bool:
        """Return whether a later attempt may need this attempt's turns; not if the trajectories contain them."""
        attempt = Attempt.named(name)
        reported = self._report(attempt.sample)
        return not reported.stored if reported.attempt == attempt.attempt else self.may_train(name)

    def needs_trajectories(self, name: str) -> bool:
        """Return whether this attempt's trajectories, stored or to come, may be trained or drafted from."""
        attempt = Attempt.named(name)
        drafted = self._predecessor(*attempt.sample) == attempt.attempt and self._report(attempt.sample).stored
        return drafted or self.may_train(name)

    def may_train(self, name: str) -> bool:
        sample = self._sample(Attempt.named(name))
        return sample is not None and sample.state in (*IN_PROGRESS, "finished")

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; :meth:`restore` needs them and the content of the queue."""
        turns = {sample: report.attempt for sample, report in self._reported.items() if report.attempt is not None}
        empty = [sample for sample, report in self._reported.items() if report.empty]
        return {
            **self.scheduler.state_dict(),
            "stock": list(self._stock.items()),
            "reports": sorted(Attempt(*sample, attempt).name for sample, attempt in turns.items()),
            "empty": sorted(self._latest(*sample).name for sample in empty),
            "generation": self._generation,
            "failed": self._failed,
            "filtered": list(self.filtered.items()),
            "filter": self._filter.state_dict(),
            "failures": self._retries.state_dict(),
        }

    def restore(
        self,
        state: dict[str, Any],
        version: int,
        batches_left: int,
        evidence: Mapping[str, Evidence],
        prompts: set[str],
        added: Iterable[tuple[str, int]] = (),
        now: float = 0.0,
    ) -> list[str]:
        """Restore the rollout from an earlier :meth:`state_dict` and newer ``evidence`` of all known attempts, by name.

        ``prompts`` have available data; ``added`` ones came since the state was saved. Return the ids of prompts whose
        data are lost; other prompts replace them.
        """
        self.scheduler.load_state_dict(state)
        self._failed = state["failed"]
        self._filter.load_state_dict(state.get("filter", {}), state["filtered"])
        self._retries.load_state_dict(state.get("failures", []))
        self._stock = dict([*state["stock"], *added])
        self.scheduler.batches_left = batches_left
        prompt_limit = self._whole_updates(self.scheduler.prompt_limit())  # nothing was trained since
        recovery = Recovery(self.scheduler, self._reported, evidence)
        gone = recovery.load(self._stock, prompts, prompt_limit)
        self._failed += len(gone)
        recovery.remember(state["reports"])
        newer = {  # publish() forgets the reports of stale samples, but these are of attempts that regenerated them
            sample: self._reported.pop(sample)
            for sample, reported in list(self._reported.items())
            if (reported.attempt or 0) > self._latest(*sample).attempt
        }
        self.publish(version, batches_left)
        self._reported.update(newer)
        for attempt in recovery.place(self._filter.metric is not None):
            self._waste(attempt.sample)
            if evidence[attempt.name].running:
                self._abandoned.append(attempt.name)
        for name in filter(self.may_train, state["empty"]):
            self._reported.setdefault(sample_of(name), Reported()).empty = True
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

    def _latest(self, uid: str, number: int) -> Attempt:
        return Attempt(uid, number, self.scheduler.ledger.prompt(uid).samples[number].attempt)

    def _sample(self, attempt: Attempt) -> Sample | None:
        """Return the ledger's sample if this is the latest attempt at it."""
        if attempt.uid not in self.scheduler.ledger:
            return None
        sample = self.scheduler.ledger.prompt(attempt.uid).samples[attempt.number]
        return sample if sample.attempt == attempt.attempt else None

    def _report(self, sample: tuple[str, int]) -> Reported:
        return self._reported.get(sample, _NOTHING)

    def _generated(self, report: Ended, uid: str, number: int) -> None:
        if self.scheduler.generate(uid, number, report.tokens, report.first_version):
            return
        if self.rules.stops:
            assert report.first_version is not None
            raise _lagging(self.scheduler.version - report.first_version, self.rules)
        self._waste((uid, number))
        self._abandoned.append(report.name)  # its reward is not needed

    def _waste(self, sample: tuple[str, int]) -> None:
        if self.rules.continues:
            self._wasted += self._forget(sample)
        elif (reported := self._reported.get(sample)) is not None:  # its text is still a draft
            self._wasted += reported.records
            reported.records, reported.empty = [], False

    def _start_over(self, uid: str, number: int) -> None:
        self._wasted += self._forget((uid, number))
        self.scheduler.start_over(uid, number)

    def _forget(self, sample: tuple[str, int]) -> list[Record]:
        return self._reported.pop(sample, Reported()).records

    def _try_again(self, uid: str, number: int, error: str, now: float, broken: bool = False, tries: int = 1) -> bool:
        """Record a failed sample; if it failed too often, drop its prompt and return ``False``."""
        self.scheduler.step.failed += tries > 0
        others = self.scheduler.in_progress - (self.scheduler.ledger.prompt(uid).samples[number].state in IN_PROGRESS)
        error = f"sample {number} of prompt {uid}: {error}"
        if self._retries.failed((uid, number), error, now, others, broken, tries):
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
        stored = self._stored(prompt)
        if not stored:
            error = "the agent loop returned no trajectory for any sample of the prompt"
            # Once more, because a tool may answer otherwise; the model draws the same.
            if self._try_again(uid, 0, error, now, broken=True, tries=TRIES // 2):
                for number in range(len(prompt.samples)):
                    self._start_over(uid, number)
        elif not self._filter.keeps([self._report(sample).scores for sample in stored]):
            self._drop(uid)
        else:
            self._finished_groups[uid], self._new_part = len(prompt.samples), True

    def _stored(self, prompt: Prompt) -> list[tuple[str, int]]:
        samples = [(prompt.uid, number) for number in range(len(prompt.samples))]
        return [sample for sample in samples if not self._report(sample).empty]

    def _drop(self, uid: str) -> None:
        self._finished_groups.pop(uid, None)
        self._new_part = True  # another prompt moves up to the next batch
        samples = self.scheduler.ledger.prompt(uid).samples
        self._retries.forget((uid, number) for number in range(len(samples)))
        for number, sample in enumerate(samples):
            self._wasted += self._forget((uid, number))
            if sample.state in IN_PROGRESS:
                self._abandoned.append(Attempt(uid, number, sample.attempt).name)
        self.scheduler.drop(uid)


def _lagging(staleness: int, rules: Rules) -> RuntimeError:
    return RuntimeError(
        f"a trajectory has staleness {staleness}, and 0 to {rules.max_staleness} is allowed (max_staleness): check "
        "whether a rollout server runs without the latest weights (metrics training/off_policy/*)"
    )
