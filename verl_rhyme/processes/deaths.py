"""Detection of dead rollout replicas, so that no process waits for one forever."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import ray
import wrapt
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError

from verl_rhyme.observability.errors import last_line
from verl_rhyme.processes.waiting import waiting_for

logger = logging.getLogger(__name__)

#: Seconds without an answer until a warning. After ``scheduling.lost_after`` a server counts as dead: Ray reports dead
#: processes, a silent one may be busy, but one that hangs would block the next weight sync.
_SILENT_S = 60.0
#: Seconds between two requests to a server whose connection broke.
_PAUSE_S = 2.0
#: Seconds between two checks of watched replicas, and seconds for the waiting call to notice a death itself.
_WATCH_S, _NOTICE_S = 5.0, 10.0


class ReplicaDied(RuntimeError):
    """A replica died, and the run cannot replace it without a restart."""


def is_death(error: Exception) -> bool:
    """Return whether an error means that a server's process died, or its engine (the process may outlive it)."""
    kinds = {kind.__name__ for kind in type(error).__mro__}  # names: vLLM's class must not be imported here
    # The error of an actor that Ray kills to save memory is no RayActorError.
    gone = isinstance(error, RayActorError | OutOfMemoryError) and not isinstance(error, ActorUnavailableError)
    return gone or "EngineDeadError" in kinds


def dead(replicas: Iterable[Any], hung_s: float) -> dict[Any, str]:
    """Return the replicas that cannot serve any more, and why: a process or an engine died, or hangs for ``hung_s``."""
    began, deaths, replicas = time.monotonic(), {}, list(replicas)
    probes = _server_probes(replicas)
    probes += [(replica, worker.__ray_ready__) for replica in replicas for worker in replica.workers]
    pending: dict[Any, tuple[Any, Any]] = {}
    while probes or pending:
        pending |= {probe.remote(): (replica, probe) for replica, probe in probes}
        probes = []
        left = hung_s - (time.monotonic() - began)
        answers, _ = ray.wait(list(pending), num_returns=len(pending), timeout=max(0.0, min(_SILENT_S, left)))
        for answer in answers:
            replica, probe = pending.pop(answer)
            try:
                ray.get(answer)
            except ActorUnavailableError:  # a network failure, which may be temporary
                probes.append((replica, probe))
            except Exception as error:
                deaths[replica] = last_line(error)
        missing = {replica for replica, _ in [*probes, *pending.values()]}
        if missing and left <= 0:
            return {**dict.fromkeys(missing, f"no answer for {hung_s:.0f} s"), **deaths}
        if missing:
            logger.warning(
                "replicas %s are alive but do not answer; after %.0f s they count as dead",
                *(sorted(replica.replica_rank for replica in missing), hung_s),
            )
        if probes:
            time.sleep(_PAUSE_S)
    return deaths


def _server_probes(replicas: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Return pairs of replica and method to call, one per server."""
    return [
        (replica, server.healthy if server is replica.servers[0] else server.__ray_ready__)
        for replica in replicas
        for server in replica.servers
    ]


@contextmanager
def watched(replicas: Iterable[Any], hung_s: float) -> Iterator[dict[Any, str]]:
    """Watch replicas while the caller waits for them: kill the remains of one that dies or hangs for ``hung_s``, so
    that the wait ends in an error. Yield the replicas that died so far, and the reason."""
    over, deaths = threading.Event(), dict[Any, str]()
    threading.Thread(target=_watch, args=(list(replicas), hung_s, over, deaths), daemon=True).start()
    try:
        yield deaths
    finally:
        over.set()


def _watch(replicas: list[Any], hung_s: float, over: threading.Event, deaths: dict[Any, str]) -> None:
    try:
        pending: dict[Any, tuple[Any, Any, float]] = {}
        probes, silent = _server_probes(replicas), set[Any]()
        while replicas and not over.wait(_WATCH_S):
            now = time.monotonic()
            pending |= {probe.remote(): (replica, probe, now) for replica, probe in probes}
            probes = []
            answers, _ = ray.wait(list(pending), num_returns=len(pending), timeout=0)
            for answer in answers:
                replica, probe, _ = pending.pop(answer)
                try:
                    ray.get(answer)
                except Exception as error:
                    if is_death(error):
                        deaths[replica] = last_line(error)
                        continue
                probes.append((replica, probe))
            for replica, _, since in pending.values():
                if now - since > _SILENT_S and replica not in silent:
                    silent.add(replica)
                    logger.warning("replica %d has not answered for %.0f s", replica.replica_rank, now - since)
                if now - since > hung_s:
                    deaths.setdefault(replica, f"no answer for {hung_s:.0f} s")
            if deaths and not over.wait(_NOTICE_S):
                for replica, why in deaths.items():
                    logger.warning("replica %d died; calls that wait for it are aborted: %s", replica.replica_rank, why)
                    for actor in [*replica.servers, *replica.workers]:
                        ray.kill(actor)
                return
    except Exception:
        if not over.is_set():
            logger.warning("the watch for dead replicas failed; their deaths are not detected now", exc_info=True)


def _watched_call(name: str) -> Callable[..., Any]:
    def call(self: WatchedCheckpointManager, *args: Any, **kwargs: Any) -> Any:
        with watched(self.replicas, self._self_hung_s), waiting_for(f"the replicas ({name})"):
            return getattr(self.__wrapped__, name)(*args, **kwargs)

    return call


class WatchedCheckpointManager(wrapt.ObjectProxy):
    """Proxy of verl's ``CheckpointEngineManager`` that does not wait forever for a replica that dies: verl sends
    weights over a socket without noticing that the receiver died (``BucketedWeightSender``), and vLLM's client waits
    for a dead engine's answer (``_call_utility_async``). A replica without an answer for ``hung_s`` counts as dead. The
    methods block: call them outside an event loop."""

    def __init__(self, manager: Any, hung_s: float) -> None:
        super().__init__(manager)
        self._self_hung_s = hung_s

    sleep_replicas = _watched_call("sleep_replicas")
    wake_up_replicas = _watched_call("wake_up_replicas")
    abort_replicas = _watched_call("abort_replicas")
    resume_generation_replicas = _watched_call("resume_generation_replicas")
    finish_deliveries = _watched_call("finish_deliveries")  # a method of the relay's manager

    def update_weights(self, *args: Any, **kwargs: Any) -> Any:
        """Raise :class:`ReplicaDied` if one died: the actor may still be sending, so the sync cannot be repeated."""
        with watched(self.replicas, self._self_hung_s) as deaths, waiting_for("the weights to reach the replicas"):
            try:
                return self.__wrapped__.update_weights(*args, **kwargs)
            except Exception as error:
                # Without recorded deaths: the error came before the watch's check, or a training worker died.
                if not deaths and not is_death(error):
                    raise
                what = f" or training worker died during a weight sync: {last_line(error)}"
                for replica, why in deaths.items():
                    what = f" {replica.replica_rank} died during its weight sync: {why}"
                raise ReplicaDied(
                    f"rollout replica{what}\nStart the same command again: it resumes from the last checkpoint."
                ) from error
