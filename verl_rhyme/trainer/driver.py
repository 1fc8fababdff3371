"""The trainer's calls to the coordinator, and the recovery of a coordinator that was restarted."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayActorError

from verl_rhyme.coordinator import coordinator
from verl_rhyme.observability.errors import first_line
from verl_rhyme.processes.messages import (
    Handover,
    LoadedPrompt,
    NotOpen,
    Part,
    Reply,
    ResumeState,
    RunSettings,
    TrainerWork,
)
from verl_rhyme.processes.waiting import waiting_for
from verl_rhyme.scheduling.expectations import Expectations
from verl_rhyme.trainer.topology import Topology

logger = logging.getLogger(__name__)

#: Deaths of the coordinator in one call after which the run ends.
_REOPENINGS = 8
#: Seconds that its process has to start (from a cold shared filesystem) and to open, and seconds between tries.
_START_S = 600.0
_PAUSE_S = 2.0


class Driver:
    """Drives a run's coordinator. Ray restarts a coordinator that died, and the next call opens it again. ``load``
    fetches at least so many prompts and stores their data in partition ``PROMPTS``; ``make_workers`` makes new agent
    loop workers when all are gone; ``take_over`` records what is not trained, and clears dropped trajectories."""

    def __init__(
        self,
        setting: RunSettings,
        load: Callable[[int], list[LoadedPrompt]],
        make_workers: Callable[[], list[Any]],
        take_over: Callable[[Handover], None],
    ) -> None:
        self._setting, self._load, self._make_workers, self._record = setting, load, make_workers, take_over
        self.coordinator = coordinator.start()  # handle of the actor
        self._workers: list[Any] = []
        self._state: dict[str, Any] | None = None  # state at the last handover
        self._handed: list[LoadedPrompt] = []  # prompts passed since then
        self._lengths = Expectations(setting.response_limit)  # response lengths, as the coordinator knows them
        self._share = 1.0
        self._version = 0
        self._batches_left = 0
        self._generation = 0
        self.reopened = 0  # number of times
        self.wait_s = 0.0  # of the trainer, for the last batch

    def open(self, workers: list[Any], state: dict[str, Any] | None, version: int, batches_left: int) -> None:
        """Open the coordinator for the rest of a run, as :meth:`publish`; ``state`` is from a checkpoint, or
        ``None``."""
        self._workers, self._state = workers, state
        self._version, self._batches_left = version, batches_left
        if state is not None:
            self._generation = state.get("generation", 0)
            if lengths := state.get("lengths"):
                self._lengths.load_state_dict(lengths)
            if self._lengths.errors:
                logger.warning(
                    "the response lengths in the checkpoint cannot be read (%s): they are learnt again",
                    self._lengths.last_error,
                )
        self._state = self._opened(fresh=True)

    def publish(self, version: int, batches_left: int) -> None:
        """Report that the engines run under the policy ``version`` from now on."""
        self._version, self._batches_left = version, batches_left
        self._fulfil(self._ask("publish", version, batches_left))

    def serve(self, share: float, leaves: str = "") -> int:
        """Let a share of the replicas at the start of the run generate from now on, and move the samples of one that
        leaves, by its address. Return their number."""
        self._share = share
        return self._ask("set_serving", share, leaves)

    def pause(self) -> None:
        """Start no sample until :meth:`publish`."""
        self._ask("pause")

    def next_batch(self, topology: Topology, parts: Callable[[Part], None] | None = None) -> Reply:
        """Return the update batch as soon as the scheduler reports that it is ready. ``parts`` gets parts of it during
        the rollout; after a restart of the coordinator some may come twice."""
        stops, rewarded = self._setting.rules.stops, False
        self.wait_s = 0.0
        samples = None if parts is None else self._setting.part_samples
        while True:
            while (work := self._wait_for_batch(rewarded, stops, samples)) is not None:
                if parts is not None and work.part is not None:
                    parts(work.part)
                self._fulfil(work)
                if work.replicas:
                    topology.replace_dead(self._version)
            if stops:
                topology.stop()
            reply: Reply | None = self._ask("take_batch")
            if reply is not None:
                break
            # A reward or an agent loop failed, or a reward is late: the engines continue until it arrives.
            if stops:
                topology.resume()
            rewarded = True
        self._take_over(reply.handover)
        self._batches_left -= 1
        return reply

    def load_prompts(self) -> None:
        """Pass the prompts that are wanted now, without waiting for further requests."""
        self._fulfil(self._ask("pending_work"))

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON."""
        state = self._ask("state")
        self._lengths.update(state["lengths"])
        return {**state, "lengths": self._lengths.state_dict()}

    def close(self) -> None:
        ray.kill(self.coordinator)

    def _take_over(self, handover: Handover) -> None:
        self._state, self._handed = handover.state, []
        self._lengths.update(handover.lengths)
        self._record(handover)

    def _fulfil(self, work: TrainerWork) -> None:
        if work.handover is not None:
            self._take_over(work.handover)
        if work.workers:
            self._workers = self._make_workers()
            self._ask("add_workers", self._workers)
        if work.prompts:
            prompts = self._load(work.prompts)
            self._handed.extend(prompts)
            self._ask("add_prompts", prompts)

    def _wait_for_batch(self, *arguments: Any) -> TrainerWork | None:
        began = time.monotonic()
        work: TrainerWork | None = self._ask("wait_for_batch", *arguments)
        self.wait_s += time.monotonic() - began
        return work

    def _ask(self, method: str, *arguments: Any) -> Any:
        for _ in range(_REOPENINGS):
            try:
                with waiting_for(f"the coordinator ({method})"):
                    return ray.get(getattr(self.coordinator, method).remote(*arguments))
            except (RayActorError, NotOpen) as error:
                logger.warning("the coordinator died and is opened again (%s)", first_line(error))
                self.reopened += 1
                self._opened(fresh=False)  # next_batch() and publish() let it start samples again
        raise RuntimeError(
            f"the coordinator died {_REOPENINGS} times in one call ({method}), see its log; the same command continues "
            "from the last checkpoint"
        )

    def _opened(self, fresh: bool) -> dict[str, Any]:
        """Open the coordinator once its process runs: until then Ray fails each call at once."""
        began = time.monotonic()
        while True:
            self._generation += 1
            resume = ResumeState(
                state=self._state,
                prompts=list(self._handed),
                version=self._version,
                batches_left=self._batches_left,
                generation=self._generation,
                lengths=self._lengths.state_dict(),
                share=self._share,
            )
            try:
                with waiting_for("the coordinator to open, with its agent loop workers"):
                    return ray.get(self.coordinator.open.remote(self._setting, self._workers, resume, fresh))
            except RayActorError as error:
                if error.actor_init_failed or time.monotonic() - began > _START_S:
                    raise RuntimeError(
                        f"the coordinator did not start within {_START_S:.0f} s, see its log; the same command "
                        "continues from the last checkpoint"
                    ) from error
                time.sleep(_PAUSE_S)
