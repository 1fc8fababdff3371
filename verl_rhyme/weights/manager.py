"""The trainer's side of the relay; it replaces verl's checkpoint manager."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple

import ray
import wrapt
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError
from verl.checkpoint_engine import CheckpointEngineManager

from verl_rhyme.config import WeightsConfig
from verl_rhyme.observability import metrics as names
from verl_rhyme.observability.errors import last_line
from verl_rhyme.processes import background
from verl_rhyme.weights import BACKEND, relay
from verl_rhyme.weights.delivery import Target
from verl_rhyme.weights.folder import UnsentError, WeightsError
from verl_rhyme.weights.process_group import ProcessGroupManager
from verl_rhyme.weights.samples import Held, Sent, compare, log_uncompared
from verl_rhyme.weights.sites import tree

#: Seconds that relays have to remove their files when the run ends.
_CLOSE_S = 20.0
#: Seconds between two checks of relays during a delivery, and before a delivery is retried.
_LOOK_S, _PAUSE_S = 20.0, 1.0
#: Seconds for which a node waits for a source that sends nothing, before it tries another one or gives up.
_LINK_PATIENCE_S = 600.0
#: verl's rollout dtypes narrower than float32, with torch's names.
_NARROW = {"bfloat16": "bfloat16", "float16": "float16", "half": "float16"}
#: How often relays may die during one request.
_DEATHS = 3
_DEFAULT = WeightsConfig()
#: Log line that ``benchmarks.faults`` counts.
GONE = "the weight relay of node %s died or hangs; a new one replaces it: %s"

logger = logging.getLogger(__name__)


class _Published(NamedTuple):
    """The newest version."""

    node: str  # the actor's, which has it
    version: int
    identity: str
    sent: Sent | None  # samples of the version


class RelayManager(CheckpointEngineManager):
    """Checkpoint manager that sends weights through relays.

    The actor writes a version once, to its own node's relay, and takes no part in the transfer to replicas. Each
    replica loads the version by itself while other replicas generate and the actor trains, and resumes generation at
    once. Unless the trainer :attr:`waits`, everything after the actor's write happens in the background; the next
    :meth:`check` raises its errors. :meth:`update_weights` returns metrics, and raises RayError or WeightsError if a
    replica could not load this version or the one before, or there is no room.

    ``options`` are of transfers between sites. Matrices are written in ``dtype`` (``engine.narrow``), or in the
    actor's.
    """

    def __init__(
        self,
        config: Any,
        actor_wg: Any,
        replicas: list[Any],
        options: WeightsConfig = _DEFAULT,
        dtype: str | None = None,
    ) -> None:
        super().__init__(config, actor_wg, replicas)
        self._options, self._dtype = options, dtype
        self._root = (config.engine_kwargs.get(BACKEND) or {}).get("folder")
        self._relays: dict[str, Any] = {}  # by node
        self._folders: dict[str, str] = {}  # of relays, dead ones included, by node
        self._sites: dict[str, str | None] = {}
        self._nodes: dict[Any, list[str]] = {}  # of each replica's workers
        self._node: str | None = None  # the actor's
        self._actor_arguments: dict[str, Any] = {}  # arguments that the actor's engine was initialized with
        self._published: _Published | None = None
        self._distribution: Future[dict[Any, Any]] | None = None  # background distribution of the newest version
        self._recipients: list[Any] = []  # replicas of this distribution
        self._unreached: list[Any] = []  # replicas whose workers could not be reached
        self._error: Exception | None = None  # error of the last distribution
        self._link_metrics: dict[str, float] = {}
        self._under_way: dict[Any, Any] = {}  # background deliveries, by replica
        #: Whether :meth:`update_weights` waits until all replicas have loaded the version.
        self.waits = True
        #: Whether a replica finishes requests of older versions before it loads; else these are aborted.
        self.patient = False

    # ---- the trainer's calls ----

    def update_weights(self, global_steps: int) -> dict[str, Any]:  # type: ignore[override]
        behind = self.check()
        self._join()
        # written again if the relay of the actor's node dies meanwhile
        self._retry_over_deaths(False, lambda: self._write(global_steps), only=self._node)
        if self.waits:
            self.deliver(self.replicas)
            return self._take_link_metrics()
        metrics, self._link_metrics = self._link_metrics, {}
        self._recipients = list(self.replicas)
        self._distribution = background.run_in_thread(self._distribute, self._recipients)
        return {names.REPLICAS_BEHIND: float(behind), **metrics}

    def check(self) -> int:
        """Count the replicas that have not loaded the newest version, and retry failed deliveries. Does not block.
        Raises WeightsError if the version did not reach a replica.
        """
        if self._distribution is not None and not self._distribution.done():
            return len(self.replicas)
        self._join()
        if self._error is not None:
            raise self._error
        unreached, self._unreached = self._unreached, []
        for replica in unreached:  # the network may work again
            self._deliver_again(replica)
        done: list[Any] = []
        if self._under_way:
            done, _ = ray.wait(list(self._under_way.values()), num_returns=len(self._under_way), timeout=0)
        for replica, delivery in list(self._under_way.items()):
            if delivery not in done:
                continue
            del self._under_way[replica]
            try:
                ray.get(delivery)
            except Exception as error:  # the replica died (later checks notice), its relay died, or a link was cut
                if replica not in self.replicas:
                    continue
                if isinstance(error, WeightsError) and not isinstance(error, UnsentError):
                    raise
                logger.warning(
                    "replica %d did not load the new weights and tries again: %s",
                    *(replica.replica_rank, last_line(error)),
                )
                self._drop_dead_relays(needed=True)
                self._deliver_again(replica)
        return len(self._under_way) + len(self._unreached)

    def finish_deliveries(self) -> None:
        """Wait until all replicas have loaded the newest version, without patience for running requests."""
        self._join()
        self.check()
        if behind := [replica for replica in self._under_way if replica in self.replicas]:
            self.deliver(behind)
        self._under_way.clear()

    def deliver(self, replicas: Iterable[Any]) -> None:
        """Wait until these replicas have loaded the newest version. Raises RayError or WeightsError if one could not.

        A relay that dies or hangs meanwhile is replaced; a broken link has :data:`_LINK_PATIENCE_S` to come back.
        """
        self._join()
        replicas = list(replicas)
        self._retry_over_deaths(True, lambda: self._start_transfer(replicas))
        waiting = {self._deliver(replica): replica for replica in replicas}
        until = 0.0  # deadline of all retries
        while waiting:
            done, _ = ray.wait(list(waiting), timeout=_LOOK_S)
            again, failed = [], None
            for delivery in done:
                replica = waiting.pop(delivery)
                try:
                    ray.get(delivery)
                except (RayActorError, UnsentError) as error:
                    again.append(replica)
                    failed = error
            if done and failed is None:
                continue
            died = self._drop_dead_relays(needed=True)
            if failed is not None:
                until = until or time.monotonic() + _LINK_PATIENCE_S
                if not (died or isinstance(failed, (ActorUnavailableError, UnsentError))) or time.monotonic() > until:
                    raise failed  # the replica's own error
                logger.warning("sending the new weights to replicas again: %s", last_line(failed))
                time.sleep(_PAUSE_S)
            if again or died:
                cut_off = [each for each, replica in waiting.items() if replica not in self._nodes]
                again += [waiting.pop(each) for each in cut_off]
                self._retry_over_deaths(True, lambda: self._start_transfer(replicas))
                waiting |= {self._deliver(replica): replica for replica in again}

    def release(self, replica: Any) -> None:
        """Let go of a replica about to rest, no longer in :attr:`replicas`, after its delivery (:meth:`deliver`)."""
        self._join()
        if self._under_way.pop(replica, None) is not None:
            self.deliver([replica])
        if replica in self._nodes:
            ray.get(self._relay(self._nodes[replica][0]).forget_replica.remote(replica.replica_rank))

    def close(self) -> None:
        if closed := [each.close.remote() for each in list(self._relays.values())]:
            ray.wait(closed, num_returns=len(closed), timeout=_CLOSE_S)

    # ---- the newest version ----

    @property
    def _newest(self) -> _Published:
        assert self._published is not None, "no version is published yet"
        return self._published

    def _write(self, version: int) -> None:
        ranks = self.actor_wg.world_size
        if self._node is None:
            self._node = ray.get(self.actor_wg.execute_checkpoint_engine(["prepare"] * ranks))[0]["node"]
        node = self._node
        self._drop_dead_relays(needed=False, only=node)
        source = self._relay(node)
        self._folders[node] = self._ask(source.expect.remote(version), node)
        arguments = {"path": [self._folders[node]] * ranks, "dtype": [self._dtype] * ranks}
        if arguments != self._actor_arguments:
            ray.get(self.actor_wg.execute_checkpoint_engine(method=["init_process_group"] * ranks, **arguments))
            self._actor_arguments = arguments
        ray.get(self.actor_wg.update_weights(global_steps=version, mode=BACKEND))
        sent = sent_by(self.actor_wg)
        self._published = _Published(node, version, self._ask(source.publish.remote(version), node), sent)

    def _distribute(self, replicas: list[Any]) -> dict[Any, Any]:
        """Runs in the background; returns the deliveries by replica."""
        try:
            self._retry_over_deaths(True, lambda: self._start_transfer(replicas))
        except RayActorError:  # a replica died, which later checks notice: the others still get the version
            for replica in replicas:
                with suppress(RayActorError):
                    self._register_replicas([replica])
            self._retry_over_deaths(True, self._start_fetches)
        self._link_metrics = self._take_link_metrics()
        return {replica: self._deliver(replica, self.patient) for replica in replicas if replica in self._nodes}

    def _join(self) -> None:
        """Wait for the background distribution. :meth:`check` raises its error, each time until the run ends, rather
        than this: a caller that waits for one replica must not take it for that replica's error.
        """
        distribution, self._distribution = self._distribution, None
        if distribution is None:
            return
        try:
            under_way = distribution.result()
        except Exception as error:
            self._error = error
            return
        self._under_way |= under_way
        self._unreached = [replica for replica in self._recipients if replica not in under_way]

    def _start_transfer(self, replicas: list[Any]) -> None:
        self._drop_dead_relays(needed=True)
        self._register_replicas(replicas)
        self._start_fetches()

    def _register_replicas(self, replicas: list[Any]) -> None:
        known = {*self.replicas, *replicas}
        self._nodes = {replica: nodes for replica, nodes in self._nodes.items() if replica in known}
        new = [replica for replica in replicas if replica not in self._nodes]
        workers = [worker for replica in new for worker in replica.workers]
        metadata = ray.get([worker.execute_checkpoint_engine.remote("prepare") for worker in workers])
        relays = {each["node"]: self._relay(each["node"]) for each in metadata}  # starts missing ones
        folders = {node: each.folder.remote() for node, each in relays.items()}
        self._folders |= {node: self._ask(answer, node) for node, answer in folders.items()}
        paths = [(worker, self._folders[each["node"]]) for worker, each in zip(workers, metadata, strict=True)]
        ray.get([worker.execute_checkpoint_engine.remote("init_process_group", path=path) for worker, path in paths])
        nodes = iter(metadata)
        self._nodes |= {replica: [next(nodes)["node"] for _ in replica.workers] for replica in new}

    def _start_fetches(self) -> None:
        source, version, identity, _ = self._newest
        needed = {node for nodes in self._nodes.values() for node in nodes}
        if not {source, *needed} <= self._sites.keys():
            self._sites = sites_of({source, *needed}, self._options.site_label)
        fetches = {
            node: self._relay(node).fetch.remote(
                version, identity, [(self._relay(hop.node), hop.remote) for hop in hops]
            )
            for node, hops in tree(source, needed, self._sites).items()
        }
        self._ask_all(fetches, "has not started to fetch the new weights")  # its deliveries request it again

    def _deliver(self, replica: Any, patient: bool = False) -> Any:
        relay = self._relay(self._nodes[replica][0])
        newest = self._newest
        return relay.deliver.remote(Target.of(replica), newest.version, patient, newest.identity, newest.sent)

    def _deliver_again(self, replica: Any) -> None:
        if replica not in self.replicas:
            return
        with suppress(RayActorError):
            self._register_replicas([replica])
            self._start_fetches()
        if replica in self._nodes:
            self._under_way[replica] = self._deliver(replica, self.patient)
        else:
            self._unreached.append(replica)

    def _take_link_metrics(self) -> dict[str, float]:
        if len(set(self._sites.values())) < 2:
            return {}
        tally: Counter[str] = Counter()
        for answer in [each.take_tally.remote() for each in self._relays.values()]:
            with suppress(RayActorError, GetTimeoutError):  # later checks notice a dead relay
                tally.update(ray.get(answer, timeout=_CLOSE_S))
        return {
            names.SLOW_LINK_MB: tally["remote_bytes"] / 1e6,
            names.DAMAGED_CHUNKS: float(tally["damaged"]),
            names.LOST_CHUNKS: float(tally["lost"]),
        }

    # ---- relays ----

    def _relay(self, node: str) -> Any:
        if node not in self._relays:
            options = self._options
            heir_of = self._folders.get(node)
            self._relays[node] = relay.start(node, self._root, heir_of, options.pack, _LINK_PATIENCE_S)
        return self._relays[node]

    def _ask(self, call: Any, node: str) -> Any:
        try:
            return ray.get(call, timeout=_LINK_PATIENCE_S)
        except GetTimeoutError as error:
            raise WeightsError(
                f"the weight relay of node {node} has not answered for {_LINK_PATIENCE_S:.0f} s\n"
                "Run the same command again: it resumes from the last checkpoint."
            ) from error

    def _ask_all(self, calls: dict[str, Any], problem: str) -> dict[str, Exception]:
        """Wait for calls to several nodes' relays; log their errors, with ``problem``, and return them by node."""
        if calls:
            ray.wait(list(calls.values()), num_returns=len(calls), timeout=_LINK_PATIENCE_S)
        failed: dict[str, Exception] = {}
        for node, call in calls.items():
            try:
                ray.get(call, timeout=0)
            except (RayActorError, GetTimeoutError) as error:
                failed[node] = error
                logger.warning("node %s %s: %s", node, problem, last_line(error))
        return failed

    def _retry_over_deaths(self, needed: bool, work: Callable[[], None], only: str | None = None) -> None:
        """Do some work; replace relays that die and repeat it. Arguments of :meth:`_drop_dead_relays`."""
        for _ in range(_DEATHS):
            try:
                return work()
            except RayActorError:
                if not self._drop_dead_relays(needed, only):
                    raise  # another actor died
        work()

    def _drop_dead_relays(self, needed: bool, only: str | None = None) -> set[str]:
        """Drop relays that died or hang, and forget the replicas that read from them; return their nodes. New relays
        start on demand.

        ``needed``: the newest version has yet to be fetched; raises WeightsError if the actor's node lost it. ``only``:
        the node to check.
        """
        calls = {node: each.folder.remote() for node, each in self._relays.items() if only in (None, node)}
        died = set[str]()
        for node, error in self._ask_all(calls, "has a weight relay that does not answer").items():
            if isinstance(error, ActorUnavailableError):  # a network error, which may pass
                continue
            logger.warning(GONE, node, last_line(error))
            ray.kill(self._relays.pop(node))
            died.add(node)
            self._nodes = {replica: nodes for replica, nodes in self._nodes.items() if node not in nodes}
            if needed and self._published is not None and self._published.node == node and not self._recover():
                raise WeightsError(
                    f"the actor's node lost the new weights before all replicas had them: {last_line(error)}\n"
                    "Run the same command again: it resumes from the last checkpoint."
                ) from error
        return died

    def _recover(self) -> bool:
        """Start a new relay on the actor's node; return whether it finds the newest version intact."""
        node, version, identity, _ = self._newest
        for _ in range(_DEATHS):
            try:
                return self._ask(self._relay(node).recover.remote(version, identity), node)
            except WeightsError:
                return False
            except RayActorError as error:
                logger.warning("the new weight relay of node %s died, too: %s", node, last_line(error))
                ray.kill(self._relays.pop(node))
        return False


