"""Recovery of a rollout after the loss of its coordinator or of the training run.

The saved state is from the last batch, and no sample runs in it. The evidence is newer: ended attempts, what they
reported, and attempts in progress. Each sample gets the state that both show; work without evidence is repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from verl_rhyme.scheduling.attempts import Attempt, Reported
from verl_rhyme.scheduling.batch import Record
from verl_rhyme.scheduling.samples import State
from verl_rhyme.scheduling.scheduler import Scheduler


class Evidence(NamedTuple):
    """Facts about an attempt after the loss of its coordinator."""

    status: str | None = None  # like tokens, first_version, records, scores: of its latest report
    tokens: int = 0
    first_version: int | None = None
    running: bool = False  # by an agent loop worker
    stored: bool = False  # all its trajectories
    reported: bool = True  # its report is present as well
    records: list[Record] = []  # noqa: RUF012  never changed
    scores: list[float] = []  # noqa: RUF012
    #: Its report is present, and the turns that it left are not: neither in TransferQueue nor kept by a worker.
    lost: bool = False

    @property
    def has_turns(self) -> bool:
        """Whether it has turns to go on from. An interruption that its worker still reports has none yet."""
        return self.status == "generated" or (self.status == "interrupted" and not (self.lost or self.running))


class Recovery:
    """The steps of :meth:`Rollout.restore <verl_rhyme.scheduling.rollout.Rollout.restore>`, on a scheduler with its
    saved state: :meth:`load`, :meth:`remember`, then (after the version is published) :meth:`place`.

    It fills ``reported``, the reports of untrained samples; ``evidence`` is of all known attempts, by name.
    """

    def __init__(
        self, scheduler: Scheduler, reported: dict[tuple[str, int], Reported], evidence: Mapping[str, Evidence]
    ) -> None:
        self._scheduler, self._reported, self._evidence = scheduler, reported, evidence
        self._latest: dict[tuple[str, int], Attempt] = {}

    def load(self, stock: dict[str, int], prompts: set[str], prompt_limit: int) -> list[str]:
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
        begun = {Attempt.named(name).uid for name in self._evidence} & stock.keys()
        spare = prompt_limit - len(ledger) - len(begun)  # for prompts without evidence
        for uid in list(stock):  # in the order in which they were loaded since
            if begun and (uid in begun or spare > 0):
                scheduler.load(uid, stock.pop(uid))
                spare -= uid not in begun
                begun.discard(uid)
        return gone

    def remember(self, counted: Iterable[str]) -> None:
        """Record which attempts left turns to continue from, and the latest attempt at each sample.

        A sample whose turns are lost starts over. The reports of ``counted`` attempts were counted in the saved state.
        """
        ledger, counted = self._scheduler.ledger, set(counted)
        for attempt in sorted(map(Attempt.named, {*self._evidence, *counted})):
            if attempt.uid not in ledger:
                continue
            sample = ledger.prompt(attempt.uid).samples[attempt.number]
            if sample.state == "trained":  # no attempt continues from it
                continue
            known = self._evidence.get(attempt.name, Evidence())
            if known.has_turns and (attempt.name in counted or attempt.attempt >= sample.attempt):
                reported = self._reported[attempt.sample] = Reported.of(attempt, known.records)
                reported.stored, reported.scores = known.stored and not known.reported, known.scores
            elif known.lost and attempt.name not in counted and attempt.attempt >= sample.attempt:
                self._scheduler.step.wasted_tokens += max(0, known.tokens - sample.kept_tokens)
            if known.has_turns or known.running:
                self._latest[attempt.sample] = attempt
        for prompt, number, sample in ledger.samples("pending"):
            if sample.tokens and (prompt.uid, number) not in self._reported:
                self._scheduler.start_over(prompt.uid, number)

    def place(self, filters: bool) -> list[Attempt]:
        """Restore samples to the state of their latest attempts; return those not to be trained or continued.

        If groups are filtered by scores (``filters``), a stored sample without scores does not count as finished.
        """
        return [attempt for attempt in self._latest.values() if not self._place(attempt, filters)]

    def _place(self, attempt: Attempt, filters: bool) -> bool:
        sample = self._scheduler.ledger.prompt(attempt.uid).samples[attempt.number]
        known = self._evidence[attempt.name]
        if attempt.attempt < sample.attempt or sample.state != "pending":
            return True
        generated = known.status == "generated"
        state: State
        if generated and known.stored and (known.scores or not filters):
            state = "finished"
        elif known.running:
            state = "generated" if generated else "running"
        else:  # interrupted, or its worker was lost before the reward was reported: it continues from its tokens
            state = "pending"
        before = self._reported.get(attempt.sample)
        if not known.has_turns and before is not None:  # it continues from an earlier attempt
            assert before.attempt is not None
            known = self._evidence[Attempt(*attempt.sample, before.attempt).name]
        return self._scheduler.restore(*attempt, state, known.tokens, known.first_version)
