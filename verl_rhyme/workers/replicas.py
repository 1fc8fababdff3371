"""Rollout replicas that died: which they are, and others in their place."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.placement_group import get_placement_group, remove_placement_group
from verl.checkpoint_engine import CheckpointEngineManager

from verl_rhyme.observability.errors import last_line

logger = logging.getLogger(__name__)

#: Seconds without an answer after which a server is warned of, and after which it is taken for dead. Where a process is
#: gone Ray says so: one that is silent lives and may be busy, but one that hangs would hold up the next weight sync.
_SILENT_S, _HUNG_S = 60.0, 300.0
#: Seconds that a new replica has to be up, its engine compiled.
_START_S = 1200.0
#: Seconds for which one is tried to be started while others serve, and where none is left; those between two tries.
_FREE_S, _NONE_LEFT_S, _PAUSE_S = 10.0, 300.0, 2.0
_LONGEST_PAUSE_S = 600.0
#: Seconds between two looks at the replicas during a weight sync, and those that it has to notice a death by itself.
_WATCH_S, _NOTICE_S = 5.0, 10.0


class ReplicaDied(RuntimeError):
    """A replica is gone that nothing can replace while the run goes on."""


def is_death(error: Exception) -> bool:
    """Of a server's process, or of its engine, which the process may outlive (vLLM's class is not imported here)."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    gone = isinstance(error, RayActorError) and not isinstance(error, ActorUnavailableError)
    return gone or "EngineDeadError" in kinds