def sites_of(nodes: Iterable[str], label: str | None) -> dict[str, str | None]:
    """Return the site of each Ray node, the value of its label; ``None`` without one."""
    labels = {node["NodeID"]: node.get("Labels") or {} for node in ray.nodes()} if label else {}
    return {node: labels.get(node, {}).get(label) for node in nodes}


def choose_manager(theirs: CheckpointEngineManager, options: WeightsConfig, rollout: Any) -> CheckpointEngineManager:
    """Return the manager that replaces verl's: of the relay, of a kept process group (``nccl``), or verl's own.
    ``rollout``, verl's config of the engines, gives the dtype of sent matrices.
    """
    if theirs.backend == BACKEND:
        return RelayManager(theirs.config, theirs.actor_wg, theirs.replicas, options, transfer_dtype(rollout))
    if theirs.backend == "nccl" and not (theirs.config.engine_kwargs.get("nccl") or {}).get("rebuild_group"):
        theirs = ProcessGroupManager(theirs.config, theirs.actor_wg, theirs.replicas)
    if theirs.backend == "delta_sharded":
        log_uncompared("the backend delta_sharded sends only what changed")
        return theirs
    return ComparingManager(theirs)


class ComparingManager(wrapt.ObjectProxy):
    """Proxy of a checkpoint manager that compares the engines' weights with the actor's after each sync."""

    def update_weights(self, *args: Any, **kwargs: Any) -> Any:
        metrics = self.__wrapped__.update_weights(*args, **kwargs)
        compare_replicas(self.actor_wg, self.replicas)
        return metrics


def sent_by(actor: Any) -> Sent | None:
    """Return the samples that an actor's workers took when they sent their weights; ``None`` if they took none."""
    take: Any = getattr(actor, "sent_weights", None)  # a method of our workers
    for sent in () if take is None else take():
        if sent is not None:
            return sent
    log_uncompared("the actor's worker or its backend sends them in another way than verl's")
    return None


def compare_replicas(actor: Any, replicas: Iterable[Any]) -> None:
    """Compare the weights of replicas with those that the actor has sent. Raises WeightsError if they differ."""
    if (sent := sent_by(actor)) is None:
        return
    replicas = list(replicas)
    held = ray.get([replica.servers[0].held_weights.remote() for replica in replicas])
    for replica, workers in zip(replicas, held, strict=True):
        compare(replica.replica_rank, sent, [Held(**each) for each in workers])


def transfer_dtype(rollout: Any) -> str | None:
    """Return the dtype in which matrices are sent: the engines' dtype; ``None`` (the actor's) if they quantise."""
    if rollout.get("quantization"):
        return None
    return _NARROW.get(str(rollout.get("dtype")).removeprefix("torch."))
