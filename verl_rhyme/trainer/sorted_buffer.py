"""The replay buffer of ``rhyme_sorted``: the sorted controller's eyes and hands in TransferQueue."""

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
from verl_rhyme.sorting.buffer import State
from verl_rhyme.sorting.controller import Harvest, Rules, SortedController
from verl_rhyme.workers.session import PROMPTS, SESSIONS, Start

logger = logging.getLogger(__name__)

_TRAIN = "train"
#: Seconds after which it is told, again and again, what a step still waits for.
_PATIENCE_S = 60.0


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


class SortedReplayBuffer(ReplayBufferAsync):
    """verl's buffer for validation; for training one step is ``begin``, then ``sample``.

    Args:
        rules: The controller's.
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
        self.controller = SortedController(rules)
        self._rollout = rollout
        self._batches_left: int | None = None
        self._kept: set[tuple[str, int]] = set()  # samples whose earlier attempt left turns
        self._ended: set[tuple[str, int]] = set()  # attempts that ended in this step
        self._records: list[dict[str, Any]] = []  # what the servers say of what ran in this step
        self._discarded: list[dict[str, Any]] = []  # of those whose tokens will not be trained
        self._metrics: dict[str, Any] = {}
        self._failures: dict[str, Any] = {}

    # ---- a step ----

    def begin(self, version: int, batches_left: int) -> None:
        """The policy ``version`` is current: what may not be trained any more is to be generated anew."""
        stale = self.controller.begin(version)
        self._batches_left, self._ended, self._records = batches_left, set(), []
        self._sync_metadata_from_transfer_queue()
        self._discarded += self._fetch_records(stale)
        by_sample = self._trajectories()
        _clear(_TRAIN, [key for sample in stale for key in by_sample.get(sample, [])])
        self._clear_orphans(by_sample)
        if self.controller.rules.mode == "on_policy":
            self._kept |= set(stale)  # to draft from
        else:
            self._kept -= set(stale)  # too old to be continued

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict]:
        """The update batch, sorted by length, as soon as the controller says that it is ready."""
        if partition_id != _TRAIN:
            return super().sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)
        # A filter needs the rewards to know what is enough.
        rewarded = self.filter_groups_metric is not None
        while True:
            self._wait_until(lambda: self.controller.enough(rewarded), "an update batch", fill=True)
            self._rollout.stop_engines()
            self._wait_until(lambda: not self._on_their_way(), "attempts to end after the abort")
            if self.controller.ready():
                break
            self._rollout.resume_engines()  # a reward failed, or an agent loop
        harvest = self.controller.harvest()
        self._check(harvest)
        by_sample = self._trajectories()
        keys = [key for sample in harvest.samples for key in by_sample[sample]]
        tags = [self.partitions[_TRAIN][key] for key in keys]
        self._account(harvest)
        self._clear_sessions(harvest.samples)
        failures, self._failures = self._failures, {}
        return KVBatchMeta(partition_id=_TRAIN, keys=keys, tags=tags), failures

    def take_metrics(self, slots: int) -> dict[str, float]:
        """Metrics of the step; ``slots`` is Q of the bubble ratio."""
        step = self.controller.step
        metrics = {
            **self._metrics,
            names.SORTED_DISCARDED: step.discarded_tokens,
            names.SORTED_INTERRUPTED: step.interrupted,
            names.SORTED_STALE: step.stale,
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

    def take_discarded(self) -> list[dict[str, Any]]:
        """Request records of attempts whose tokens will not be trained, with ``uid`` and ``sample``."""
        discarded, self._discarded = self._discarded, []
        return discarded

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        return self.controller.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the ledger and bring TransferQueue, restored before, into line with it."""
        self.controller.load_state_dict(state)
        self._sync_metadata_from_transfer_queue()
        prompts, sessions = self.partitions[PROMPTS], self.partitions[SESSIONS]
        for prompt in list(self.controller.buffer):
            if prompt.uid not in prompts:
                logger.warning("the checkpoint lacks the data of prompt %s: another is loaded in its place", prompt.uid)
                self.controller.drop(prompt.uid)
        finished = {(prompt.uid, number) for prompt, number, _ in self.controller.buffer.samples("finished")}
        by_sample = self._trajectories()
        _clear(_TRAIN, [key for sample, keys in by_sample.items() if sample not in finished for key in keys])
        _clear(PROMPTS, [uid for uid in prompts if uid not in self.controller.buffer])
        wanted = {f"{uid}_{number}" for state in ("pending", "finished") for uid, number in self._in(state)}
        _clear(SESSIONS, [key for key in sessions if key not in wanted])
        self._kept = {
            (uid, number)
            for uid, number in self._in("pending")
            if sessions.get(f"{uid}_{number}", {}).get("status") == "interrupted"
        }

    # ---- within ----

    def _in(self, state: Any) -> list[tuple[str, int]]:
        return [(prompt.uid, number) for prompt, number, _ in self.controller.buffer.samples(state)]

    def _poll(self) -> None:
        """Tell the controller what happened since the last look."""
        self._sync_metadata_from_transfer_queue()
        sessions, by_sample = self.partitions[SESSIONS], self._trajectories()
        failed = set()
        for uid, number in self._on_their_way():
            tag = sessions.get(f"{uid}_{number}", {})
            state = self.controller.buffer.prompt(uid).samples[number].state
            if tag.get("status") == "failed":
                failed.add(uid)
            elif state == "running" and tag.get("status") == "interrupted":
                self.controller.interrupt(uid, number, tag["tokens"], tag["first_version"])
                self._kept.add((uid, number))
                self._ended.add((uid, number))
            elif state == "running" and tag.get("status") == "generated":
                self.controller.generate(uid, number, tag["tokens"], tag["first_version"])
                self._ended.add((uid, number))
            if (uid, number) in by_sample and tag.get("status") == "generated":
                self.controller.finish(uid, number)
        self._drop(failed, f"{self._metrics_prefix(_TRAIN)}/rollout_failure/evicted_samples")
        if self.filter_groups_metric is not None:
            self._filter()

    def _filter(self) -> None:
        """DAPO: a group whose samples all have one reward teaches nothing; another prompt takes its place."""
        complete = {prompt.uid for prompt in self.controller.buffer if prompt.complete("finished")}
        self.finished_keys[_TRAIN] = complete  # verl classifies these, and forgets all others
        filtered, counts = self._dapo_filtered_keys(_TRAIN)
        if filtered:
            reasons: tuple[set[str], set[str], set[str], Any] = set(), filtered, set(), counts
            metrics = self._evict_terminal_groups(self.controller.version, _TRAIN, reasons)[3]
            _accumulate_eviction_metrics(self._failures, metrics, 0)
            self._drop(filtered)

    def _drop(self, uids: set[str], counted_as: str | None = None) -> None:
        if not uids:
            return
        by_sample = self._trajectories()
        samples = [(uid, number) for uid in uids for number in range(len(self.controller.buffer.prompt(uid).samples))]
        for uid in uids:
            self.controller.drop(uid)
        _clear(_TRAIN, [key for sample in samples for key in by_sample.get(sample, [])])
        self._clear_sessions(samples)
        if counted_as:
            self._failures[counted_as] = self._failures.get(counted_as, 0) + len(uids)

    def _fill(self) -> None:
        """Load what may be loaded, start what may be started."""
        if count := self.controller.loadable(self._batches_left):
            for uid, samples in self._rollout.load_prompts(count):
                self.controller.load(uid, samples)
        starts: dict[str, list[Start]] = defaultdict(list)
        for uid, number in self.controller.dispatch(*self._rollout.dispatch_limits()):
            priority = self.controller.buffer.prompt(uid).number + 1
            starts[uid].append(Start(number, (uid, number) in self._kept, priority))
        if starts:
            keys = [f"{uid}_{start.number}" for uid, group in starts.items() for start in group]
            tq.kv_batch_put(keys=keys, partition_id=SESSIONS, tags=[{"status": "running"}] * len(keys))
            self._rollout.start_samples(starts)

    def _trajectories(self) -> dict[tuple[str, int], list[str]]:
        """Keys of each sample's trajectories, where all of them are stored; an agent loop may give several."""
        found: dict[tuple[str, int], list[str]] = defaultdict(list)
        unfinished = set()
        for key, tag in self.partitions[_TRAIN].items():
            uid, number, _ = key.rsplit("_", 2)
            found[uid, int(number)].append(key)
            if tag.get("status") != "success":  # TransferQueue shows a key before its data and its tag are there
                unfinished.add((uid, int(number)))
        return {
            sample: sorted(keys, key=lambda key: int(key.rsplit("_", 1)[1]))
            for sample, keys in found.items()
            if sample not in unfinished
        }

    def _clear_sessions(self, samples: list[tuple[str, int]]) -> None:
        known = self.partitions[SESSIONS]
        _clear(SESSIONS, [key for key in (f"{uid}_{number}" for uid, number in samples) if key in known])
        self._kept -= set(samples)
        gone = {uid for uid, _ in samples if uid not in self.controller.buffer}
        _clear(PROMPTS, [uid for uid in gone if uid in self.partitions[PROMPTS]])

    def _clear_orphans(self, by_sample: dict[tuple[str, int], list[str]]) -> None:
        """What samples of dropped prompts left, which ended after they were dropped."""
        _clear(
            _TRAIN, [key for (uid, _), keys in by_sample.items() if uid not in self.controller.buffer for key in keys]
        )
        sessions = self.partitions[SESSIONS]
        _clear(SESSIONS, [key for key in sessions if key.rsplit("_", 1)[0] not in self.controller.buffer])

    def _fetch_records(self, samples: list[tuple[str, int]]) -> list[dict[str, Any]]:
        """What the servers said of the samples' latest attempts, with ``uid`` and ``sample``."""
        if not samples:
            return []
        keys = [f"{uid}_{number}" for uid, number in samples]
        data = tq.kv_batch_get(keys=keys, partition_id=SESSIONS, select_fields=["records"])
        lists = [getattr(records, "data", records) for records in data["records"]]
        return [
            {**record, "uid": uid, "sample": number}
            for (uid, number), records in zip(samples, lists, strict=True)
            for record in records
        ]

    def _check(self, harvest: Harvest) -> None:
        """The promise of the mode, looked at once more before anything is trained."""
        rules = self.controller.rules
        bound = 0 if rules.mode == "on_policy" else rules.max_versions - 1
        if max(harvest.staleness) > bound or min(harvest.staleness) < 0:
            raise RuntimeError(
                f"rhyme_sorted ({rules.mode}): a trajectory is {max(harvest.staleness)} policy versions old where "
                f"{bound} are allowed; is a rollout server without the latest weights (training/off_policy/*)?"
            )

    def _account(self, harvest: Harvest) -> None:
        """What the servers said of the attempts of this step, and of all that is trained."""
        cut = self._ended & set(self._in("pending"))
        left = self._ended & set(self._in("finished"))
        rows = self._fetch_records([*cut, *left, *harvest.samples])
        self._records = [row for row in rows if row["policy_version_end"] == self.controller.version]
        if self.controller.rules.mode == "on_policy":
            self._discarded += [row for row in rows if (row["uid"], row["sample"]) in cut]
        samples = set(harvest.samples)
        trained = [row for row in rows if (row["uid"], row["sample"]) in samples]
        ages = [self.controller.version - row["policy_version_end"] for row in trained]
        tokens = [row["response_tokens"] for row in trained]
        self._metrics = {
            names.SORTED_WAITING_MEAN: np.mean(harvest.waited),
            names.SORTED_WAITING_MAX: max(harvest.waited),
            names.SORTED_TOKEN_STALENESS_MEAN: np.average(ages, weights=tokens) if sum(tokens) else 0.0,
            names.SORTED_TOKEN_STALENESS_MAX: max(ages, default=0),
            names.SORTED_TRAINED: sum(harvest.lengths),
            names.SORTED_LEFT: len(self._in("finished")),
        }

    def _on_their_way(self) -> list[tuple[str, int]]:
        return [*self._in("running"), *self._in("generated")]

    def _wait_until(self, condition: Callable[[], bool], what: str, fill: bool = False) -> None:
        told = time.monotonic()
        while True:
            self._poll()
            if condition():  # before anything is started: what is left of the last step may do
                return
            if fill:
                self._fill()
            time.sleep(self.poll_interval)
            if time.monotonic() - told > _PATIENCE_S:
                told = time.monotonic()
                counts = {state: len(self._in(state)) for state in get_args(State)}
                logger.warning("waiting for %s; samples by state: %s", what, counts)


def _clear(partition: str, keys: list[str]) -> None:
    if keys:
        tq.kv_clear(keys=keys, partition_id=partition)
