"""Recovery of a rollout after the loss of its coordinator or of the training run.

The saved state is from the last batch, and no sample runs in it. The reports of attempts that ended since, or that wait
for their rewards, are newer, and so are the attempts in progress. Each sample gets the state that all of them show.
Work without a report is repeated: so is a response whose worker died before its reward was known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from verl_rhyme.scheduling.attempts import Attempt, AttemptReport, Status
from verl_rhyme.scheduling.samples import State
from verl_rhyme.scheduling.scheduler import Scheduler

#: State of a sample after a report of its latest attempt.
_STATES: dict[Status, State] = {"finished": "finished", "generated": "generated", "interrupted": "pending"}


class Recovery:
    """The steps of :meth:`Rollout.restore <verl_rhyme.scheduling.rollout.Rollout.restore>`, on a scheduler with its
    saved state: :meth:`load`, :meth:`remember`, then (after the version is published) :meth:`place`.

    ``known`` has all known attempts: finished ones, generated ones that wait for their rewards, interrupted ones whose
    turns are present (each with its report), and other running ones (``None``).
    """

    def __init__(self, scheduler: Scheduler, known: Mapping[Attempt, AttemptReport | None]) -> None:
        self._scheduler, self._known = scheduler, known
        self._latest: dict[tuple[str, int], Attempt] = {}
        self.reports: dict[tuple[str, int], AttemptReport] = {}  # by untrained sample

    def load(self, stock: dict[str, int], prompts: Collection[str], prompt_limit: int) -> list[str]:
        """Load the prompts of known attempts, and others of the ``stock`` until ``prompt_limit`` are in flight.

        Prompts that still wait remain in the stock. Return the ids of prompts without available data (``prompts``).
        """
        scheduler, ledger = self._scheduler, self._scheduler.ledger
        gone = [prompt.uid for prompt in ledger if prompt.uid not in prompts]
        for uid in gone:
            scheduler.drop(uid)
        gone += [uid for uid in stock if uid not in prompts]
        for uid in [uid for uid in stock if uid not in prompts or uid in ledger]:
            del stock[uid]
        begun = {attempt.uid for attempt in self._known} & stock.keys()
        spare = prompt_limit - len(ledger) - len(begun)  # for prompts without attempts
        for uid in list(stock):  # in the order in which they were loaded since
            if begun and (uid in begun or spare > 0):
                scheduler.load(uid, stock.pop(uid))
                spare -= uid not in begun
                begun.discard(uid)
        return gone

    def remember(self, counted: Iterable[Attempt]) -> None:
        """Record which attempts left turns to continue from, and the latest attempt at each sample.

        A sample whose turns or trajectories are lost starts over. The saved state has the tokens of ``counted``
        attempts.
        """
        ledger, counted = self._scheduler.ledger, set(counted)
        for attempt in sorted({*self._known, *counted}):
            if attempt.uid not in ledger:
                continue
            sample = ledger.prompt(attempt.uid).samples[attempt.number]
            if sample.state == "trained":  # no attempt continues from it
                continue
            report = self._known.get(attempt)
            if report is not None and attempt in counted and sample.first_version is None:
                report = report._replace(records=[])  # of a draft: they counted as wasted before
            if report is not None and (attempt in counted or attempt.attempt >= sample.attempt):
                self.reports[attempt.sample] = report
            if attempt in self._known and (report is None or not report.empty):  # empty ones are in the saved state
                self._latest[attempt.sample] = attempt
        for prompt in ledger:
            for number, sample in enumerate(prompt.samples):
                report = self.reports.get((prompt.uid, number))
                if sample.state == "finished":  # else the group was regenerated, and the report is a later attempt's
                    lost = report is None or report.attempt.attempt != sample.attempt
                else:
                    lost = report is None and sample.state == "pending" and sample.tokens > 0
                if lost:
                    self._scheduler.start_over(prompt.uid, number)

    def place(self, reports: Mapping[tuple[str, int], AttemptReport]) -> list[Attempt]:
        """Restore samples to the state of their latest attempts; return those not to be trained or continued.

        ``reports``: those of :attr:`reports` that are not too stale by now.
        """
        return [attempt for attempt in self._latest.values() if not self._place(attempt, reports)]

    def _place(self, attempt: Attempt, reports: Mapping[tuple[str, int], AttemptReport]) -> bool:
        sample = self._scheduler.ledger.prompt(attempt.uid).samples[attempt.number]
        if attempt.attempt < sample.attempt or sample.state != "pending":
            return True
        report = self._known[attempt]
        state = "running" if report is None else _STATES[report.status]
        begun_with = report or reports.get(attempt.sample)  # a running one continues from an earlier attempt
        tokens, version = (begun_with.tokens, begun_with.first_version) if begun_with else (0, None)
        if report is None and begun_with is not None and begun_with.status == "finished":
            version = None  # it regenerates a response that was too stale
        return self._scheduler.restore(*attempt, state, tokens, version)
