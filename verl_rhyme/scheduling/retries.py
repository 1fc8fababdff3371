"""Failed samples: when they start again, when their prompts are replaced, and when the run ends.

A sample fails when its agent loop, a tool or its reward raises.

- It starts again, as another attempt, after a pause that grows with its failures.
- After :data:`TRIES` failures of one sample its prompt is replaced. Failures during an outage do not count afterwards.
- While no sample succeeds (an outage, or only broken prompts are left), a few failed samples start again at a time,
  and a prompt is replaced now and then, after pauses that grow. The next success lets all others start.
- The run ends after minutes without a success and :data:`TRIES` failures, if more samples failed since then than are in
  progress. It ends sooner if no sample has ever succeeded and the errors are those of wrong code.

It is a pure state machine; times are seconds of any clock that does not run backwards.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

Sample = tuple[str, int]

#: Failures of a sample after which its prompt is replaced. If 30% of all rewards fail, one sample of 1,400 has so many.
TRIES = 6
#: Failures as which a tool or a reward counts that did not answer in time (``scheduling.tool_timeout``, an hour).
HANG_TRIES = 3
#: Pause after a sample's first failure, in seconds; it doubles with each failure.
PAUSE_S = 1.0
#: While no sample succeeds: number of failed samples that start again together, and the longest pause between them.
PROBES, LONGEST_PAUSE_S = 8, 60.0
#: While no sample succeeds: seconds until the first prompt is replaced; the next pauses double.
REPLACE_S = 60.0
#: Seconds after which a run ends in which no sample has succeeded and all errors are those of wrong code.
BROKEN_S = 120.0


class RolloutError(RuntimeError):
    """Training cannot continue."""


class Retries:
    """The failed samples of a rollout; after ``outage_s`` seconds without a success the run ends."""

    def __init__(self, outage_s: float) -> None:
        self._outage_s, self.proven = outage_s, False  # proven: a sample of the run has succeeded
        self.waiting: dict[Sample, float] = {}  # when each may start again, in order of failures
        # Failures with another sample's success before each; failures since then; successes until the latest failure.
        self._failures: dict[Sample, tuple[int, int, int]] = {}
        self._successes = 0
        self._succeeded_at: float | None = None
        self._probe_at = 0.0
        self._end_outage()

    def _end_outage(self) -> None:
        self._since: float | None = None  # time of the first failure since the latest success
        self._first, self._broken = "", True
        self._failed: set[Sample] = set()  # samples that failed since then
        self._tries = 0  # their failures
        self._replaced = 0  # prompts replaced since then

    def failed(self, sample: Sample, error: str, now: float, in_progress: float, broken: bool, tries: int) -> bool:
        """Record a failure; return whether the sample starts again, else its prompt is to be replaced.

        ``in_progress`` counts other samples. ``broken``: the error is one of wrong code. ``tries``: failures as which
        it counts; 0 if it cannot be the prompt's. Raises :class:`RolloutError` if the run cannot continue.
        """
        if self._since is None:
            self._since, self._first, self._probe_at = now, error, now
        self._broken &= broken
        self._failed.add(sample)
        self._tries += max(1, tries)
        count, more, successes = self._failures.get(sample, (0, 0, -1))
        if tries:
            count, more = (count + tries, 0) if successes < self._successes else (count, more + tries)
        self._failures[sample] = count, more, self._successes
        may_replace = now - self._since >= REPLACE_S * (2 ** (self._replaced + 1) - 1)
        if count >= TRIES or (count + more >= TRIES and may_replace):
            self._replaced += 1
            return False
        self._end_hopeless(now, in_progress)
        self.waiting.pop(sample, None)
        self.waiting[sample] = now + min(LONGEST_PAUSE_S, PAUSE_S * 2 ** max(0, count + more - 1))
        return True

    def succeeded(self, sample: Sample, now: float) -> None:
        self._successes, self._succeeded_at, self.proven = self._successes + 1, now, True
        self._failures.pop(sample, None)
        self._end_outage()

    def trained(self) -> None:
        """A batch is trained: the time without a success begins again with the next failure."""
        self._end_outage()

    def release(self, now: float) -> None:
        """Remove the samples from :attr:`waiting` that may start now."""
        if not self.waiting or (self._since is not None and now < self._probe_at):
            return
        most = None if self._since is None else PROBES
        over = list(islice((sample for sample, at in self.waiting.items() if at <= now), most))
        for sample in over:
            del self.waiting[sample]
        if self._since is not None and over:
            self._probe_at = now + min(LONGEST_PAUSE_S, max(PAUSE_S, (now - self._since) / 4))

    def next_start(self) -> float | None:
        """Return the time of the next :meth:`release` that removes a sample; ``None`` if none waits."""
        if not self.waiting:
            return None
        return max(min(self.waiting.values()), -float("inf") if self._since is None else self._probe_at)

    def forget(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            self.waiting.pop(sample, None)
            self._failures.pop(sample, None)
            self._failed.discard(sample)

    def summary(self, now: float) -> str:
        """Return what failed since the latest success, in one line; empty if nothing did."""
        if self._since is None:
            return ""
        success = "no sample has succeeded since the start"
        if self._succeeded_at is not None:
            success = f"the latest success was {_minutes(now - self._succeeded_at)} ago"
        return (
            f"{len(self._failed)} samples failed in the last {_minutes(now - self._since)}, and {success}. "
            f"The first failure: {self._first}"
        )

    def state_dict(self) -> list[list]:
        """Return plain values for JSON; a restored sample does not wait."""
        return [[*sample, count] for sample, (count, _, _) in self._failures.items()]

    def load_state_dict(self, state: Iterable[list]) -> None:
        self._failures = {(uid, number): (count, 0, -1) for uid, number, count in state}

    def _end_hopeless(self, now: float, in_progress: float) -> None:
        assert self._since is not None
        broken = self._broken and not self.proven
        limit = min(self._outage_s, BROKEN_S) if broken else self._outage_s
        if now - self._since < limit or len(self._failed) <= in_progress or self._tries < TRIES:
            return
        raise RolloutError(
            f"no sample succeeds: {self.summary(now)}\nThe agent loop workers logged the traceback. "
            "Fix what raised it: the reward function (reward.custom_reward_function), the agent loop "
            "(actor_rollout_ref.rollout.agent), the tool (actor_rollout_ref.rollout.multi_turn), or the service that "
            f"it calls. The limit is {_minutes(limit)} "
            f"({'for errors of wrong code' if limit < self._outage_s else 'scheduling.outage_timeout'}). Then start "
            "the same command: it resumes from the last checkpoint."
        )


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
