"""What TransferQueue, the agent loop workers and a checkpoint hold for a rollout: prompts, turns and trajectories.

Texts stay where they are. The rollout keeps the report of the latest attempt that left one, by sample; it decides
whether a later attempt continues or drafts from the turns, and whether the trajectories may be trained.
"""

from __future__ import annotations

from typing import Any

from verl_rhyme.scheduling.attempts import Attempt, AttemptReport, Record
from verl_rhyme.scheduling.samples import IN_PROGRESS, Prompt, Sample
from verl_rhyme.scheduling.scheduler import Scheduler


class QueueContent:
    """Content of the queue, by the samples of a scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.stock: dict[str, int] = {}  # number of samples by prompt that waits to be loaded, in order
        self.reports: dict[tuple[str, int], AttemptReport] = {}  # of the turns left, by untrained sample
        self.ran: list[tuple[float, float]] = []  # start and end of requests, since the last batch
        self.wasted: list[Record] = []  # requests of attempts whose tokens will not be trained
        self.obsolete: list[Attempt] = []  # attempts whose turns are no longer needed

    # ---- what is needed ----

    def needs_prompt(self, uid: str) -> bool:
        return uid in self._scheduler.ledger or uid in self.stock

    def needs_turns(self, attempt: Attempt) -> bool:
        """Return whether a later attempt may need this attempt's turns; not if the trajectories contain them."""
        report = self.reports.get(attempt.sample)
        if report is not None and report.attempt == attempt:
            return report.status != "finished"
        return self.may_train(attempt)

    def needs_trajectories(self, attempt: Attempt) -> bool:
        """Return whether this attempt's trajectories, stored or to come, may be trained or drafted from."""
        report = self.reports.get(attempt.sample)
        drafted = report is not None and report.attempt == attempt and report.stored and self._scheduler.rules.redrafts
        return drafted or self.may_train(attempt)

    def may_train(self, attempt: Attempt) -> bool:
        sample = self.sample(attempt)
        return sample is not None and sample.state in (*IN_PROGRESS, "finished")

    def pop_obsolete(self) -> list[Attempt]:
        """Return attempts, since the last call, whose turns no later one needs."""
        obsolete, self.obsolete = self.obsolete, []
        return obsolete

    def state_dict(self) -> dict[str, Any]:
        reports = self.reports.values()
        return {
            "stock": list(self.stock.items()),
            "reports": sorted(report.attempt.name for report in reports),
            "empty": sorted(report.attempt.name for report in reports if report.empty),
        }

    # ---- samples and their reports ----

    def latest(self, uid: str, number: int) -> Attempt:
        return Attempt(uid, number, self._scheduler.ledger.prompt(uid).samples[number].attempt)

    def sample(self, attempt: Attempt) -> Sample | None:
        """Return the ledger's sample if this is the latest attempt at it."""
        if attempt.uid not in self._scheduler.ledger:
            return None
        sample = self._scheduler.ledger.prompt(attempt.uid).samples[attempt.number]
        return sample if sample.attempt == attempt.attempt else None

    def kept_tokens(self, uid: str, number: int) -> int:
        """Return the tokens from which the next attempt at a sample continues."""
        return self._scheduler.ledger.prompt(uid).samples[number].kept_tokens if (uid, number) in self.reports else 0

    def stored(self, prompt: Prompt) -> list[AttemptReport]:
        """Return the reports of a finished prompt's samples that have trajectories."""
        reports = [self.reports[prompt.uid, number] for number in range(len(prompt.samples))]
        return [report for report in reports if report.stored]

    def replace(self, report: AttemptReport) -> list[Record]:
        """Keep a report in place of that of the attempt it began with; return its new records."""
        before = self.reports.get(report.attempt.sample)
        self.reports[report.attempt.sample] = report
        earlier = before.records if before else []
        known, repeated = ({record["id"] for record in records} for records in (earlier, report.records))
        new = [record for record in report.records if record["id"] not in known]
        lost = [record for record in earlier if record["id"] not in repeated]  # with its turns
        self.ran += [(record["started_at"], record["finished_at"]) for record in new]
        self.wasted += lost
        self._scheduler.step.wasted_tokens += sum(record["response_tokens"] for record in lost)
        if before:
            self.obsolete.append(before.attempt)
        return new

    def finish(self, report: AttemptReport) -> None:
        """Add the reward to the report of a generated response."""
        before = self.reports[report.attempt.sample]
        rewarded = before._replace(status="finished", scores=report.scores, empty=report.empty)
        self.reports[report.attempt.sample] = rewarded

    def waste(self, sample: tuple[str, int]) -> None:
        """Count a sample's text as wasted; where it is regenerated, its text is still a draft."""
        report = self.reports.get(sample)
        if report is None or report.empty or self._scheduler.rules.continues:
            self.forget(sample)
        else:
            self.wasted += report.records
            self.reports[sample] = report._replace(records=[])

    def start_over(self, uid: str, number: int) -> None:
        self.forget((uid, number))
        self._scheduler.start_over(uid, number)

    def forget(self, sample: tuple[str, int]) -> None:
        if (report := self.reports.pop(sample, None)) is not None:
            self.wasted += report.records
            self.obsolete.append(report.attempt)
