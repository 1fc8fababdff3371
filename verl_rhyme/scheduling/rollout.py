"""A run's rollout, but for its messages: prompts in stock, attempts and their reports, and what a batch is made of.

Around the :class:`~verl_rhyme.scheduling.scheduler.Scheduler`, which counts tokens and versions: who is started under
which name and from whose text, whose word counts, what an ended attempt leaves to others. A pure state machine too; the
coordinator (``coordinator/coordinator.py``) carries its messages.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from verl_rhyme.placement.assignment import Assignment
from verl_rhyme.scheduling.admission import priority
from verl_rhyme.scheduling.attempts import Attempt, Ended, Start, sample_of
from verl_rhyme.scheduling.ledger import ON_THEIR_WAY, StepCounts
from verl_rhyme.scheduling.recovery import Evidence, Recovery
from verl_rhyme.scheduling.remembered import Batch, Hopeless, Name, Record, Remembered
from verl_rhyme.scheduling.rules import Rules
from verl_rhyme.scheduling.samples import Prompt
from verl_rhyme.scheduling.scheduler import Scheduler

#: Numbers of attempts that each generation has for itself.
_ATTEMPTS = 1 << 10
#: However small an update is, so many groups in a row with nothing to learn from are no accident: where one in ten is
#: kept, one of seven runs of a million groups has such a row.
_FRUITLESS = 128


class Rollout:
    """See the module. Whoever drives it asks :meth:`wanted`, hands prompts, sends what :meth:`fill` and
    :meth:`take_abandoned` give, and tells :meth:`ended`; between, the scheduler is asked as its class says.

    Args:
        rules: The scheduler's.
        filters: The metric by which groups are dropped whose trajectories all have one score (DAPO, arXiv:2503.14476,
            section 3.2); ``None``: none are.
        generation: Another for each that takes up what the one before it had begun: no name is given twice.
    """

    def __init__(self, rules: Rules, filters: str | None = None, generation: int = 0) -> None:
        self.scheduler = Scheduler(rules)
        self.scheduler.ledger.first_attempt = generation * _ATTEMPTS
        self._generation = generation
        self._filters = filters
        self._stock: dict[str, int] = {}  # prompts that wait to be loaded, in order, and how many samples of each
        self._expected: dict[str, float] = {}  # of those, where it is known
        self._remembered = Remembered()
        self._ran: list[Record] = []  # of the attempts that ended since the last batch
        self._abandoned: list[str] = []  # attempts that are to end
        self._obsolete: list[str] = []  # attempts whose reports are of no use any more
        self._wasted: list[Record] = []
        self._failed = 0
        self._filtered: Counter[float] = Counter()
        self._fruitless: Counter[float] = Counter()  # by their score, groups dropped since the filter kept one
        # Of prompts that are finished and were in no part yet, in the order of their end, how many samples they have.
        self._whole: dict[str, int] = {}
        self._news = False  # since a part was asked for

    @property
    def rules(self) -> Rules:
        return self.scheduler.rules

    @property
    def filtered(self) -> dict[float, int]:
        """By their common score, groups that were dropped since the last batch."""
        return dict(self._filtered)

    # ---- prompts ----

    def hand(self, prompts: Iterable[tuple[str, int]]) -> None:
        """Prompts for the stock: uid, and how many samples are wanted. One that is there already is not taken twice."""
        for uid, samples in prompts:
            if uid not in self.scheduler.ledger:
                self._stock.setdefault(uid, samples)

    def expect(self, tokens: Mapping[str, float]) -> None:
        """How many tokens a response of each of these prompts is expected to have."""
        for uid, length in tokens.items():
            if not math.isfinite(length):
                continue
            if uid in self._stock:
                self._expected[uid] = length
            else:
                self.scheduler.expect(uid, length)

    def wanted(self) -> int:
        """Prompts that are to be handed over now."""
        return max(0, self.scheduler.loadable() - len(self._stock))

    # ---- versions ----

    def publish(self, version: int, batches_left: int | None) -> None:
        """The policy ``version`` is current: what may not be trained any more is to be generated anew.

        Args:
            version: It counts the updates.
            batches_left: Update batches until training ends: no more prompts are loaded than these take.
        """
        under_way = {a.sample: a for a in self.attempts()}
        before = self.scheduler.step
        stale = self.scheduler.begin(version, batches_left)
        self.scheduler.step = before + self.scheduler.step  # reported with the next batch
        for sample in stale:
            self._waste(sample)
            if sample in under_way:  # some wait for a reward yet
                self._abandoned.append(under_way[sample].name)
        self._news = True

    # ---- attempts ----

    def attempts(self) -> list[Attempt]:
        """Those that somebody works on."""
        found = []
        for state in ON_THEIR_WAY:
            found += [Attempt(p.uid, number, s.attempt) for p, number, s in self.scheduler.ledger.samples(state)]
        return found

    def fill(self, limit: int | None = None, min_starts: int = 1) -> list[Start]:
        """Load what may be loaded of the stock, start what may be started (:meth:`Scheduler.dispatch`)."""
        self.stock_up()
        rules, starts = self.rules, []
        started = self.scheduler.dispatch(limit, min_starts)
        versions = self.scheduler.oldest_versions(uid for uid, _ in started)
        for (uid, number), version in zip(started, versions, strict=True):
            prompt = self.scheduler.ledger.prompt(uid)
            before = self._predecessor(uid, number)
            predecessor = None if before is None else Attempt(uid, number, before).name
            name = Attempt(uid, number, prompt.samples[number].attempt).name
            stored = (uid, number) in self._remembered.stored
            assignment = Assignment(oldest_version=version, priority=priority(rules, prompt))
            starts.append(Start(name, predecessor, rules.continues, stored, assignment))
        return starts

    def stock_up(self) -> None:
        """Load what may be loaded of the stock."""
        load_size = self.scheduler.load_size()
        while count := min(self.scheduler.loadable(), len(self._stock)):  # one that is put off makes room for another
            for _ in range(count):
                uid = next(iter(self._stock))
                self.scheduler.load(uid, self._stock.pop(uid))
                if (expected := self._expected.pop(uid, None)) is not None:
                    self.scheduler.expect(uid, expected)
        self.scheduler.owe(load_size)  # the stock may hold a part of a load only: what was left over before

    def kept_tokens(self, uid: str, number: int) -> int:
        """Tokens that the next attempt at a sample goes on from."""
        if not self.rules.continues or self._predecessor(uid, number) is None:
            return 0
        return self.scheduler.ledger.prompt(uid).samples[number].kept_tokens

    def _predecessor(self, uid: str, number: int) -> int | None:
        if not (self.rules.continues or self.rules.redrafts):
            return None
        return self._remembered.attempt.get((uid, number))

    def ended(self, report: Ended) -> list[Record]:
        """What an attempt tells of its end. What one tells whom nobody waits for any more changes nothing.

        Returns:
            Of its requests those that nobody has told before: an attempt tells those that it goes on from, too.

        Raises:
            Hopeless: Prompt after prompt fails, or the filter drops group after group.
            RuntimeError: Its tokens are of a policy that must not have made them.
        """
        attempt = Attempt.named(report.name)
        uid, number, _ = attempt
        sample = self._on_its_way(attempt)
        if sample is None:
            return []
        if report.status == "failed":
            self._fail(uid, f"sample {number} of prompt {uid}: {report.error}")
        elif report.status == "lost":
            self.scheduler.abandon(uid, number)
        elif report.status == "finished":
            if sample.state == "generated":
                self._remembered.scores[uid, number] = report.scores
                if report.empty:
                    self._remembered.empty.add((uid, number))
                else:
                    self._remembered.stored.add((uid, number))
                    self._obsolete.append(report.name)
                self.scheduler.finish(uid, number, bool(self._stored(self.scheduler.ledger.prompt(uid))))
                self._filter(uid)
                self._see_whole(uid)
        elif sample.state == "running":
            before = {record["id"] for record in self._remembered.records.get(attempt.sample, ())}
            if (earlier := self._remembered.attempt.get(attempt.sample)) is not None:
                self._obsolete.append(Attempt(uid, number, earlier).name)
            records = self._remembered.ended(attempt, report.records)
            new = [record for record in records if record["id"] not in before]
            self._ran += new
            if report.status == "generated":
                self._generated(report, uid, number)
            elif not self.scheduler.interrupt(uid, number, report.tokens, report.first_version):
                self._waste((uid, number))
            return new
        return []

    def lost(self, names: Iterable[str]) -> list[str]:
        """Nobody knows of these attempts any more: those of them that were waited for, which start again."""
        lost = [name for name in names if self._on_its_way(Attempt.named(name)) is not None]
        for name in lost:
            self.scheduler.abandon(*Attempt.named(name).sample)
        return lost

    def give_up(self) -> list[str]:
        """The engines stand still: whoever has not reported how it ended is busy elsewhere, and starts again."""
        running = {a.sample: a.name for a in self.attempts()}
        given_up = [running[sample] for sample in self.scheduler.give_up()]
        self._abandoned += given_up
        return given_up

    def take_abandoned(self) -> list[str]:
        """Attempts that are to end without a word, since the last call."""
        abandoned, self._abandoned = self._abandoned, []
        return abandoned

    def take_obsolete(self) -> list[str]:
        """Attempts whose reports nobody asks for any more, since the last call: another came after, or their
        trajectories say the same."""
        obsolete, self._obsolete = self._obsolete, []
        return obsolete

    # ---- batches ----

    def part(self, samples: int) -> list[str]:
        """Attempts that the next update batch will have, whatever else comes: whole groups that are finished.

        Where batches are taken as they were loaded (``Rules.take``) that changes nothing. Others have then what is
        finished first, which need not be the shortest; trajectories that are trained one by one
        (``Rules.unit``) are told where all of their prompt's are there.

        Args:
            samples: Fewer are not told; at least 1.

        Returns:
            Those that were not told before, in the order in which their groups were done.
        """
        if not self._news or sum(self._whole.values()) < samples:
            return []
        self._news = False
        found = self.scheduler.promise(self._whole, samples)
        for uid in found:
            del self._whole[uid]
        prompts, empty = [self.scheduler.ledger.prompt(uid) for uid in found], self._remembered.empty
        attempts = [Attempt(p.uid, n, sample.attempt) for p in prompts for n, sample in enumerate(p.samples)]
        return [attempt.name for attempt in attempts if attempt.sample not in empty]

    def take(self) -> Batch:
        """The update batch (:meth:`Scheduler.collect`).

        Raises:
            Hopeless: There is no trajectory in it.
        """
        ledger, version = self.scheduler.ledger, self.scheduler.version
        finished = {(p.uid, number): s.attempt for p, number, s in ledger.samples("finished")}
        collected = self.scheduler.collect()
        for staleness in harvest.staleness:  # looked at once more before anything is trained
            if not 0 <= staleness <= self.rules.max_staleness:
                raise _lagging(staleness, self.rules)
        stored = [sample for sample in harvest.samples if sample not in self._remembered.empty]
        if not stored:
            raise Hopeless(f"the agent loop gave no trajectory for any of an update's {len(harvest.samples)} samples")
        trained = [record for sample in harvest.samples for record in self._remembered.forget(sample)]
        for uid, _ in harvest.samples:
            self._whole.pop(uid, None)
        counts, self.scheduler.step = self.scheduler.step, StepCounts()
        batch = Batch(
            collected=collected,
            attempts=[Attempt(*sample, finished[sample]).name for sample in stored],
            version=version,
            trained=trained,
            ran=self._ran,
            wasted=self._wasted,
            counts=counts,
            left=len(finished) - len(harvest.samples),
            failed=self._failed,
            filtered=self.filtered,
        )
        self._ran, self._wasted, self._failed, self._filtered = [], [], 0, Counter()
        return batch

    # ---- what lies in the queue ----

    def needs_prompt(self, uid: str) -> bool:
        """Somebody may yet ask for this prompt's data."""
        return uid in self.scheduler.ledger or uid in self._stock

    def needs_turns(self, name: str) -> bool:
        """Somebody may yet go on from, or draft from, what this attempt reported; not where its trajectories say it."""
        attempt = Attempt.named(name)
        if self._remembered.attempt.get(attempt.sample) == attempt.attempt:
            return attempt.sample not in self._remembered.stored
        return self.may_train(name)

    def needs_trajectories(self, name: str) -> bool:
        """What this attempt stored, or will store, may yet be trained, or drafted from."""
        attempt = Attempt.named(name)
        drafted = attempt.sample in self._remembered.stored and self._predecessor(*attempt.sample) == attempt.attempt
        return drafted or self.may_train(name)

    def may_train(self, name: str) -> bool:
        """What this attempt says may yet be trained."""
        attempt = Attempt.named(name)
        if attempt.uid not in self.scheduler.ledger:
            return False
        sample = self.scheduler.ledger.prompt(attempt.uid).samples[attempt.number]
        return sample.attempt == attempt.attempt and sample.state in (*ON_THEIR_WAY, "finished")

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """Plain, for JSON: with what the queue holds it is all that :meth:`restore` needs."""
        ledger, empty = self.scheduler.ledger, self._remembered.empty
        names = [Attempt(*sample, attempt).name for sample, attempt in self._remembered.attempt.items()]
        return {
            **self.scheduler.state_dict(),
            "stock": list(self._stock.items()),
            "reports": sorted(names),
            "empty": sorted(Attempt(uid, n, ledger.prompt(uid).samples[n].attempt).name for uid, n in empty),
            "generation": self._generation,
            "failed": self._failed,
            "filtered": list(self._filtered.items()),
        }

    def restore(
        self,
        state: dict[str, Any],
        version: int,
        batches_left: int,
        evidence: Mapping[str, Evidence],
        prompts: set[str],
        handed: Iterable[tuple[str, int]] = (),
    ) -> list[str]:
        """Take up what :meth:`state_dict` gave, and what has happened since.

        Args:
            state: Of an earlier moment.
            version, batches_left: As to :meth:`publish`.
            evidence: By name, all attempts of which anything is known now.
            prompts: Those whose data are there.
            handed: Prompts that were handed over since.

        Returns:
            Prompts whose data are gone, which others replace.
        """
        self.scheduler.load_state_dict(state)
        self._failed, self._filtered = state["failed"], Counter(dict(state["filtered"]))
        self._stock = dict([*state["stock"], *handed])
        self.scheduler.batches_left = batches_left
        load_size = self._whole_updates(self.scheduler.load_size())  # nothing was trained since
        recovery = Recovery(self.scheduler, self._remembered, evidence)
        gone = recovery.load(self._stock, prompts, load_size)
        self._failed += len(gone)
        recovery.remember(state["reports"])
        self.publish(version, batches_left)
        for attempt in recovery.place(bool(self._filters)):
            self._waste(attempt.sample)
            if evidence[attempt.name].running:
                self._abandoned.append(attempt.name)
        self._remembered.empty = {sample_of(name) for name in state["empty"] if self.may_train(name)}
        if self._filters:
            recovery.recall_scores()
            for uid in [prompt.uid for prompt in self.scheduler.ledger]:
                self._filter(uid)
        for prompt in self.scheduler.ledger:
            self._see_whole(prompt.uid)
        self.scheduler.owe(load_size)
        return gone

    # ---- within ----

    def _whole_updates(self, load_size: int) -> int:
        """A load of whole updates: one that began under other rules may have another size."""
        rules = self.scheduler.rules
        if rules.refill == "always" or rules.unit == "trajectory" or rules.batches % 1:
            return load_size
        return math.ceil(load_size / rules.batch_prompts) * rules.batch_prompts

    def _on_its_way(self, attempt: Attempt) -> Any:
        """The ledger's sample, if it is this attempt that is worked on; else ``None``."""
        uid, number, which = attempt
        if uid not in self.scheduler.ledger:
            return None
        sample = self.scheduler.ledger.prompt(uid).samples[number]
        return sample if sample.attempt == which and sample.state in ON_THEIR_WAY else None

    def _generated(self, report: Ended, uid: str, number: int) -> None:
        if self.scheduler.generate(uid, number, report.tokens, report.first_version):
            return
        if self.rules.stops:
            assert report.first_version is not None
            raise _lagging(self.scheduler.version - report.first_version, self.rules)
        self._waste((uid, number))
        self._abandoned.append(report.name)  # it computes a reward that nobody waits for

    def _waste(self, sample: Name) -> None:
        """What it has may not be trained any more."""
        self._wasted += self._remembered.records.pop(sample, [])
        self._remembered.empty.discard(sample)
        if self.rules.continues:  # nor gone on from; where nothing is, it is drafted from
            self._remembered.attempt.pop(sample, None)
            self._remembered.stored.discard(sample)

    def _fail(self, uid: str, error: str) -> None:
        self._drop(uid, failed=True)
        if count := self.scheduler.hopeless():
            raise Hopeless(
                f"{count} prompts in a row failed, and none came to its end; the latest was {error}\nThe agent loop "
                "workers logged the traceback. Mend what raised this: the reward function "
                "(reward.custom_reward_function), or the agent loop or tool (actor_rollout_ref.rollout.agent, "
                ".multi_turn); the same command goes on from the last checkpoint."
            )

    def _see_whole(self, uid: str) -> None:
        if uid in self.scheduler.ledger and (prompt := self.scheduler.ledger.prompt(uid)).complete("finished"):
            if not self._stored(prompt):
                self._fail(uid, f"prompt {uid}: the agent loop gave no trajectory for any of its samples")
                return
            self._whole[uid], self._news = len(prompt.samples), True

    def _stored(self, prompt: Prompt) -> list[Name]:
        """Its samples, if they are finished, but for those without a trajectory."""
        names = [(prompt.uid, number) for number in range(len(prompt.samples))]
        return [name for name in names if name not in self._remembered.empty]

    def _filter(self, uid: str) -> None:
        """A group whose samples all have one score teaches nothing; another prompt takes its place."""
        prompt = self.scheduler.ledger.prompt(uid)
        stored = self._stored(prompt)
        if not self._filters or not prompt.complete("finished") or not stored:
            return
        by_sample = [self._remembered.scores.get(name) for name in stored]
        scores = [score for of_sample in by_sample for score in of_sample or ()]
        if not (all(by_sample) and len(scores) > 1 and all(score == scores[0] for score in scores)):
            self._fruitless.clear()
            return
        self._filtered[scores[0]] += 1
        self._fruitless[scores[0]] += 1
        self._drop(uid)
        if (count := self._fruitless.total()) >= max(2 * self.rules.batch_prompts, _FRUITLESS):
            told = ", ".join(f"{round(score, 4)} in {groups}" for score, groups in self._fruitless.most_common(4))
            raise Hopeless(
                f"all {count} groups since the last one that was kept were dropped by filter_groups (metric "
                f"{self._filters}), for all samples of a group had one score: scores were {told}. Check the reward "
                "function (reward.custom_reward_function) and algorithm.filter_groups.metric; where prompts are too "
                "easy or too hard choose others, or set algorithm.filter_groups.enable=false; the same command goes "
                "on from the last checkpoint."
            )

    def _drop(self, uid: str, failed: bool = False) -> None:
        self._failed += failed
        self._whole.pop(uid, None)
        self._news = True  # another moves up to the next batch
        for number, sample in enumerate(self.scheduler.ledger.prompt(uid).samples):
            self._wasted += self._remembered.forget((uid, number))
            if sample.state in ON_THEIR_WAY:
                self._abandoned.append(Attempt(uid, number, sample.attempt).name)
        (self.scheduler.fail if failed else self.scheduler.drop)(uid)


def _lagging(staleness: int, rules: Rules) -> RuntimeError:
    return RuntimeError(
        f"a trajectory has staleness {staleness} where 0 to {rules.max_staleness} is allowed; is a rollout server "
        "without the latest weights (training/off_policy/*)?"
    )