def dead(replicas: Iterable[Any]) -> dict[Any, str]:
    """Those of verl's replicas that cannot serve any more, and why: a process of theirs is gone, or an engine."""
    began, found, replicas = time.monotonic(), {}, list(replicas)
    questions = _of_servers(replicas)
    questions += [(replica, worker.__ray_ready__) for replica in replicas for worker in replica.workers]
    asked: dict[Any, tuple[Any, Any]] = {}
    while questions or asked:
        asked |= {ask.remote(): (replica, ask) for replica, ask in questions}
        questions = []
        left = _HUNG_S - (time.monotonic() - began)
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
            return {**dict.fromkeys(missing, f"no answer for {_HUNG_S:.0f} s"), **found}
        if missing:
            logger.warning(
                "replicas %s live, but do not answer; after %.0f s they are taken for dead",
                *(sorted(replica.replica_rank for replica in missing), _HUNG_S),
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


def outlive(weights: Any) -> None:
    """A replica that dies during a weight sync ends it with :class:`ReplicaDied`; verl's would wait for it for ever.

    Args:
        weights: verl's ``CheckpointEngineManager``. Its workers send to a replica's engine over a socket at whose other
            end nobody is any more (``BucketedWeightSender``), in the thread in which they are asked.
    """
    sync = weights.update_weights

    def outliving(*args: Any, **kwargs: Any) -> Any:
        with _watched(weights.replicas):
            return sync(*args, **kwargs)

    weights.update_weights = outliving


@contextmanager
def _watched(replicas: Iterable[Any]) -> Iterator[None]:
    """Workers that wait for a dead replica are killed, so that whoever waits for them goes on, with an error."""
    over, found = threading.Event(), dict[Any, str]()
    threading.Thread(target=_watch, args=(list(replicas), over, found), daemon=True).start()
    try:
        yield
    except Exception as error:
        if not found:
            raise
        replica, why = next(iter(found.items()))
        raise ReplicaDied(
            f"rollout replica {replica.replica_rank} died while it got its weights: {why}\nThe same command goes on "
            "from the last checkpoint."
        ) from error
    finally:
        over.set()


def _watch(replicas: list[Any], over: threading.Event, found: dict[Any, str]) -> None:
    """Until it is over; ``found`` are those that died, and why. Who says nothing may be busy with the weights."""
    asked: dict[Any, tuple[Any, Any]] = {}
    questions = _of_servers(replicas)
    while not over.wait(_WATCH_S):
        asked |= {ask.remote(): (replica, ask) for replica, ask in questions}
        questions = []
        told, _ = ray.wait(list(asked), num_returns=len(asked), timeout=0)
        for answer in told:
            replica, ask = asked.pop(answer)
            try:
                ray.get(answer)
            except Exception as error:
                if is_death(error):
                    found[replica] = last_line(error)
                    continue
            questions.append((replica, ask))
        if found and not over.wait(_NOTICE_S):
            for worker in [worker for replica in found for worker in replica.workers]:
                ray.kill(worker)
            return


def serve(servers: Any) -> None:
    """Living replicas that a client has taken for dead are in service again.

    Args:
        servers: verl's ``LLMServerManager`` of them.
    """
    router = servers.global_load_balancer
    known = set(ray.get(router.get_all_servers.remote()))
    all_of_them = zip(servers.server_addresses, servers.server_handles, strict=True)
    if missing := {address: handle for address, handle in all_of_them if address not in known}:
        _admit(router, missing)


def _admit(router: Any, servers: dict[str, Any]) -> None:
    """Into service; a router of ours is told what fits into the KV caches of these as well."""
    ray.get(router.add_servers.remote(servers))
    report: Any = getattr(router, "report_capacity", None)
    for address, server in servers.items() if report else ():
        with suppress(RayError):  # it died just now, as the next look finds
            if tokens := ray.get(server.cache_tokens.remote(), timeout=_SILENT_S):
                report.remote(address, tokens)


class Spares:
    """Puts new replicas in the place of dead ones among those that have devices of their own.

    What could not be started is owed, and tried again at a later :meth:`mend`, after pauses that grow.

    Args:
        servers: verl's ``LLMServerManager`` of them.
        weights: verl's ``CheckpointEngineManager`` of them.
    """

    def __init__(self, servers: Any, weights: Any) -> None:
        self._servers, self._weights = servers, weights
        # A new name for each one's actors: Ray may know those of dead ones for a while.
        self._ranks = itertools.count(1 + max(replica.replica_rank for replica in servers.rollout_replicas))
        self._owed = self._failures = 0
        self._retry_at = 0.0
        #: Replicas that were started in the place of dead ones.
        self.started = 0

    def mend(self, version: int) -> int:
        """Take dead replicas out of service, and start as many with the actor's weights, which are ``version``'s.

        Returns:
            How many had died.

        Raises:
            ReplicaDied: None is left, and none could be started, some time long; or a new one died while the actor sent
                it its weights.
        """
        manager = self._servers
        gone = dead(manager.rollout_replicas)
        for replica, why in gone.items():
            logger.warning("replica %d (%s) is gone: %s", replica.replica_rank, replica._server_address, why)
        if gone:
            router = manager.global_load_balancer
            ray.get(router.remove_servers.remote([replica._server_address for replica in gone]))
            self._set([replica for replica in manager.rollout_replicas if replica not in gone])
            for replica in gone:
                _end(replica)
            self._owed += len(gone)
        serve(manager)
        if self._owed and (gone or not manager.rollout_replicas or time.monotonic() >= self._retry_at):
            self._fill(version)
        return len(gone)

    def _fill(self, version: int) -> None:
        """Start what is owed, or fail after some tries: devices come free a while after those that held them died."""
        manager = self._servers
        began = time.monotonic()
        while self._owed:
            try:
                new = self._start(version)
            except ReplicaDied:  # with the actor in the midst of sending
                raise
            except Exception as error:
                spent, left = time.monotonic() - began, len(manager.rollout_replicas)
                if spent < (_FREE_S if left else _NONE_LEFT_S):
                    time.sleep(_PAUSE_S)
                    continue
                if not left:
                    raise ReplicaDied(
                        f"no rollout replica is left, and none could be started in {spent:.0f} s: {error}\nThe same "
                        "command goes on from the last checkpoint."
                    ) from error
                self._failures += 1
                # The trainer waits while one is tried: a tenth of its time at most goes to what hangs.
                pause = max(min(_LONGEST_PAUSE_S, _PAUSE_S * 2**self._failures), 10 * spent)
                self._retry_at = time.monotonic() + pause
                logger.warning(
                    "%d replicas are missing, the next try to start one is in %.0f s: %s", self._owed, pause, error
                )
                return
            self._set([*manager.rollout_replicas, new])
            _admit(manager.global_load_balancer, {new._server_address: new._server_handle})
            self._owed -= 1
            self._failures = 0
            self.started += 1
            logger.warning("replica %d takes the place of a dead one", new.replica_rank)
            began = time.monotonic()

    def _start(self, version: int) -> Any:
        manager = self._servers
        new = manager.rollout_replica_class(
            replica_rank=next(self._ranks),
            config=manager.rollout_config,
            model_config=manager.model_config,
            gpus_per_node=manager.rollout_config.n_gpus_per_node,
        )
        try:
            _within(_START_S, lambda: asyncio.run(new.init_standalone()))
            with _watched([new]):
                CheckpointEngineManager(self._weights.config, self._weights.actor_wg, [new]).update_weights(version)
        except BaseException:
            _end(new)
            raise
        return new

    def _set(self, replicas: list[Any]) -> None:
        manager = self._servers
        manager.rollout_replicas = replicas
        manager.server_handles = [replica._server_handle for replica in replicas]
        manager.server_addresses = [replica._server_address for replica in replicas]
        self._weights.replicas = list(replicas)


def _within(seconds: float, start: Callable[[], object]) -> None:
    """Call ``start``, which blocks in what cannot be given a limit.

    Raises:
        TimeoutError: It takes longer; its thread ends when what it waits for does.
    """
    done: Future[object] = Future()

    def run() -> None:
        try:
            done.set_result(start())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    if not wait([done], timeout=seconds).done:
        raise TimeoutError(f"it was not up after {seconds:.0f} s")
    done.result()


def _end(replica: Any) -> None:
    """What is left of it goes, with the devices that it held, or has asked for."""
    for actor in [*replica.servers, *replica.workers]:
        ray.kill(actor)
    pool = replica.resource_pool
    if pool is None:
        return
    groups = list(pool.pgs or [])
    if not groups:  # verl has them from where they are ready
        name = f"{pool.name_prefix}verl_group_{'_'.join(map(str, pool.store))}:"
        for number in range(len(pool.store)):
            with suppress(ValueError):  # there is none
                groups.append(get_placement_group(f"{name}{number}"))
    for group in groups:
        remove_placement_group(group)
