"""The replay buffer of ``rhyme_sorted``: the sorted scheduler's eyes and hands in TransferQueue."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol, get_args

import numpy as np
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync, _accumulate_eviction_metrics

from verl_rhyme.observability import metrics as names
from verl_rhyme.scheduling.ledger import ON_THEIR_WAY, Harvest, State
from verl_rhyme.scheduling.rules import Rules
from verl_rhyme.scheduling.scheduler import Scheduler
from verl_rhyme.workers.session import PROMPTS, SESSIONS, Start, sample_of, session_key

logger = logging.getLogger(__name__)

_TRAIN = "train"
#: Seconds after which it is told, again and again, what a step still waits for.
_PATIENCE_S = 60.0
#: Seconds between two questions to the agent loop workers what they are about.
_ROLL_CALL_S = 10.0

#: A sample: uid of its prompt, number in the group.
Name = tuple[str, int]


class Rollout(Protocol):
    """What the buffer asks of the trainer."""

    def load_prompts(self, count: int) -> list[tuple[str, int]]:
        """Fetch prompts and store their data: their names, and how many samples each is to have."""
        ...

    def start_samples(self, starts: dict[str, list[Start]]) -> None:
        """Send samples, by the name of their prompt, to the agent loops."""
        ...

    def dispatch_limits(self) -> tuple[int, int]:
        """Samples that the engines are given at a time, and how many are sent together at least."""
        ...

    def stop_engines(self) -> None:
        """Abort what runs; whoever asks for tokens from now on is told to come again."""
        ...

    def resume_engines(self) -> None: ...

    def running_attempts(self) -> set[str] | None:
        """What the agent loops are about, by ``session_key``; ``None`` until all have told. Does not wait."""
        ...

    def abandon_attempts(self, sessions: list[str]) -> None:
        """Nobody waits for these attempts any more: they may end without a word."""
        ...


class SortedReplayBuffer(ReplayBufferAsync):
    """verl's buffer for validation; for training one step is ``begin``, then ``sample``.

    Args:
        rules: The scheduler's.
        rollout: The trainer's side of it.
        **kwargs: verl's arguments.
    """

    def __init__(
        self,
        rules: Rules,
        rollout: Rollout,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.scheduler = Scheduler(rules)
        self._rollout = rollout
        self._batches_left: int | None = None
        self._reports: dict[Name, str] = {}  # the attempt that told last how it ended, and left its turns
        self._ended: set[Name] = set()  # samples whose attempt ended in this step
        self._asked: set[str] | None = None  # attempts on their way when the agent loops were asked for them
        self._ask_at = time.monotonic() + _ROLL_CALL_S
        self._records: list[dict[str, Any]] = []  # what the servers say of what ran in this step
        self._wasted: list[dict[str, Any]] = []  # of those whose tokens will not be trained
        self._metrics: dict[str, Any] = {}
        self._failures: dict[str, Any] = {}

    # ---- a step ----

    def begin(self, version: int, batches_left: int) -> None:
        """The policy ``version`` is current: what may not be trained any more is to be generated anew."""
        stale = self.scheduler.begin(version)
        self._batches_left, self._ended, self._records = batches_left, set(), []
        stale = [sample for sample in stale if sample in self._reports]
        self._wasted += self._fetch_records(stale)
        self._rollout.abandon_attempts([self._reports[sample] for sample in stale])  # some wait for a reward yet
        if self.scheduler.rules.continues:  # too stale to be continued; where nothing is, it is drafted from
            for sample in stale:
                del self._reports[sample]
        self._look()

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict]:
        """The update batch, sorted by length, as soon as the scheduler says that it is ready."""
        if partition_id != _TRAIN:
            return super().sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)
        # A filter needs the rewards to know what is enough.
        rewarded = self.filter_groups_metric is not None

        def enough(_: float) -> bool:
            return self.scheduler.enough(rewarded)

        while True:
            self._wait_until(enough, "an update batch", fill=True)
            self._rollout.stop_engines()
            self._wait_until(self.scheduler.settled, "attempts to end after the abort")
            self._give_up()
            if self.scheduler.ready():
                break
            # A reward failed, or an agent loop; or it is long in coming: the engines run on until it is there.
            self._rollout.resume_engines()
            rewarded = True
        stored = self._trajectories()
        sessions = {sample: self._session(*sample) for sample in self._in("finished")}
        harvest = self.scheduler.harvest()
        self._check(harvest)
        keys = [key for sample in harvest.samples for key in stored[sessions[sample]]]
        tags = [self.partitions[_TRAIN][key] for key in keys]
        self._account(harvest)
        self._tidy(SESSIONS, PROMPTS)  # the trajectories are to be trained
        failures, self._failures = self._failures, {}
        return KVBatchMeta(partition_id=_TRAIN, keys=keys, tags=tags), failures

    def take_metrics(self, slots: int) -> dict[str, float]:
        """Metrics of the step; ``slots`` is Q of the bubble ratio."""
        step = self.scheduler.step
        metrics = {
            **self._metrics,
            names.SORTED_DISCARDED: step.wasted_tokens,
            names.SORTED_INTERRUPTED: step.interrupted,
            names.SORTED_STALE: step.stale,
            names.SORTED_ABANDONED: step.abandoned,
            names.SORTED_LOADED: step.loaded,
            names.SORTED_DROPPED: step.dropped,
        }
        if self._records:
            started, finished = (
                np.array([row[name] for row in self._records]) for name in ("started_at", "finished_at")
            )
            metrics[names.BUBBLE_RATIO] = names.bubble_ratio(started, np.maximum(started, finished), slots)
        self._metrics = {}
        return {name: float(value) for name, value in metrics.items()}

    def take_wasted(self) -> list[dict[str, Any]]:
        """Request records of attempts whose tokens will not be trained, with ``uid`` and ``sample``."""
        wasted, self._wasted = self._wasted, []
        return wasted

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        return {**self.scheduler.state_dict(), "reports": sorted(self._reports.values())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the ledger and bring TransferQueue, restored before, into line with it."""
        self.scheduler.load_state_dict(state)
        self._sync_metadata_from_transfer_queue()
        for prompt in list(self.scheduler.ledger):
            if prompt.uid not in self.partitions[PROMPTS]:
                logger.warning("the checkpoint lacks the data of prompt %s: another is loaded in its place", prompt.uid)
                self.scheduler.drop(prompt.uid)
        finished = {self._session(*sample) for sample in self._in("finished")}
        _clear(_TRAIN, [key for key in self.partitions[_TRAIN] if key.rpartition("_")[0] not in finished])
        # What an abandoned attempt wrote before TransferQueue was saved is not among the reports that counted.
        counted = set(state.get("reports", self.partitions[SESSIONS]))  # older states do not say
        tags = {key: tag for key, tag in self.partitions[SESSIONS].items() if key in counted}
        told = [key for key, tag in tags.items() if tag.get("status") in ("interrupted", "generated")]
        self._reports = {sample_of(key): key for key in sorted(told, key=lambda key: int(key.rpartition("_")[2]))}
        self._tidy(SESSIONS, PROMPTS)

    # ---- within ----

    def _in(self, *states: State) -> list[Name]:
        return [(prompt.uid, number) for state in states for prompt, number, _ in self.scheduler.ledger.samples(state)]

    def _session(self, uid: str, number: int) -> str:
        """Name of the sample's latest attempt."""
        return session_key(uid, number, self.scheduler.ledger.prompt(uid).samples[number].attempt)

    def _look(self) -> None:
        """TransferQueue as it is now. What abandoned attempts and dropped prompts left, or still write, goes."""
        self._sync_metadata_from_transfer_queue()
        self._tidy(SESSIONS, PROMPTS, _TRAIN)

    def _tidy(self, *partitions: str) -> None:
        live = {self._session(*sample) for sample in self._in(*ON_THEIR_WAY, "finished")}
        untrained = set(self._in("pending", *ON_THEIR_WAY, "finished"))
        self._reports = {sample: key for sample, key in self._reports.items() if sample in untrained}
        told = live | set(self._reports.values())
        wanted: dict[str, Callable[[str], bool]] = {
            SESSIONS: lambda key: key in told,
            PROMPTS: lambda key: key in self.scheduler.ledger,
            _TRAIN: lambda key: key.rpartition("_")[0] in live,
        }
        for partition in partitions:
            gone = [key for key in self.partitions[partition] if not wanted[partition](key)]
            for key in gone:
                del self.partitions[partition][key]
            _clear(partition, gone)

    def _poll(self) -> None:
        """Tell the scheduler what happened since the last look."""
        missing = self._missing()  # before the look: who has told of the end by then is not lost
        self._look()
        sessions, stored = self.partitions[SESSIONS], self._trajectories()
        failed: dict[str, str] = {}
        finished, lost = [], []
        for uid, number in self._in(*ON_THEIR_WAY):
            session = self._session(uid, number)
            tag = sessions.get(session, {})
            status = tag.get("status")
            running = self.scheduler.ledger.prompt(uid).samples[number].state == "running"
            if status == "failed":
                failed[uid] = f"sample {number} of prompt {uid}: {tag['error']}"
            elif running and status == "interrupted":
                self.scheduler.interrupt(uid, number, tag["tokens"], tag["first_version"])
            elif running and status == "generated":
                if not self.scheduler.generate(uid, number, tag["tokens"], tag["first_version"]):
                    raise _lagging(self.scheduler.version - tag["first_version"], self.scheduler.rules)
            elif session in missing and session not in stored:
                self.scheduler.abandon(uid, number)
                lost.append((uid, number))
                continue
            if running and status in ("interrupted", "generated"):
                self._ended.add((uid, number))
                self._reports[uid, number] = session
            if status == "generated" and session in stored:
                finished.append((uid, number))
        if lost:
            logger.warning("%d samples were lost with their worker or report, and start again: %s", len(lost), lost[:8])
        self._drop(set(failed), failed=True)
        for sample in finished:
            self.scheduler.finish(*sample)
        if failed and (count := self.scheduler.hopeless()):
            raise RuntimeError(
                f"rhyme_sorted: {count} prompts in a row failed, and none came to its end; the latest was "
                f"{list(failed.values())[-1]}\nThe agent loop workers logged the traceback. Mend what raised this: the "
                "reward function (reward.custom_reward_function), or the agent loop or tool "
                "(actor_rollout_ref.rollout.agent, .multi_turn); the same command goes on from the last checkpoint."
            )
        if self.filter_groups_metric is not None:
            self._filter()

    def _missing(self) -> set[str]:
        """Attempts that were on their way when the agent loop workers were asked, and that none of them has."""
        if self._asked is None:
            if time.monotonic() < self._ask_at:
                return set()
            self._asked = {self._session(*sample) for sample in self._in(*ON_THEIR_WAY)}
        running = self._rollout.running_attempts()
        if running is None:
            return set()
        missing, self._asked = self._asked - running, None
        self._ask_at = time.monotonic() + _ROLL_CALL_S
        return missing

    def _give_up(self) -> None:
        """The engines stand still: whoever has not told how it ended is busy elsewhere, and starts again."""
        sessions = {sample: self._session(*sample) for sample in self._in("running")}
        given_up = self.scheduler.give_up()
        if given_up:
            logger.warning(
                "%d samples did not end within %.0f s of the abort (a slow tool?) and start again: %s",
                len(given_up),
                self.scheduler.rules.stop_wait,
                given_up[:8],
            )
            self._rollout.abandon_attempts([sessions[sample] for sample in given_up])

    def _filter(self) -> None:
        """DAPO: a group whose samples all have one reward teaches nothing; another prompt takes its place."""
        complete = {prompt.uid for prompt in self.scheduler.ledger if prompt.complete("finished")}
        self.finished_keys[_TRAIN] = complete  # verl classifies these, and forgets all others
        filtered, counts = self._dapo_filtered_keys(_TRAIN)
        if filtered:
            reasons: tuple[set[str], set[str], set[str], Any] = set(), filtered, set(), counts
            metrics = self._evict_terminal_groups(self.scheduler.version, _TRAIN, reasons)[3]
            _accumulate_eviction_metrics(self._failures, metrics, 0)
            self._drop(filtered)

    def _drop(self, uids: set[str], failed: bool = False) -> None:
        if not uids:
            return
        for uid in uids:
            (self.scheduler.fail if failed else self.scheduler.drop)(uid)
        self._tidy(SESSIONS, PROMPTS, _TRAIN)
        if failed:
            counted_as = f"{self._metrics_prefix(_TRAIN)}/rollout_failure/evicted_samples"
            self._failures[counted_as] = self._failures.get(counted_as, 0) + len(uids)

    def _fill(self) -> None:
        """Load what may be loaded, start what may be started."""
        if count := self.scheduler.loadable(self._batches_left):
            for uid, samples in self._rollout.load_prompts(count):
                self.scheduler.load(uid, samples)
        rules = self.scheduler.rules
        starts: dict[str, list[Start]] = defaultdict(list)
        for uid, number in self.scheduler.dispatch(*self._rollout.dispatch_limits()):
            priority = self.scheduler.ledger.prompt(uid).number + 1
            kept = self._reports.get((uid, number)) if rules.continues or rules.redraft else None
            starts[uid].append(Start(self._session(uid, number), kept, priority, rules.continues))
        if starts:
            keys = [start.session for group in starts.values() for start in group]
            tq.kv_batch_put(keys=keys, partition_id=SESSIONS, tags=[{"status": "running"}] * len(keys))
            self._rollout.start_samples(starts)

    def _trajectories(self) -> dict[str, list[str]]:
        """Keys of each attempt's trajectories, where all of them are stored; an agent loop may give several."""
        found: dict[str, list[str]] = defaultdict(list)
        unfinished = set()
        for key, tag in self.partitions[_TRAIN].items():
            session = key.rpartition("_")[0]
            found[session].append(key)
            if tag.get("status") != "success":  # TransferQueue shows a key before its data and its tag are there
                unfinished.add(session)
        return {
            session: sorted(keys, key=lambda key: int(key.rpartition("_")[2]))
            for session, keys in found.items()
            if session not in unfinished
        }

    def _fetch_records(self, samples: list[Name]) -> list[dict[str, Any]]:
        """What the servers said of the samples' latest attempts that ended, with ``uid`` and ``sample``."""
        if not samples:
            return []
        keys = [self._reports[sample] for sample in samples]
        data = tq.kv_batch_get(keys=keys, partition_id=SESSIONS, select_fields=["records"])
        lists = [getattr(records, "data", records) for records in data["records"]]
        return [
            {**record, "uid": uid, "sample": number}
            for (uid, number), records in zip(samples, lists, strict=True)
            for record in records
        ]

    def _check(self, harvest: Harvest) -> None:
        """The bound of the rules, looked at once more before anything is trained."""
        for staleness in harvest.staleness:
            if not 0 <= staleness <= self.scheduler.rules.max_staleness:
                raise _lagging(staleness, self.scheduler.rules)

    def _account(self, harvest: Harvest) -> None:
        """What the servers said of the attempts of this step, and of all that is trained."""
        cut = self._ended & set(self._in("pending"))
        left = self._ended & set(self._in("generated", "finished"))
        rows = self._fetch_records([*cut, *left, *harvest.samples])
        self._records = [row for row in rows if row["policy_version_end"] == self.scheduler.version]
        if not self.scheduler.rules.continues:
            self._wasted += [row for row in rows if (row["uid"], row["sample"]) in cut]
        samples = set(harvest.samples)
        trained = [row for row in rows if (row["uid"], row["sample"]) in samples]
        ages = [self.scheduler.version - row["policy_version_end"] for row in trained]
        tokens = [row["response_tokens"] for row in trained]
        self._metrics = {
            names.SORTED_WAITING_MEAN: np.mean(harvest.waited),
            names.SORTED_WAITING_MAX: max(harvest.waited),
            names.SORTED_TOKEN_STALENESS_MEAN: np.average(ages, weights=tokens) if sum(tokens) else 0.0,
            names.SORTED_TOKEN_STALENESS_MAX: max(ages, default=0),
            names.SORTED_TRAINED: sum(harvest.lengths),
            names.SORTED_LEFT: len(self._in("finished")),
        }

    def _wait_until(self, condition: Callable[[float], bool], what: str, fill: bool = False) -> None:
        """``condition`` is given the seconds since the wait began."""
        began = told = time.monotonic()
        while True:
            self._poll()
            if condition(time.monotonic() - began):  # before anything is started: what is left of the last step may do
                return
            if fill:
                self._fill()
            time.sleep(self.poll_interval)
            if time.monotonic() - told > _PATIENCE_S:
                told = time.monotonic()
                counts = {state: len(self._in(state)) for state in get_args(State)}
                logger.warning("waiting for %s; samples by state: %s", what, counts)


def _lagging(staleness: int, rules: Rules) -> RuntimeError:
    return RuntimeError(
        f"rhyme_sorted: a trajectory has staleness {staleness} where 0 to {rules.max_staleness} is allowed; is a "
        "rollout server without the latest weights (training/off_policy/*)?"
    )


def _clear(partition: str, keys: list[str]) -> None:
    if keys:
        tq.kv_clear(keys=keys, partition_id=partition)
