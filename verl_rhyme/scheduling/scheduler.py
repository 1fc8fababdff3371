"""The pipeline's scheduler: what to load, what to run, when to collect a batch, what to train on.

What holds at all times (:mod:`verl_rhyme.scheduling.rules` has the terms):

- At most n update batches of prompts are in flight. They are loaded, and start, when a policy is published.
- The oldest batch goes first, in it the prompts expected longest (:mod:`.admission`).
- What runs at a new version continues under it; each token keeps its version and log-probability.
- Whole groups are trained as they finish; an update batch is the first of them (:mod:`.collection`).
- An update waits only for what would otherwise exceed ``max_staleness``; what exceeds it all the same is regenerated.

On-policy more than one batch may start as well; what an update passed by is regenerated. With ``Rules.rounds`` (tail
batching, RollPacker, NSDI'26) it is put off until an update's worth of such prompts has a round of its own, in which
nothing else starts: no prompt waits for ever, and each is trained once. Prompts expected among the longest are put off
when they are loaded, before anything of them is made.

Attempts can get lost, with their worker or with their report, and can be busy outside the engine (a tool, a judge) when
it stops: an attempt that nobody knows of, or that the others have waited for long enough, is abandoned, and its sample
starts again as another attempt.

A pure state machine: events are method calls, and time comes in as an argument.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Any

from verl_rhyme.scheduling.admission import startable
from verl_rhyme.scheduling.collection import awaits, batch, promisable, suffices
from verl_rhyme.scheduling.ledger import Collected, Ledger, StepCounts
from verl_rhyme.scheduling.rules import STOP_WAIT_S, Rules
from verl_rhyme.scheduling.samples import ON_THEIR_WAY, Sample, State

#: However small an update batch is, so many failures are no accident.
_HOPELESS = 16
#: Update batches whose prompts' expected lengths say which are the longest.
_COMPARED = 4


class Scheduler:
    """See the module. The order of calls in a step::

        begin(version) -> stale samples             the policy is new
        loadable() -> load(uid, n) ...              until it says 0; also between the events below
        dispatch() -> samples to start
        generate(...), finish(...), drop(...) ...   until enough(); abandon(...) what is lost, fail(...) till hopeless()
        interrupt(...), finish(...) ...             once the engines were stopped, until settled()
        give_up() -> attempts not waited for
        collect()                                   the update batch, if ready(); else on with dispatch()

    Where engines do not stop (``Rules.stops``), events, ``progress(...)`` and ``dispatch()`` go on at all times, also
    between ``collect()`` and ``begin()``, and a batch is collected once it is enough(), settled() and ready(). New
    weights may reach engines, and what they interrupt may report, before ``begin()`` or after.

    Raises:
        ValueError: An event that cannot be (see :class:`Ledger`), or rules that contradict each other.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.ledger = Ledger(rules.unit)
        self.version = 0
        self.batches_left: int | None = None
        self.step = StepCounts()
        self._training = False  # a batch was collected, and the policy it makes is not there yet
        self._owed = 0  # prompts to load in place of those that were dropped; below 0: so many drops are not replaced
        self._promised: dict[str, None] = {}  # prompts that the next batch will have, in this order
        self._own_round = False  # prompts that were put off run, and no others
        self._expected: deque[float] = deque(maxlen=_COMPARED * rules.batch_prompts)  # of the latest prompts
        self._sorted: list[float] = []  # the same, sorted
        self._failed: set[int] = set()  # numbers of those that failed since the last that came to its end, or update

    # ---- loading ----

    def loadable(self) -> int:
        """Prompts that may be loaded now."""
        if len(self.ledger) and self.rules.refill == "when_empty":
            return max(0, self._owed)
        return max(0, int(min(self.load_size() - self._held, self._needed)))

    def load_size(self) -> int:
        """Prompts in flight at most, those to come in place of others included, and those put off not."""
        if len(self.ledger) and self.rules.refill == "when_empty":
            return len(self.ledger) + self._owed
        left = math.inf if self.batches_left is None else max(0, self.batches_left)
        batches = 1 if self._own_round else min(self.rules.batches, left)
        return math.ceil(round(batches * self.rules.batch_prompts, 6))

    def owe(self, load_size: int) -> None:
        """So many prompts the load is to have, those that are here included; where none is, the next is as ever."""
        self._owed = load_size - self._held if len(self.ledger) else 0

    @property
    def _held(self) -> int:
        """Prompts in flight, but for those put off."""
        if self._by_prompts or self.rules.refill == "when_empty":
            return len(self.ledger) - len(self.ledger.put_off)
        samples = self.ledger.tally.untrained - sum(self.ledger.put_off.values())
        return samples * self.rules.batch_prompts // self.rules.batch_samples

    @property
    def _needed(self) -> float:
        """Prompts that the updates until training ends need beside those that are here, of tail batching."""
        if self.batches_left is None or not self.rules.rounds:
            return math.inf
        if self._by_prompts:
            return self.batches_left * self.rules.batch_prompts - len(self.ledger)
        samples = self.batches_left * self.rules.batch_samples - self.ledger.tally.untrained
        return samples * self.rules.batch_prompts // self.rules.batch_samples

    @property
    def _to_come(self) -> int:
        """Prompts that are yet to be loaded; of tail batching those in place of what was put off meanwhile, too."""
        return self.loadable() if self.rules.rounds else max(0, self._owed)

    @property
    def _by_prompts(self) -> bool:
        """Prompts are counted; else samples, for prompts leave one sample at a time."""
        return self.rules.unit == "group"

    @property
    def _batch(self) -> int:
        """An update batch, in prompts or in samples."""
        return self.rules.batch_prompts if self._by_prompts else self.rules.batch_samples

    @property
    def _put_off(self) -> int:
        """What was put off, in prompts or in samples."""
        return len(self.ledger.put_off) if self._by_prompts else sum(self.ledger.put_off.values())

    def load(self, uid: str, samples: int) -> None:
        """Take in a prompt; ``samples`` responses of it are wanted."""
        self.ledger.load(uid, samples)
        self.step.loaded += 1
        self._owed = max(0, self._owed - 1)

    def expect(self, uid: str, tokens: float) -> None:
        """A response of this prompt is expected to have so many tokens; one that is not here is passed over.

        One of the longest (``Rules.put_off``) of which nothing has started is put off.
        """
        self.ledger.expect(uid, tokens)
        if not self.rules.put_off or uid not in self.ledger:
            return
        if len(self._expected) == self._expected.maxlen:
            del self._sorted[bisect_left(self._sorted, self._expected[0])]
        self._expected.append(tokens)
        insort(self._sorted, tokens)
        samples = self.ledger.prompt(uid).samples
        left = 2 if self.batches_left is None else self.batches_left  # one is to remain for this round
        put_off = self._put_off + (1 if self._by_prompts else len(samples))
        if self._own_round or put_off > self._batch * min(1, left - 1) or any(s.attempt >= 0 for s in samples):
            return
        if len(self._sorted) >= self.rules.batch_prompts:
            longest = self._sorted[int((1 - self.rules.put_off) * len(self._sorted))]
            if tokens >= longest > self._sorted[0]:
                self.ledger.postpone(uid)

    def dispatch(self, limit: int | None = None, min_starts: int = 1) -> list[tuple[str, int]]:
        """Start pending samples, in the order in which the engine should take them (:mod:`.admission`).

        Args:
            limit: Samples that may run at a time, those included that do already; ``None``: all.
            min_starts: Start none before so many may be started: each start is a message.
        """
        room = None if limit is None else limit - self.running
        if (room is not None and room < min_starts) or not self.ledger.tally.samples["pending"]:
            return []
        started = list(islice(startable(self.rules, self.ledger, self._training), room))
        for uid, number in started:
            # What does not span versions is all of the version it tells when it was stopped.
            self.ledger.start(uid, number, self.version if self.rules.spans_versions else None)
        return started

    def oldest_versions(self, uids: Iterable[str]) -> list[int]:
        """Of the policy that may answer samples of these prompts which start now: with tokens of an older one they
        would be too stale when they are trained. Where replicas take versions one by one; else any is new enough.
        """
        rules = self.rules
        if not rules.one_by_one:
            return [0 for _ in uids]
        if rules.take != "loaded":  # any of the next updates may take it
            return [self.version for _ in uids]
        newest = self.version + self._training  # or it would wait for an update that waits for it
        updates = (self.ledger.place(self.ledger.prompt(uid)) // rules.batch_prompts for uid in uids)
        return [max(0, min(newest, newest - rules.max_staleness + update)) for update in updates]

    @property
    def running(self) -> int:
        """Samples that are started, and have not told that they ended."""
        return self.ledger.tally.samples["running"]

    # ---- events ----

    def generate(self, uid: str, number: int, tokens: int, first_version: int | None) -> bool:
        """A response came to its end. Of a dropped prompt it is nobody's any more.

        One in which the policy said nothing (``first_version`` is ``None``) counts as the current policy's.

        Returns:
            Whether it may be trained. If not (its replica lagged behind), it is generated anew, and the attempt is to
            end.
        """
        if uid not in self.ledger:
            return False
        self.ledger.generate(uid, number, tokens, self.version if first_version is None else first_version)
        return not self._regenerate_stale(uid, number)

    def progress(self, uid: str, number: int, first_version: int | None) -> bool:
        """The oldest token of a running response is of ``first_version``; ``None``: it has none yet.

        Without this what spans versions is taken for as old as its start: a request that queued over a version change
        is younger, one on a replica that lags behind is older. Other rules need not be told.

        Returns:
            As :meth:`generate`.
        """
        if uid not in self.ledger:
            return False
        if not self.rules.spans_versions:  # it tells when it is cut short
            return True
        self.ledger.progress(uid, number, self.version if first_version is None else first_version)
        return not self._regenerate_stale(uid, number)

    def finish(self, uid: str, number: int, good: bool = True) -> None:
        """A generated response has its reward; ``good``: its prompt does not fail when all of them have."""
        if uid in self.ledger:
            self.ledger.finish(uid, number)
            if good and self._failed and self.ledger.prompt(uid).complete("finished", "trained"):
                self._failed.clear()

    def interrupt(self, uid: str, number: int, tokens: int, first_version: int | None) -> bool:
        """A response was cut short after ``tokens``.

        Returns:
            Whether it goes on where it stood; if not, its text is at most a draft.
        """
        if uid not in self.ledger:
            return False
        self.step.interrupted += 1
        oldest = first_version if tokens else None
        goes_on = self.rules.continues and (oldest is None or oldest >= self._oldest_trained)
        if not goes_on:
            self.step.wasted_tokens += tokens
            oldest = None
        self.ledger.interrupt(uid, number, tokens, oldest)
        return goes_on

    def abandon(self, uid: str, number: int) -> None:
        """An attempt is lost: nobody knows of it any more, and it has not told how it ended."""
        if uid not in self.ledger:
            return
        sample = self.ledger.prompt(uid).samples[number]
        if not self.rules.continues and sample.first_version is not None:
            self.step.wasted_tokens += sample.kept_tokens
            self.ledger.forget(uid, number)
        self.ledger.abandon(uid, number)
        self.step.abandoned += 1

    def drop(self, uid: str) -> None:
        """A prompt is lost or was filtered: another may be loaded in its place."""
        if uid in self.ledger:
            self.step.wasted_tokens += self.ledger.prompt(uid).untrained_tokens
            self.step.dropped += 1
            self.ledger.drop(uid)
            self._promised.pop(uid, None)
            self._owed += 1

    def fail(self, uid: str) -> None:
        """A sample failed, and its prompt is dropped."""
        if uid in self.ledger:
            self._failed.add(self.ledger.prompt(uid).number)
            self.drop(uid)

    def hopeless(self) -> int:
        """Prompts that were loaded one after another, as many as an update has, failed, and none got done meanwhile.

        In the order of loading, for bad prompts may all fail before the first good one is done, or be all that is left
        of a load.

        Returns:
            How many; 0 as long as it is not hopeless.
        """
        enough, run = max(self.rules.batch_prompts, _HOPELESS), 0
        for number in sorted(self._failed):
            run = run + 1 if number - 1 in self._failed else 1
            if run == enough:
                return run
        return 0

    # ---- harvest ----

    def enough(self, rewarded: bool = False) -> bool:
        """The engines may be stopped: a batch is full, or holds enough tokens, and nothing that must not wait runs.

        (Where engines run on, it may be collected as soon as it is :meth:`settled`.) Never while the policy is trained.

        Args:
            rewarded: Count only what has its reward, which may yet drop a prompt.
        """
        if self._training:
            return False
        if awaits(self.rules, self.ledger, self.version, rewarded):
            return False
        return suffices(self.rules, self.ledger, self._to_come, rewarded)

    def settled(self, stopped_s: float) -> bool:
        """The engines having been stopped (where they run on: it being enough) for so many seconds, all has come that
        is waited for.

        Until :data:`~.rules.STOP_WAIT_S` these are: attempts that may still ask stopped engines for tokens, and rewards
        of what is to be the update batch. Rewards of others change nothing; but a response whose reward is slow is not
        passed by for a later one, or on-policy those that are slow to judge would be generated again.
        """
        if stopped_s >= STOP_WAIT_S:
            return True
        if self.rules.stops and self.running:
            return False
        if not self.enough():  # no reward makes it so
            return True
        if not self.ready():
            return False
        if not self.ledger.tally.samples["generated"]:
            return True
        taken = batch(self.rules, self.ledger, self.version, "generated", "finished", promised=self._promised)
        return all(prompt.samples[number].state == "finished" for prompt, number in taken)

    def give_up(self) -> list[tuple[str, int]]:
        """Abandon what still runs though the engines are stopped (if they are); rewards may come later.

        Returns:
            The samples whose attempts were abandoned.
        """
        running = self.ledger.samples("running") if self.rules.stops else ()
        given_up = [(prompt.uid, number) for prompt, number, _ in running]
        for uid, number in given_up:
            self.abandon(uid, number)
        return given_up

    def promise(self, uids: Iterable[str], samples: int = 1) -> list[str]:
        """The trainer would begin with these prompts, if they have so many samples: those that the next update batch
        will have now, whatever else comes (:func:`~.batch.promisable`)."""
        if self._training:
            return []
        found = promisable(self.rules, self.ledger, self.version, uids, self._promised)
        if sum(len(self.ledger.prompt(uid).samples) for uid in found) < samples:
            return []
        self._promised.update(dict.fromkeys(found))
        return found

    def ready(self) -> bool:
        """The update batch may be taken."""
        return self.enough(rewarded=True)

    def collect(self) -> Collected:
        """Take the update batch (:mod:`.collection`).

        Raises:
            ValueError: It is not :meth:`ready`.
        """
        if not self.ready():
            raise ValueError("there is nothing to harvest yet: ask ready() first")
        taken = batch(self.rules, self.ledger, self.version, "finished", promised=self._promised)
        taken.sort(key=lambda at: at[0].samples[at[1]].tokens)
        samples = [prompt.samples[number] for prompt, number in taken]
        collected = Collected(
            samples=[(prompt.uid, number) for prompt, number in taken],
            lengths=[sample.tokens for sample in samples],
            waited=[prompt.waited for prompt, _ in taken],
            staleness=[self.version - _version(sample) for sample in samples],
            unit=self.rules.unit,
        )
        self._training, self._promised = True, {}
        for uid, number in harvest.samples:
            self.ledger.train(uid, number)
        self.ledger.wait()
        if self.batches_left is not None:
            self.batches_left -= 1
        if self.rules.rounds:
            self._choose_round()
        self._failed.clear()
        return harvest

    def begin(self, version: int, batches_left: int | None = None) -> list[tuple[str, int]]:
        """The policy's ``version`` is current from now on.

        Args:
            version: It counts the updates.
            batches_left: Update batches until training ends: no more prompts are loaded than these train; ``None``:
                it does not end.

        Returns:
            Samples whose text, finished, generated, kept or (where it spans versions) in the making, is too stale to
            be trained: they are generated anew, and attempts at them are to end. What runs otherwise tells when it
            ends or is cut short, and is judged then.
        """
        self.version, self.step, self._training, self._promised = version, StepCounts(), False, {}
        self.batches_left = batches_left
        self._release_for_the_last()  # a run that was resumed may have other rules, or fewer updates left
        states: tuple[State, ...] = (*ON_THEIR_WAY, "finished")
        untrained = [(prompt.uid, number) for state in states for prompt, number, _ in self.ledger.samples(state)]
        stale = [sample for sample in untrained if self._regenerate_stale(*sample)]
        for prompt, number, sample in self.ledger.samples("pending"):
            if sample.first_version is not None and sample.first_version < self._oldest_trained:
                self.step.wasted_tokens += sample.kept_tokens
                self.ledger.forget(prompt.uid, number)
                stale.append((prompt.uid, number))
        return stale

    def _choose_round(self) -> None:
        """What an update passed by is put off. The next one trains prompts that were put off when they make a batch, or
        when too few others are left."""
        for prompt in self.ledger:
            if not prompt.put_off:
                self.ledger.postpone(prompt.uid)
        before = self._put_off
        self._own_round = before >= self._batch
        for uid in list(self.ledger.put_off) if self._own_round else ():
            if before - self._put_off >= self._batch:
                break
            self.ledger.postpone(uid, put_off=False)
        self._release_for_the_last()

    def _release_for_the_last(self) -> None:
        """What was put off waits no longer where the updates after this one could not train it."""
        most = 0 if not self.rules.rounds else math.inf
        if self.rules.rounds and self.batches_left is not None:
            most = max(0, self.batches_left - 1) * self._batch
        if self._put_off > most:
            for uid in list(self.ledger.put_off):
                self.ledger.postpone(uid, put_off=False)

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """Plain, for JSON."""
        return {
            "version": self.version,
            "owed": self._owed,
            "training": self._training,
            "expected": list(self._expected),
            "own_round": self._own_round,
            "ledger": self.ledger.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.version, self._owed = state["version"], state["owed"]
        self._promised = {}  # whoever was promised them asks again
        self._training = state["training"]
        self._expected.extend(state["expected"])
        self._sorted, self._own_round = sorted(self._expected), self.rules.rounds and state["own_round"]
        self.ledger.load_state_dict(state["ledger"])

    def restore(
        self, uid: str, number: int, attempt: int, state: State, tokens: int, first_version: int | None
    ) -> bool:
        """After ``load_state_dict`` (all that was on its way is pending then), and ``begin`` where the policy is newer:
        put a sample where evidence shows it, which came after the state was saved.

        What became of tokens before is not counted again.

        Args:
            uid: Of its prompt.
            number: In its group.
            attempt: Its latest.
            state: ``pending``: interrupted or never started. ``running``, ``generated``, ``finished``.
            tokens: Those that it has, or (``running``) goes on from, or (``pending``) was cut short after.
            first_version: Of the oldest of them; ``None``: it has none. What runs is taken for as old as that, else
                for the current policy's, until :meth:`progress`.

        Returns:
            As :meth:`generate` and :meth:`interrupt`: whether its text may be trained, or gone on from.

        Raises:
            ValueError: The ledger knows of a later attempt, or that this one was further; or no sample is like this.
        """
        if uid not in self.ledger:
            return False
        if first_version is None and state in ("generated", "finished"):
            first_version = self.version
        if state in ("pending", "running") and not (self.rules.continues and tokens):
            first_version = None
        goes_on = self.rules.continues and (first_version is None or first_version >= self._oldest_trained)
        self.ledger.restore(
            uid, number, attempt, state, tokens, None if state == "pending" and not goes_on else first_version
        )
        if state == "pending":
            return goes_on
        if state == "running" and self.rules.spans_versions:
            self.ledger.progress(uid, number, self.version)
        return not self._regenerate_stale(uid, number)

    # ---- within ----

    @property
    def _oldest_trained(self) -> int:
        """Version of the oldest token that may be trained now."""
        return self.version - self.rules.max_staleness

    def _regenerate_stale(self, uid: str, number: int) -> bool:
        """Whether the sample's text was too stale to be trained; then it is generated anew."""
        sample = self.ledger.prompt(uid).samples[number]
        oldest = sample.oldest_version
        if oldest is None or oldest >= self._oldest_trained:
            return False
        self.step.stale += 1
        self.step.wasted_tokens += sample.kept_tokens
        self.ledger.regenerate(uid, number)
        return True


def _version(sample: Sample) -> int:
    assert sample.first_version is not None, "a finished sample has tokens, and they a version"
    return sample.first_version
