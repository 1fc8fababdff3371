"""The length-aware controller: what to load, what to run, when to harvest, what to train on (SortedRL, section 3).

Prompts are loaded in groups of several update batches, all of whose samples are given to the engine at once, more than
it has slots for; short answers finish first. As soon as an update batch is finished it is harvested, sorted by length;
what still runs is interrupted. No new prompt is loaded before all of the group are trained, so that every prompt has
its turn and long ones are only later, never lost.

``on_policy``: a response is trained only if the current policy made all of it; whatever else was begun or finished is
generated anew. ``partial``: an interrupted response goes on where it stood, and every token keeps the version and the
log-probability it was made with; no token that is trained is older than ``max_versions`` versions, the current one
included.

Attempts can get lost, with their worker or with their report, and can be busy outside the engine (a tool, a judge) when
it is stopped: whom nobody knows any more, and whom the others have waited for long enough, is abandoned and started
again as another attempt.

A pure state machine: events are method calls, and time comes in as an argument.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl_rhyme.sorting.buffer import Prompt, RolloutBuffer, Sample, State

#: Samples in these states belong to an attempt that somebody works on.
ON_THEIR_WAY: tuple[State, ...] = ("running", "generated")
#: However small an update batch is, so many failures are no accident.
_HOPELESS = 16


@dataclass(frozen=True)
class Rules:
    """What the controller goes by.

    Attributes:
        batch_prompts: Prompts of an update batch.
        batch_samples: Trajectories of an update batch.
        group_batches: Update batches of prompts that are loaded together.
        mode: See the module.
        unit: What is trained together: ``group`` holds all samples of a prompt in one batch (GRPO, RLOO, DAPO),
            ``trajectory`` takes each as it comes (PPO, REINFORCE++).
        harvest_tokens: Harvest also when so many tokens are finished, though the batch is not full; ``None``: never.
        max_wait: Updates that may pass a prompt by; then the next harvest waits for it. ``None``: no bound but that of
            the group.
        max_versions: ``partial``: see the module.
        stop_wait: Seconds for which stopped engines wait at most for attempts that are busy elsewhere, and for the
            update batch's rewards.
    """

    batch_prompts: int
    batch_samples: int
    group_batches: int = 4
    mode: str = "on_policy"
    unit: str = "group"
    harvest_tokens: int | None = None
    max_wait: int | None = None
    max_versions: int = 2
    stop_wait: float = 30.0


@dataclass(frozen=True)
class Harvest:
    """One update batch.

    Attributes:
        samples: (uid, number in its group), shortest first.
        lengths: Tokens of each.
        waited: Updates that passed each one's prompt by.
        staleness: Versions between each one's oldest token and the policy that is trained: 0 is on-policy.
    """

    samples: list[tuple[str, int]]
    lengths: list[int]
    waited: list[int]
    staleness: list[int]


@dataclass
class StepCounts:
    """What became of tokens since the last :meth:`SortedController.begin`.

    Attributes:
        loaded, dropped: Prompts.
        interrupted: Running samples that were cut short.
        stale: Finished samples that have to be generated anew.
        abandoned: Attempts that were lost, or not waited for.
        discarded_tokens: Tokens that were made and will be made again.
    """

    loaded: int = 0
    dropped: int = 0
    interrupted: int = 0
    stale: int = 0
    abandoned: int = 0
    discarded_tokens: int = 0


class SortedController:
    """See the module. The order of calls in a step::

        begin(version) -> stale samples             the policy is new
        loadable() -> load(uid, n) ...              until it says 0; also between the events below
        dispatch() -> samples to start
        generate(...), finish(...), drop(...) ...   until enough(); abandon(...) what is lost, fail(...) till hopeless()
        interrupt(...), finish(...) ...             once the engines were stopped, until settled()
        give_up() -> attempts not waited for
        harvest()                                   the update batch, if ready(); else on with dispatch()

    Raises:
        ValueError: An event that cannot be (see :class:`RolloutBuffer`), or rules that contradict each other.
    """

    def __init__(self, rules: Rules) -> None:
        if rules.batch_prompts < 1 or rules.batch_samples < rules.batch_prompts or rules.group_batches < 1:
            raise ValueError(
                f"an update batch needs prompts, a sample of each, and a group at least one batch: {rules}"
            )
        if rules.mode == "partial" and rules.max_versions < 2:
            raise ValueError("partial mode mixes versions: max_versions must be at least 2, or the mode on_policy")
        self.rules = rules
        self.buffer = RolloutBuffer()
        self.version = 0
        self.step = StepCounts()
        self._owed = 0  # prompts to load in place of those that were dropped
        self._failed: set[int] = set()  # numbers of those that failed since the last that came to its end, or update

    # ---- loading ----

    def loadable(self, batches_left: int | None = None) -> int:
        """Prompts that may be loaded now: a whole group when all are consumed, else those owed for dropped ones.

        Args:
            batches_left: Update batches until training ends: no more are loaded than will be trained.
        """
        if len(self.buffer):
            return self._owed
        batches = self.rules.group_batches if batches_left is None else min(self.rules.group_batches, batches_left)
        return max(0, batches) * self.rules.batch_prompts

    def load(self, uid: str, samples: int) -> None:
        """Take in a prompt; ``samples`` responses of it are wanted."""
        self.buffer.load(uid, samples)
        self.step.loaded += 1
        self._owed = max(0, self._owed - 1)

    def dispatch(self, limit: int | None = None, lot: int = 1) -> list[tuple[str, int]]:
        """Start pending samples, in the order in which the engine should take them.

        Prompt by prompt as they were loaded, so that groups get complete and none waits for ever; within a prompt
        those first that were longest when they were cut short.

        Args:
            limit: Samples that may run at a time, those included that do already; ``None``: all.
            lot: Start none before so many may be started: each start is a message.
        """
        room = None if limit is None else limit - sum(1 for _ in self.buffer.samples("running"))
        if room is not None and room < lot:
            return []
        pending = sorted(self.buffer.samples("pending"), key=lambda at: (at[0].number, -at[2].tokens, at[1]))[:room]
        for prompt, number, _ in pending:
            self.buffer.start(prompt.uid, number)
        return [(prompt.uid, number) for prompt, number, _ in pending]

    # ---- events ----

    def generate(self, uid: str, number: int, tokens: int, first_version: int | None) -> None:
        """A response came to its end. Of a dropped prompt it is nobody's any more.

        One in which the policy said nothing (``first_version`` is ``None``) counts as the current policy's.
        """
        if uid in self.buffer:
            self.buffer.generate(uid, number, tokens, self.version if first_version is None else first_version)

    def finish(self, uid: str, number: int) -> None:
        """A generated response has its reward."""
        if uid in self.buffer:
            self.buffer.finish(uid, number)
            if self.buffer.prompt(uid).complete("finished", "trained"):
                self._failed.clear()

    def interrupt(self, uid: str, number: int, tokens: int, first_version: int | None) -> None:
        """A response was cut short after ``tokens``."""
        if uid not in self.buffer:
            return
        self.step.interrupted += 1
        if self.rules.mode == "on_policy":
            self.step.discarded_tokens += tokens
            first_version = None
        self.buffer.interrupt(uid, number, tokens, first_version if tokens else None)

    def abandon(self, uid: str, number: int) -> None:
        """An attempt is lost: nobody knows of it any more, and it has not told how it ended."""
        if uid not in self.buffer:
            return
        sample = self.buffer.prompt(uid).samples[number]
        if self.rules.mode == "on_policy" and sample.first_version is not None:
            self.step.discarded_tokens += sample.tokens
            sample.first_version = None
        self.buffer.abandon(uid, number)
        self.step.abandoned += 1

    def drop(self, uid: str) -> None:
        """A prompt is lost or was filtered: another may be loaded in its place."""
        if uid in self.buffer:
            self.step.discarded_tokens += self.buffer.prompt(uid).tokens
            self.step.dropped += 1
            self.buffer.drop(uid)
            self._owed += 1

    def fail(self, uid: str) -> None:
        """A sample failed, and its prompt is dropped."""
        if uid in self.buffer:
            self._failed.add(self.buffer.prompt(uid).number)
            self.drop(uid)

    def hopeless(self) -> int:
        """Prompts that were loaded one after another, as many as an update has, failed, and none got done meanwhile.

        In the order of loading, for bad prompts may all fail before the first good one is done, or be all that is left
        of a group.

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

        Args:
            rewarded: Count only what has its reward, which may yet drop a prompt.
        """
        waited_for: tuple[State, ...] = ON_THEIR_WAY if rewarded else ("running",)
        for state in waited_for:
            if any(self._protected(prompt, sample) for prompt, _, sample in self.buffer.samples(state)):
                return False
        return self._suffices(self._units("finished") if rewarded else self._units("generated", "finished"))

    def settled(self, stopped_s: float) -> bool:
        """The engines having been stopped for so many seconds, nothing is waited for any longer.

        Until :attr:`Rules.stop_wait` these are: attempts that may still ask the engines for tokens, and rewards of what
        is to be the update batch. Rewards of others change nothing; but a short response whose reward is slow is not
        passed by for a longer one, or on-policy those that are slow to judge would be drawn again.
        """
        if stopped_s >= self.rules.stop_wait:
            return True
        if any(True for _ in self.buffer.samples("running")):
            return False
        if not self.enough():  # no reward makes it so
            return True
        batch = self._batch("generated", "finished")
        return self.ready() and all(prompt.samples[number].state == "finished" for prompt, number in batch)

    def give_up(self) -> list[tuple[str, int]]:
        """Abandon what still runs though the engines are stopped; rewards may come later.

        Returns:
            The samples whose attempts were abandoned.
        """
        given_up = [(prompt.uid, number) for prompt, number, _ in self.buffer.samples("running")]
        for uid, number in given_up:
            self.abandon(uid, number)
        return given_up

    def ready(self) -> bool:
        """The update batch may be taken."""
        return self.enough(rewarded=True)

    def harvest(self) -> Harvest:
        """Take the update batch: what is protected first, then the shortest.

        Raises:
            ValueError: It is not :meth:`ready`.
        """
        if not self.ready():
            raise ValueError("there is nothing to harvest yet: ask ready() first")
        taken = sorted(self._batch("finished"), key=lambda at: at[0].samples[at[1]].tokens)
        samples = [prompt.samples[number] for prompt, number in taken]
        batch = Harvest(
            samples=[(prompt.uid, number) for prompt, number in taken],
            lengths=[sample.tokens for sample in samples],
            waited=[prompt.waited for prompt, _ in taken],
            staleness=[self.version - _version(sample) for sample in samples],
        )
        for uid, number in batch.samples:
            self.buffer.train(uid, number)
        for prompt in self.buffer:
            prompt.waited += 1
        self._failed.clear()
        return batch

    def begin(self, version: int) -> list[tuple[str, int]]:
        """The policy's ``version`` is current from now on.

        Returns:
            Samples whose finished, generated or kept text may not be trained any more and is generated anew.
        """
        self.version, self.step = version, StepCounts()
        oldest = version if self.rules.mode == "on_policy" else version - self.rules.max_versions + 1
        stale = []
        ended: tuple[State, ...] = ("generated", "finished")
        for prompt, number, sample in [at for state in ended for at in self.buffer.samples(state)]:
            if _version(sample) < oldest:
                self.buffer.regenerate(prompt.uid, number)
                self.step.stale += 1
                self.step.discarded_tokens += sample.tokens
                stale.append((prompt.uid, number))
        for prompt, number, sample in self.buffer.samples("pending"):
            if sample.first_version is not None and sample.first_version < oldest:
                sample.first_version = None
                self.step.discarded_tokens += sample.tokens
                stale.append((prompt.uid, number))
        return stale

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """Plain, for JSON."""
        return {"version": self.version, "owed": self._owed, "buffer": self.buffer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.version, self._owed = state["version"], state["owed"]
        self.buffer.load_state_dict(state["buffer"])

    # ---- within ----

    def _units(self, *states: State) -> list[tuple[Prompt, list[int]]]:
        """What can be trained of that which is in these states: whole groups, or single trajectories."""
        if self.rules.unit == "group":
            return [(prompt, list(range(len(prompt.samples)))) for prompt in self.buffer if prompt.complete(*states)]
        return [(prompt, [number]) for state in states for prompt, number, _ in self.buffer.samples(state)]

    def _batch(self, *states: State) -> list[tuple[Prompt, int]]:
        """The update batch, were it taken of what is in these states."""
        batch: list[tuple[Prompt, int]] = []
        for prompt, numbers in sorted(self._units(*states), key=self._precedence):
            if len(batch) + len(numbers) <= self.rules.batch_samples or not batch:
                batch += [(prompt, number) for number in numbers]
        return batch

    def _suffices(self, units: list[tuple[Prompt, list[int]]]) -> bool:
        samples = sum(len(numbers) for _, numbers in units)
        if samples >= min(self.rules.batch_samples, self._remaining()):
            return samples > 0
        enough = self.rules.harvest_tokens
        tokens = sum(prompt.samples[number].tokens for prompt, numbers in units for number in numbers)
        return enough is not None and samples > 0 and tokens >= enough

    def _remaining(self) -> int:
        """Samples that are loaded, or owed, and not yet trained."""
        owed = self._owed * self.rules.batch_samples // self.rules.batch_prompts
        return owed + sum(sample.state != "trained" for prompt in self.buffer for sample in prompt.samples)

    def _protected(self, prompt: Prompt, sample: Sample) -> bool:
        """The next harvest must not pass it by."""
        rules = self.rules
        if rules.max_wait is not None and prompt.waited >= rules.max_wait:
            return True
        if rules.mode == "on_policy":
            return False
        # One that would be too old at the next update; in a group all wait for such a one, as it waits for all.
        together = prompt.samples if rules.unit == "group" else [sample]
        oldest = min((s.first_version for s in together if s.first_version is not None), default=self.version)
        return self.version - oldest + 1 >= rules.max_versions

    def _precedence(self, unit: tuple[Prompt, list[int]]) -> tuple[bool, int, float, int]:
        prompt, numbers = unit
        samples = [prompt.samples[number] for number in numbers]
        protected = any(self._protected(prompt, sample) for sample in samples)
        length = sum(sample.tokens for sample in samples) / len(samples)
        return (not protected, prompt.number if protected else 0, length, prompt.number)


def _version(sample: Sample) -> int:
    assert sample.first_version is not None, "a finished sample has tokens, and they a version"
    return sample.first_version
