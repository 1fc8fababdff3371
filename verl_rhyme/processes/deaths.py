"""Rollout replicas that died: which they are, and whoever waits for one does not wait for ever."""

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

logger = logging.getLogger(__name__)

#: Seconds without an answer after which a server is warned of, and after which it is taken for dead, unless the user
#: says otherwise (``scheduling.lost_after``). Where a process is gone Ray says so: one that is silent lives and may be
#: busy, but one that hangs would hold up the next weight sync.
_SILENT_S, _HUNG_S = 60.0, 300.0
#: Seconds between two questions to one whose connection broke.
_PAUSE_S = 2.0
#: Seconds between two looks at those that are waited for, and those that the waiting has to notice a death by itself.
_WATCH_S, _NOTICE_S = 5.0, 10.0


class ReplicaDied(RuntimeError):
    """A replica is gone that nothing can replace while the run goes on."""


def is_death(error: Exception) -> bool:
    """Of a server's process, or of its engine, which the process may outlive (vLLM's class is not imported here)."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    # An actor that Ray kills to save the node's memory answers with an error that is no RayActorError.
    gone = isinstance(error, RayActorError | OutOfMemoryError) and not isinstance(error, ActorUnavailableError)
    return gone or "EngineDeadError" in kinds


def dead(replicas: Iterable[Any], hung_s: float | None = None) -> dict[Any, str]:
    """Those of verl's replicas that cannot serve any more, and why: a process of theirs is gone, or an engine.

    Args:
        replicas: verl's.
        hung_s: Seconds without an answer after which one is taken for dead.
    """
    hung_s = _HUNG_S if hung_s is None else hung_s
    began, found, replicas = time.monotonic(), {}, list(replicas)
    questions = _of_servers(replicas)
    questions += [(replica, worker.__ray_ready__) for replica in replicas for worker in replica.workers]
    asked: dict[Any, tuple[Any, Any]] = {}
    while questions or asked:
        asked |= {ask.remote(): (replica, ask) for replica, ask in questions}
        questions = []
        left = hung_s - (time.monotonic() - began)
        told, _ = ray.wait(list(asked), num_returns=len(asked), timeout=max(0.0, min(_SILENT_S, left)))
        for answer in told:
            replica, ask = asked.pop(answer)
            try:
                ray.get(answer)
            except ActorUnavailableError:  # the network between: it may come back
                questions.append((replica, ask))
            except Exception as error:
                found[replica] = last_line(error)
        missing = {replica for replica, _ in [*questions, *asked.values()]}
        if missing and left <= 0:
            return {**dict.fromkeys(missing, f"no answer for {hung_s:.0f} s"), **found}
        if missing:
            logger.warning(
                "replicas %s live, but do not answer; after %.0f s they are taken for dead",
                *(sorted(replica.replica_rank for replica in missing), hung_s),
            )
        if questions:
            time.sleep(_PAUSE_S)
    return found


def _of_servers(replicas: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Who is asked, and the method to ask."""
    return [
        (replica, server.healthy if server is replica.servers[0] else server.__ray_ready__)
        for replica in replicas
        for server in replica.servers
    ]


@contextmanager
def watched(replicas: Iterable[Any]) -> Iterator[dict[Any, str]]:
    """For a wait for these replicas: of one that dies what is left is killed, so that the wait ends, with an error.

    Yields:
        Those that died so far, and why.
    """
    over, found = threading.Event(), dict[Any, str]()
    threading.Thread(target=_watch, args=(list(replicas), over, found), daemon=True).start()
    try:
        yield found
    finally:
        over.set()


def _watch(replicas: list[Any], over: threading.Event, found: dict[Any, str]) -> None:
    try:
        asked: dict[Any, tuple[Any, Any, float]] = {}
        questions, silent = _of_servers(replicas), set[Any]()
        while replicas and not over.wait(_WATCH_S):
            now = time.monotonic()
            asked |= {ask.remote(): (replica, ask, now) for replica, ask in questions}
            questions = []
            told, _ = ray.wait(list(asked), num_returns=len(asked), timeout=0)
            for answer in told:
                replica, ask, _ = asked.pop(answer)
                try:
                    ray.get(answer)
                except Exception as error:
                    if is_death(error):
                        found[replica] = last_line(error)
                        continue
                questions.append((replica, ask))
            for replica, _, since in asked.values():
                if now - since > _SILENT_S and replica not in silent:
                    silent.add(replica)
                    logger.warning("replica %d has not answered for %.0f s", replica.replica_rank, now - since)
                if now - since > _HUNG_S:
                    found.setdefault(replica, f"no answer for {_HUNG_S:.0f} s")
            if found and not over.wait(_NOTICE_S):
                for replica, why in found.items():
                    logger.warning(
                        "replica %d is gone, and what waits for it ends with it: %s", replica.replica_rank, why
                    )
                    for actor in [*replica.servers, *replica.workers]:
                        ray.kill(actor)
                return
    except Exception:
        if not over.is_set():
            logger.warning("nobody sees now whether replicas die", exc_info=True)


def _telling(name: str) -> Callable[..., Any]:
    def tell(self: Outliving, *args: Any, **kwargs: Any) -> Any:
        with watched(self.replicas):
            return getattr(self.__wrapped__, name)(*args, **kwargs)

    return tell


class Outliving(wrapt.ObjectProxy):
    """verl's ``CheckpointEngineManager``, but one that does not wait for ever for a replica that dies meanwhile.

    verl sends weights over a socket at whose other end nobody may be any more (``BucketedWeightSender``), and vLLM's
    client waits for the answer to what it told an engine, whether that lives or not (``_call_utility_async``).
    Not to be awaited: for callers outside an event loop.
    """

    sleep_replicas = _telling("sleep_replicas")
    wake_up_replicas = _telling("wake_up_replicas")
    abort_replicas = _telling("abort_replicas")
    resume_generation_replicas = _telling("resume_generation_replicas")
    settle = _telling("settle")  # the relay's

    def update_weights(self, *args: Any, **kwargs: Any) -> Any:
        """As verl's.

        Raises:
            ReplicaDied: One died meanwhile. The actor may be in the midst of sending, and cannot be asked again.
        """
        with watched(self.replicas) as found:
            try:
                return self.__wrapped__.update_weights(*args, **kwargs)
            except Exception as error:
                if not found and not is_death(error):  # noticed before the watch looked, or of a worker alone
                    raise
                dead = [
                    f" {replica.replica_rank} died while it got its weights: {why}" for replica, why in found.items()
                ]
                what = dead[0] if dead else f", or one who sends, died during a weight sync: {last_line(error)}"
                raise ReplicaDied(
                    f"rollout replica{what}\nThe same command goes on from the last checkpoint."
                ) from error
