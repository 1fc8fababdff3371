"""What a rollout goes on from after a loss, of its coordinator or of the whole run.

The saved state is as old as the last batch, and in it nothing runs. Evidence tells what came to pass since: how
attempts ended, what they left, and which are still worked on. Each sample is put where both show it; what neither tells
is done again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from verl_rhyme.scheduling.attempts import Attempt
from verl_rhyme.scheduling.ledger import State
from verl_rhyme.scheduling.remembered import Name, Record, Remembered
from verl_rhyme.scheduling.scheduler import Scheduler


class Evidence(NamedTuple):
    """What is known of an attempt after its coordinator was lost.

    Attributes:
        status: Of its latest report (:data:`~verl_rhyme.scheduling.attempts.Status`); ``None``: nothing.
        tokens, first_version: As reported (:class:`~verl_rhyme.scheduling.attempts.Ended`).
        running: An agent loop worker is about it.
        stored: All its trajectories are stored.
        reported: Its own report is there as well, with its turns.
        records: As reported.
        scores: As reported, where groups are filtered by them.
    """

    status: str | None = None
    tokens: int = 0
    first_version: int | None = None
    running: bool = False
    stored: bool = False
    reported: bool = True
    records: list[Record] = []  # noqa: RUF012  nobody changes it
    scores: list[float] = []  # noqa: RUF012

    @property
    def has_turns(self) -> bool:
        """There are turns to go on from, or to draft from."""
        return self.status in ("interrupted", "generated")


class Recovery:
    """The steps of :meth:`Rollout.restore <verl_rhyme.scheduling.rollout.Rollout.restore>`, which says what is what:
    :meth:`load`, :meth:`remember`, then (the version being published) :meth:`place` and :meth:`recall_scores`.

    Args:
        scheduler: With its state of then.
        remembered: What attempts reported; filled here.
        evidence: By name, all attempts of which anything is known now.
    """

    def __init__(self, scheduler: Scheduler, remembered: Remembered, evidence: Mapping[str, Evidence]) -> None:
        self._scheduler, self._remembered, self._evidence = scheduler, remembered, evidence
        self._latest: dict[Name, Attempt] = {}

    def load(self, stock: dict[str, int], prompts: set[str], load_size: int) -> list[str]:
        """Load what has been loaded since: of which attempts are known, and as many others as there must have been.

        Args:
            stock: Prompts that were handed over; left in it are those that wait to be loaded.
            prompts: Those whose data are there.
            load_size: Prompts of the load.

        Returns:
            Prompts whose data are gone.
        """
        scheduler, ledger = self._scheduler, self._scheduler.ledger
        gone = [prompt.uid for prompt in ledger if prompt.uid not in prompts]
        for uid in gone:
            scheduler.drop(uid)
        gone += [uid for uid in stock if uid not in prompts]
        for uid in [uid for uid in stock if uid not in prompts or uid in ledger]:
            del stock[uid]
        begun = {Attempt.named(name).uid for name in self._evidence} & stock.keys()
        spare = load_size - len(ledger) - len(begun)  # for those of which nothing is known
        for uid in list(stock):  # in the order in which they were loaded since
            if begun and (uid in begun or spare > 0):
                scheduler.load(uid, stock.pop(uid))
                spare -= uid not in begun
                begun.discard(uid)
        return gone

    def remember(self, counted: Iterable[str]) -> None:
        """What attempts have left that others may go on from, and which one is the latest at each sample.

        Args:
            counted: Names of attempts whose reports were counted in the saved state.
        """
        ledger, told = self._scheduler.ledger, set(counted)
        for attempt in sorted(map(Attempt.named, {*self._evidence, *told})):
            if attempt.uid not in ledger:
                continue
            sample = ledger.prompt(attempt.uid).samples[attempt.number]
            if sample.state == "trained":  # nobody goes on from it
                continue
            known = self._evidence.get(attempt.name, Evidence())
            if known.has_turns and (attempt.name in told or attempt.attempt >= sample.attempt):
                self._remembered.ended(attempt, known.records)
                if known.stored and not known.reported:
                    self._remembered.stored.add(attempt.sample)
            if attempt.name in self._evidence:
                self._latest[attempt.sample] = attempt

    def place(self, filters: bool) -> Iterator[Attempt]:
        """Put samples where the latest attempts have brought them.

        Args:
            filters: What is stored without scores is not finished: its group could not be filtered by them.

        Yields:
            Attempts whose tokens may not be trained any more, nor gone on from.
        """
        for attempt in self._latest.values():
            if not self._place(attempt, filters):
                yield attempt

    def recall_scores(self) -> None:
        """What finished samples scored, for groups to be filtered by."""
        for prompt, number, sample in self._scheduler.ledger.samples("finished"):
            known = self._evidence.get(Attempt(prompt.uid, number, sample.attempt).name, Evidence())
            self._remembered.scores[prompt.uid, number] = known.scores

    def _place(self, attempt: Attempt, filters: bool) -> bool:
        sample = self._scheduler.ledger.prompt(attempt.uid).samples[attempt.number]
        known = self._evidence[attempt.name]
        if attempt.attempt < sample.attempt or sample.state != "pending" or not (known.has_turns or known.running):
            return True
        generated = known.status == "generated"
        state: State
        if generated and known.stored and (known.scores or not filters):
            state = "finished"
        elif known.running:
            state = "generated" if generated else "running"
        else:  # cut short, or its worker was lost before it could tell the reward: it goes on from what it had said
            state = "pending"
        before = self._remembered.attempt.get(attempt.sample)
        if not known.has_turns and before is not None:  # what it goes on from
            known = self._evidence[Attempt(*attempt.sample, before).name]
        return self._scheduler.restore(*attempt, state, known.tokens, known.first_version)
