"""The trainer's side of the relay; it replaces verl's checkpoint manager."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayTaskError

from verl_rhyme.config import WeightsConfig
from verl_rhyme.observability import metrics as names
from verl_rhyme.observability.errors import last_line
from verl_rhyme.weights import BACKEND, PATIENCE_S, relay
from verl_rhyme.weights.carrier import Carrier
from verl_rhyme.weights.delivery import Target
from verl_rhyme.weights.folder import UnsentError, WeightsError
from verl_rhyme.weights.samples import sent_by
from verl_rhyme.weights.sites import tree

#: Seconds for which relays may keep the trainer waiting for metrics, or for the removal of their files at the end.
_CLOSE_S = 20.0
#: Seconds between two looks at the relays during a delivery, and before a delivery is retried.
_LOOK_S, _PAUSE_S = 20.0, 1.0
#: How often a relay may die during one request.
_DEATHS = 3
#: verl's rollout dtypes narrower than float32, with torch's names.
_NARROW = {"bfloat16": "bfloat16", "float16": "float16", "half": "float16"}
#: Log line that ``benchmarks.faults`` counts.
GONE = "the weight relay of node %s died or hangs; a new one replaces it: %s"

logger = logging.getLogger(__name__)


class _Published(NamedTuple):
    """The newest version."""

    node: str  # the actor's, which has it
    version: int
    sent: Any  # reference to samples of it


class RelayManager(Carrier):
    """Carrier that sends weights through relays.

    The actor writes a version once, to its own node's relay, and takes no part in the transfer to replicas. Each
    replica loads the version by itself while other replicas generate and the actor trains, and resumes generation at
    once. A relay that dies or hangs is replaced; deliveries that it interrupts start again.

    ``options`` are of transfers between sites. ``rollout`` gives the dtype of sent matrices (:func:`transfer_dtype`).
    """

    def __init__(self, config: Any, actor_wg: Any, replicas: list[Any], options: WeightsConfig, rollout: Any) -> None:
        super().__init__(config, actor_wg, replicas)
        self._options, self._dtype = options, transfer_dtype(rollout)
        self._root = (config.engine_kwargs.get(BACKEND) or {}).get("folder")
        self._relays: dict[str, Any] = {}  # by node
        self._folders: dict[str, str] = {}  # of relays, dead ones included, by node
        self._fetches: dict[str, tuple[Any, float]] = {}  # unanswered requests by node, and when they were sent
        self._sites: dict[str, str | None] = {}
        self._nodes: dict[Any, list[str]] = {}  # of each replica's workers
        self._node: str | None = None  # the actor's
        self._actor_arguments: dict[str, Any] = {}  # arguments that the actor's engine was initialized with
        self._published: _Published | None = None
        #: Deliveries under way, by replica, or the errors of replicas whose workers could not be reached.
        self._behind: dict[Any, Any] = {}

    # ---- the trainer's calls ----

    def update_weights(self, global_steps: int) -> dict[str, Any]:  # type: ignore[override]
        behind = self.check()
        self._write(global_steps)
        if self.waits:
            self.deliver(self.replicas, global_steps)
            return self._take_link_metrics()
        metrics = self._take_link_metrics()
        self._start(self.replicas, self.patient)
        return {names.REPLICAS_BEHIND: float(behind), **metrics}

    def check(self) -> int:
        """As :meth:`.Carrier.check`; raises WeightsError if the version did not reach a replica."""
        self._behind = {replica: each for replica, each in self._behind.items() if replica in self.replicas}
        failed = self._poll(self._behind)
        for replica, error in failed.items():  # the replica died (later checks notice), its relay, or a link was cut
            logger.warning(
                "replica %d did not load the new weights and tries again: %s", replica.replica_rank, last_line(error)
            )
        self._start(failed, self.patient)
        return len(self._behind)

    def finish_deliveries(self) -> None:
        """As :meth:`.Carrier.finish_deliveries`, without patience for running requests."""
        self.check()
        self.deliver(list(self._behind))

    def deliver(self, replicas: Iterable[Any], version: int | None = None) -> None:
        """Wait until these replicas have loaded the newest version. Raises RayError or WeightsError if one could not;
        broken links have :data:`.PATIENCE_S` to come back.
        """
        replicas, until = list(replicas), 0.0  # deadline of all retries
        self._start(replicas)
        while left := [replica for replica in replicas if replica in self._behind]:
            under_way = [each for replica in left if not isinstance(each := self._behind[replica], Exception)]
            ray.wait(under_way, num_returns=len(under_way), timeout=_LOOK_S)
            if not (failed := self._poll(left)):
                if not self._behind.keys().isdisjoint(left):
                    self._request_fetches()  # which detects relays that hang
                continue
            until = until or time.monotonic() + PATIENCE_S
            for error in failed.values():
                if time.monotonic() > until or not isinstance(error, (ActorUnavailableError, UnsentError)):
                    raise error  # the replica's own
                logger.warning("sending the new weights to replicas again: %s", last_line(error))
            time.sleep(_PAUSE_S)
            self._start(failed)

    def release(self, replica: Any) -> None:
        if replica in self._behind:
            self.deliver([replica])
        if replica in self._nodes:
            self._ask(self._nodes[replica][0], "forget_replica", replica.replica_rank)

    def close(self) -> None:
        if closed := [each.close.remote() for each in self._relays.values()]:
            ray.wait(closed, num_returns=len(closed), timeout=_CLOSE_S)

    # ---- the newest version ----

    def _write(self, version: int) -> None:
        if self._published is not None and version <= self._published.version:
            raise WeightsError(f"version {version} is published after version {self._published.version}")
        ranks = self.actor_wg.world_size
        if self._node is None:
            self._node = self._call_actor("prepare")[0]["node"]
        node = self._node
        self._folders[node] = self._ask(node, "expect", version)
        arguments = {"path": [self._folders[node]] * ranks, "dtype": [self._dtype] * ranks}
        if arguments != self._actor_arguments:
            self._call_actor("init_process_group", **arguments)
            self._actor_arguments = arguments
        ray.get(self.actor_wg.update_weights(global_steps=version, mode=BACKEND))
        self._published = _Published(node, version, ray.put(sent_by(self.actor_wg)))
        self._check_source()

    def _call_actor(self, method: str, **arguments: Any) -> list[Any]:
        """Return the answers of all training workers; WeightsError if one hangs."""
        call = self.actor_wg.execute_checkpoint_engine(method=[method] * self.actor_wg.world_size, **arguments)
        try:
            return ray.get(call, timeout=PATIENCE_S)
        except GetTimeoutError as error:
            raise WeightsError(
                f"the training workers did not answer {method} within {PATIENCE_S:.0f} s: their processes hang\n"
                "Run the same command again: it resumes from the last checkpoint."
            ) from error

    def _check_source(self) -> None:
        """Raise WeightsError if the actor's node has lost the newest version."""
        published = self._newest
        with suppress(ActorUnavailableError):  # a network error, which may pass
            if not self._ask(published.node, "has", published.version):
                raise WeightsError(
                    "the actor's node lost the new weights before all replicas had them\n"
                    "Run the same command again: it resumes from the last checkpoint."
                )

    @property
    def _newest(self) -> _Published:
        assert self._published is not None, "no version is published yet"
        return self._published

    # ---- deliveries ----

    def _start(self, replicas: Iterable[Any], patient: bool = False) -> None:
        """Start to deliver the newest version to these replicas."""
        if not (replicas := list(replicas)):
            return
        errors = self._register(replicas)
        self._request_fetches()
        newest = self._newest
        for replica in replicas:
            if (nodes := self._nodes.get(replica)) is None:
                self._behind[replica] = errors.get(replica, UnsentError("the weight relay of its node does not answer"))
            else:
                deliver = self._relay(nodes[0]).deliver
                self._behind[replica] = deliver.remote(Target.of(replica), newest.version, patient, newest.sent)

    def _register(self, replicas: list[Any]) -> dict[Any, Exception]:
        """Have the workers of new replicas read on their nodes; return the errors of those that cannot be reached."""
        known = {*self.replicas, *replicas}
        self._nodes = {replica: nodes for replica, nodes in self._nodes.items() if replica in known}
        new = [replica for replica in replicas if replica not in self._nodes]
        errors: dict[Any, Exception] = {}

        def call(method: str, arguments: dict[Any, list[dict[str, Any]]]) -> dict[Any, list[Any]]:
            """Call the workers of all replicas at once; return the answers of those whose workers all answer."""
            calls = {
                replica: [
                    worker.execute_checkpoint_engine.remote(method, **given)
                    for worker, given in zip(replica.workers, each, strict=True)
                ]
                for replica, each in arguments.items()
            }
            answers, until = {}, time.monotonic() + PATIENCE_S
            for replica, each in calls.items():
                try:
                    answers[replica] = ray.get(each, timeout=max(0.0, until - time.monotonic()))
                except (RayActorError, GetTimeoutError) as error:  # the check of dead replicas finds one that hangs
                    errors[replica] = error
            return answers

        prepared = call("prepare", {replica: [{} for _ in replica.workers] for replica in new})
        nodes = {replica: [each["node"] for each in answers] for replica, answers in prepared.items()}
        wanted = {node for each in nodes.values() for node in each}
        for node in wanted:
            self._relay(node)  # all missing ones start at once
        folders = {}
        for node in wanted:
            with suppress(ActorUnavailableError):
                folders[node] = self._folders[node] = self._ask(node, "folder")
        reached = {replica: each for replica, each in nodes.items() if folders.keys() >= set(each)}
        joined = call("init_process_group", {r: [{"path": folders[node]} for node in reached[r]] for r in reached})
        self._nodes |= {replica: nodes[replica] for replica in joined}
        return errors

    def _request_fetches(self) -> None:
        """Have all nodes fetch the newest version, unless they have it or do so already."""
        self._check_source()
        source, version, _ = self._newest
        needed = {node for nodes in self._nodes.values() for node in nodes}
        if not {source, *needed} <= self._sites.keys():
            self._sites = sites_of({source, *needed}, self._options.site_label)
        for node, hops in tree(source, needed, self._sites).items():
            sources = [(self._relay(hop.node), hop.remote) for hop in hops]
            _, since = self._fetches.get(node, (None, time.monotonic()))
            self._fetches[node] = self._relay(node).fetch.remote(version, sources), since

    def _poll(self, replicas: Iterable[Any]) -> dict[Any, Exception]:
        """Forget replicas that have loaded the newest version, and relays that died or hang. Return the errors of
        failed deliveries: UnsentError if a relay died. Raises WeightsError if the version did not reach a replica.
        """
        for node, (call, since) in list(self._fetches.items()):
            try:
                ray.get(call, timeout=0)
                del self._fetches[node]
            except GetTimeoutError as error:
                if time.monotonic() - since > PATIENCE_S:
                    self._drop_relay(node, error)
            except RayActorError as error:
                self._drop_relay(node, error)
        failed: dict[Any, Exception] = {}
        for replica in list(replicas):
            delivery = self._behind[replica]
            if isinstance(delivery, Exception):
                failed[replica] = delivery
                continue
            try:
                ray.get(delivery, timeout=0)
                del self._behind[replica]
            except GetTimeoutError:
                if replica not in self._nodes:
                    failed[replica] = UnsentError("the weight relay of a node of the replica was replaced")
            except RayTaskError as error:  # raised in the relay's method
                if isinstance(error, WeightsError) and not isinstance(error, UnsentError):
                    raise
                failed[replica] = error
            except ActorUnavailableError as error:
                failed[replica] = error
            except RayActorError as error:
                if replica in self._nodes:
                    self._drop_relay(self._nodes[replica][0], error)
                failed[replica] = UnsentError(last_line(error))
        return failed

    def _take_link_metrics(self) -> dict[str, float]:
        if len(set(self._sites.values())) < 2:
            return {}
        calls = [each.take_tally.remote() for each in self._relays.values()]
        answered, _ = ray.wait(calls, num_returns=len(calls), timeout=_CLOSE_S)
        tally: Counter[str] = Counter()
        for answer in answered:
            with suppress(RayActorError):  # later checks notice a dead relay
                tally.update(ray.get(answer))
        return {
            names.SLOW_LINK_MB: tally["remote_bytes"] / 1e6,
            names.DAMAGED_CHUNKS: float(tally["damaged"]),
            names.LOST_CHUNKS: float(tally["lost"]),
        }

    # ---- relays ----

    def _relay(self, node: str) -> Any:
        if node not in self._relays:
            heir_of = self._folders.get(node)
            self._relays[node] = relay.start(node, self._root, heir_of, self._options.pack)
        return self._relays[node]

    def _ask(self, node: str, method: str, *arguments: Any) -> Any:
        """Return a relay's answer. One that dies or hangs is replaced, and the new one asked."""
        for _ in range(_DEATHS):
            try:
                call = getattr(self._relay(node), method).remote(*arguments)
                return ray.get(call, timeout=PATIENCE_S)
            except (RayActorError, GetTimeoutError) as error:
                if not self._drop_relay(node, error):
                    raise
                why = last_line(error)
        raise WeightsError(
            f"the weight relay of node {node} died {_DEATHS} times: {why}\n"
            "Run the same command again: it resumes from the last checkpoint."
        )

    def _drop_relay(self, node: str, error: Exception) -> bool:
        """Drop a relay that died or hangs, and forget the replicas that read from it; a new one starts on demand.
        Return whether it did: after a network error it may live.
        """
        self._fetches.pop(node, None)
        if isinstance(error, ActorUnavailableError):
            return False
        logger.warning(GONE, node, last_line(error))
        ray.kill(self._relays.pop(node))
        self._nodes = {replica: nodes for replica, nodes in self._nodes.items() if node not in nodes}
        return True


def sites_of(nodes: Iterable[str], label: str | None) -> dict[str, str | None]:
    """Return the site of each Ray node, the value of its label; ``None`` without one."""
    labels = {node["NodeID"]: node.get("Labels") or {} for node in ray.nodes()} if label else {}
    return {node: labels.get(node, {}).get(label) for node in nodes}


def transfer_dtype(rollout: Any) -> str | None:
    """Return the dtype in which matrices are sent: the engines' dtype; ``None`` (the actor's) if they quantise."""
    if rollout.get("quantization"):
        return None
    return _NARROW.get(str(rollout.get("dtype")).removeprefix("torch."))
