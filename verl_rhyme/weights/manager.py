"""The trainer's end of the relay, in the place of verl's checkpoint manager."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError
from verl.checkpoint_engine import CheckpointEngineManager

from verl_rhyme.config import WeightsConfig
from verl_rhyme.observability import metrics as names
from verl_rhyme.observability.errors import last_line
from verl_rhyme.processes import background
from verl_rhyme.weights import BACKEND, relay
from verl_rhyme.weights.delivery import Target
from verl_rhyme.weights.folder import UnsentError, WeightsError
from verl_rhyme.weights.sites import tree

#: Seconds that relays have to remove what they hold when the run ends.
_CLOSE_S = 20.0
#: Seconds between two looks at relays while replicas are waited for, and before one is told again.
_LOOK_S, _PAUSE_S = 20.0, 1.0
#: Seconds for which a node waits for one that sends nothing, before it asks another or gives up.
_LINK_PATIENCE_S = 600.0
#: What verl's rollouts may compute in that is narrower than float32.
_NARROW = {"bfloat16": "bfloat16", "float16": "float16", "half": "float16"}
#: How often relays may die at one thing that they are asked for.
_DEATHS = 3
_DEFAULT = WeightsConfig()
#: A line of the log that ``benchmarks.faults`` counts.
GONE = "the relay of node %s is gone, another one takes its place: %s"

logger = logging.getLogger(__name__)


class RelayManager(CheckpointEngineManager):
    """As verl's, but that the actor takes part in no replica's transfer: it writes a version once, to its own node's
    relay (:meth:`publish`). From there each replica gets it for itself (:meth:`deliver`): while others generate, and
    the actor trains. Unless the trainer :attr:`waits`, all that comes after the actor's writing is done in the
    background; what goes wrong there is raised at the next look.

    Args:
        config: verl's, of the checkpoint engine.
        actor_wg: The actor's workers.
        replicas: Those that take weights.
        options: How they go between sites.
        dtype: What matrices are written in (``engine.narrowed``); ``None``: as the actor has them.
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
        self._folders: dict[str, str] = {}  # theirs, also of those that died
        self._sites: dict[str, str | None] = {}
        self._nodes: dict[Any, list[str]] = {}  # of each replica's workers
        self._node: str | None = None  # the actor's
        self._told_actor: dict[str, Any] = {}  # where it writes, and how
        self._published: tuple[str, int, str] | None = None  # the actor's node; the newest version; its identity
        self._handing: Future[dict[Any, Any]] | None = None  # the newest version out, in the background
        self._handed: list[Any] = []  # replicas that it is handed to
        self._missed: list[Any] = []  # of these, those that could not be met
        self._failed: Exception | None = None  # handing it out
        self._tallied: dict[str, float] = {}
        self._under_way: dict[Any, Any] = {}  # deliveries that nobody waits for, by replica
        #: The trainer waits until all replicas have a version, rather than to go on while they take it.
        self.waits = True
        #: They take it when nothing runs there that came under an older one; else that is cut short.
        self.patient = False

    def update_weights(self, global_steps: int) -> dict[str, Any]:  # type: ignore[override]
        """A version to all replicas; of those that are done with it each goes on at once.

        Args:
            global_steps: The version.

        Returns:
            Metrics, by their names.

        Raises:
            RayError, WeightsError: One could not, now or before.
        """
        behind = self.check()
        self._join()
        self.publish(global_steps)
        if self.waits:
            self._over_deaths(True, lambda: self._offer(self.replicas))
            self.deliver(self.replicas)
            return self._told()
        told, self._tallied = self._tallied, {}
        self._handed = list(self.replicas)
        self._handing = background.begin(self._hand_out, self._handed)
        return {names.REPLICAS_BEHIND: float(behind), **told}

    def check(self) -> int:
        """How many replicas have not taken the newest version yet; one that failed tries again, or dies. Does not wait.

        Raises:
            WeightsError: The version did not get to one of them.
        """
        if self._handing is not None and not self._handing.done():
            return len(self.replicas)
        self._join()
        if self._failed is not None:
            raise self._failed
        self._missed = [replica for replica in self._missed if replica in self.replicas]
        for replica in list(self._missed):  # the network between may have come back
            with suppress(RayActorError):
                self._meet([replica])
                self._spread()
            if replica in self._nodes:
                self._missed.remove(replica)
                self._under_way[replica] = self._deliver(replica, self.patient)
        done: list[Any] = []
        if self._under_way:
            done, _ = ray.wait(list(self._under_way.values()), num_returns=len(self._under_way), timeout=0)
        for replica, delivery in list(self._under_way.items()):
            if delivery not in done:
                continue
            del self._under_way[replica]
            try:
                ray.get(delivery)
            except Exception as error:  # it died, which the next look finds, or its relay did, or a link was cut
                if replica in self.replicas:
                    if isinstance(error, WeightsError) and not isinstance(error, UnsentError):
                        raise
                    logger.warning("replica %d did not take new weights: %s", replica.replica_rank, last_line(error))
                    self._part_with_dead(needed=True)
                    with suppress(RayActorError):
                        self._meet([replica])
                        self._spread()
                    if replica in self._nodes:
                        self._under_way[replica] = self._deliver(replica, self.patient)
        return len(self._under_way) + len(self._missed)

    def settle(self) -> None:
        """Have all replicas take the newest version now."""
        self._join()
        self.check()
        if behind := [replica for replica in self._under_way if replica in self.replicas]:
            self.deliver(behind)
        self._under_way.clear()

    def close(self) -> None:
        """The run ends: no node keeps weights."""
        if closed := [each.close.remote() for each in list(self._relays.values())]:
            ray.wait(closed, num_returns=len(closed), timeout=_CLOSE_S)

    def publish(self, version: int) -> None:
        """Have the actor write that version to its own node's relay, which is all that the actor has to do with it.
        Where the relay dies meanwhile, it is written once more.

        Raises:
            WeightsError: There is no room for it.
        """
        self._over_deaths(False, lambda: self._write(version), only=self._node)

    def _write(self, version: int) -> None:
        ranks = self.actor_wg.world_size
        if self._node is None:
            self._node = ray.get(self.actor_wg.execute_checkpoint_engine(["prepare"] * ranks))[0]["node"]
        node = self._node
        self._part_with_dead(needed=False, only=node)
        source = self._relay(node)
        self._folders[node] = self._answer(source.folder.remote(), node)
        self._answer(source.expect.remote(version), node)
        told = {"path": [self._folders[node]] * ranks, "dtype": [self._dtype] * ranks}
        if told != self._told_actor:
            ray.get(self.actor_wg.execute_checkpoint_engine(method=["init_process_group"] * ranks, **told))
            self._told_actor = told
        ray.get(self.actor_wg.update_weights(global_steps=version, mode=BACKEND))
        self._published = node, version, self._answer(source.written.remote(version), node)

    def _hand_out(self, replicas: list[Any]) -> dict[Any, Any]:
        """In the background: the newest version to all nodes; deliveries, by replica."""
        try:
            self._over_deaths(True, lambda: self._offer(replicas))
        except RayActorError:  # of a replica, as the next look finds: others get it
            for replica in replicas:
                with suppress(RayActorError):
                    self._meet([replica])
            self._over_deaths(True, self._spread)
        self._tallied = self._told()
        return {replica: self._deliver(replica, self.patient) for replica in replicas if replica in self._nodes}

    def _offer(self, replicas: list[Any]) -> None:
        """The newest version is on its way to the nodes of these replicas."""
        assert self._published is not None
        self._part_with_dead(needed=True)
        source, version, _ = self._published
        asked = {node: each.expect.remote(version) for node, each in self._relays.items() if node != source}
        self._answers(asked, "makes no room for new weights yet")  # it does when it fetches them
        self._meet(replicas)
        self._spread()

    def _join(self) -> None:
        """Wait until the newest version is handed out. What went wrong is raised by :meth:`check`, at every look until
        the run ends: whoever asks for one replica must not take it for that replica's error."""
        handing, self._handing = self._handing, None
        if handing is None:
            return
        try:
            under_way = handing.result()
        except Exception as error:
            self._failed = error
            return
        self._under_way |= under_way
        self._missed = [replica for replica in self._handed if replica not in under_way]

    def deliver(self, replicas: Iterable[Any]) -> None:
        """Have these replicas take the newest version, and wait until they have.

        A relay that dies or hangs meanwhile is replaced, and a link that is cut waited for (:data:`_LINK_PATIENCE_S`).

        Raises:
            RayError, WeightsError: One could not.
        """
        assert self._published is not None, "nothing was published yet"
        self._join()
        replicas = list(replicas)
        self._over_deaths(True, lambda: self._ready(replicas))
        waiting = {self._deliver(replica): replica for replica in replicas}
        until = 0.0  # of all that goes wrong
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
            died = self._part_with_dead(needed=True)
            if failed is not None:
                until = until or time.monotonic() + _LINK_PATIENCE_S
                if not (died or isinstance(failed, (ActorUnavailableError, UnsentError))) or time.monotonic() > until:
                    raise failed  # of the replica itself
                logger.warning("replicas are told again to take new weights: %s", last_line(failed))
                time.sleep(_PAUSE_S)
            if again or died:
                lost = [each for each, replica in waiting.items() if replica not in self._nodes]
                again += [waiting.pop(each) for each in lost]
                self._over_deaths(True, lambda: self._ready(replicas, again=True))
                waiting |= {self._deliver(replica): replica for replica in again}

    def part_with(self, replica: Any) -> None:
        """A replica, no longer among :attr:`replicas`, is about to rest; what it was to take is taken before.

        Raises:
            RayError, WeightsError: It could not be.
        """
        self._join()
        if self._under_way.pop(replica, None) is not None:
            self.deliver([replica])
        if replica in self._nodes:
            ray.get(self._relay(self._nodes[replica][0]).forget.remote(replica.replica_rank))

    # ---- within ----

    def _over_deaths(self, needed: bool, work: Callable[[], None], only: str | None = None) -> None:
        """Again, with others in their place, where relays have died; arguments as of :meth:`_part_with_dead`."""
        for _ in range(_DEATHS):
            try:
                return work()
            except RayActorError:
                if not self._part_with_dead(needed, only):
                    raise  # another's death
        work()

    def _ready(self, replicas: list[Any], again: bool = False) -> None:
        """The newest version is on its way to the nodes of these replicas, told ``again`` also where it was."""
        if self._meet(replicas) or again:
            self._spread()

    def _deliver(self, replica: Any, patient: bool = False) -> Any:
        """By the relay of its first worker's node."""
        assert self._published is not None
        _, version, identity = self._published
        relay = self._relay(self._nodes[replica][0])
        return relay.deliver.remote(Target.of(replica), version, patient, identity)

    def _relay(self, node: str) -> Any:
        if node not in self._relays:
            options = self._options
            heir_of = self._folders.get(node)
            self._relays[node] = relay.start(node, self._root, heir_of, options.pack, _LINK_PATIENCE_S)
        return self._relays[node]

    def _meet(self, replicas: list[Any]) -> bool:
        """Tell the workers of replicas that are new where their node's weights lie; whether there are such."""
        known = {*self.replicas, *replicas}
        self._nodes = {replica: nodes for replica, nodes in self._nodes.items() if replica in known}
        new = [replica for replica in replicas if replica not in self._nodes]
        workers = [worker for replica in new for worker in replica.workers]
        told = ray.get([worker.execute_checkpoint_engine.remote("prepare") for worker in workers])
        asked = {each["node"]: self._relay(each["node"]) for each in told}  # which starts those that are missing
        folders = {node: each.folder.remote() for node, each in asked.items()}
        self._folders |= {node: self._answer(answer, node) for node, answer in folders.items()}
        places = [(worker, self._folders[each["node"]]) for worker, each in zip(workers, told, strict=True)]
        ray.get([worker.execute_checkpoint_engine.remote("init_process_group", path=at) for worker, at in places])
        nodes = iter(told)
        self._nodes |= {replica: [next(nodes)["node"] for _ in replica.workers] for replica in new}
        return bool(new)

    def _spread(self) -> None:
        """Each node passes the version on to others; to other sites it goes once each."""
        assert self._published is not None
        source, version, identity = self._published
        needed = {node for nodes in self._nodes.values() for node in nodes}
        if not {source, *needed} <= self._sites.keys():
            self._sites = sites_of({source, *needed}, self._options.site_label)
        asked = tree(source, needed, self._sites)
        fetches = {
            node: self._relay(node).fetch.remote(version, identity, [(self._relay(hop.node), hop.far) for hop in hops])
            for node, hops in asked.items()
        }
        self._answers(fetches, "gets no weights yet")  # those who take it there have it told again

    def _answer(self, call: Any, node: str) -> Any:
        """A relay's to a question that cannot wait.

        Raises:
            WeightsError: It does not come.
        """
        try:
            return ray.get(call, timeout=_LINK_PATIENCE_S)
        except GetTimeoutError as error:
            raise WeightsError(
                f"the relay of weights on node {node} has not answered for {_LINK_PATIENCE_S:.0f} s\n"
                "The same command goes on from the last checkpoint."
            ) from error

    def _answers(self, calls: dict[str, Any], else_: str) -> dict[str, Exception]:
        """Wait for what nodes' relays do, all together; errors of those that did not, which are told in the log."""
        if calls:
            ray.wait(list(calls.values()), num_returns=len(calls), timeout=_LINK_PATIENCE_S)
        failed: dict[str, Exception] = {}
        for node, call in calls.items():
            try:
                ray.get(call, timeout=0)
            except (RayActorError, GetTimeoutError) as error:
                failed[node] = error
                logger.warning("node %s %s: %s", node, else_, last_line(error))
        return failed

    def _part_with_dead(self, needed: bool, only: str | None = None) -> set[str]:
        """Relays that died, or hang, and who read from them; others start in their place.

        Args:
            needed: The newest version is yet to be fetched.
            only: Node whose relay is asked; ``None``: all.

        Returns:
            Their nodes.

        Raises:
            WeightsError: It cannot be, for it was the relay of the actor's node.
        """
        asked = {node: each.folder.remote() for node, each in self._relays.items() if only in (None, node)}
        died = set[str]()
        for node, error in self._answers(asked, "has a relay that does not answer").items():
            if isinstance(error, ActorUnavailableError):  # the network between: it may come back
                continue
            logger.warning(GONE, node, last_line(error))
            ray.kill(self._relays.pop(node))
            died.add(node)
            self._nodes = {replica: nodes for replica, nodes in self._nodes.items() if node not in nodes}
            if needed and self._published is not None and self._published[0] == node and not self._revived():
                raise WeightsError(
                    f"the actor's node lost its weights before all replicas had them: {last_line(error)}\nThe "
                    "same command goes on from the last checkpoint."
                ) from error
        return died

    def _revived(self) -> bool:
        """Whether what the dead relay of the actor's node has left is there, and all right; an heir may die, too."""
        assert self._published is not None
        node, version, identity = self._published
        for _ in range(_DEATHS):
            try:
                return self._answer(self._relay(node).revive.remote(version, identity), node)
            except WeightsError:
                return False
            except RayActorError as error:
                logger.warning("so is the one in its place: %s", last_line(error))
                ray.kill(self._relays.pop(node))
        return False

    def _told(self) -> dict[str, float]:
        """What went over slow links since the last update, if there are several sites."""
        if len(set(self._sites.values())) < 2:
            return {}
        tallies: Counter[str] = Counter()
        for answer in [each.tally.remote() for each in self._relays.values()]:
            with suppress(RayActorError, GetTimeoutError):  # of one that died the next look finds out
                tallies.update(ray.get(answer, timeout=_CLOSE_S))
        return {
            names.SLOW_LINK_MB: tallies["far_bytes"] / 1e6,
            names.DAMAGED_CHUNKS: float(tallies["damaged"]),
            names.LOST_CHUNKS: float(tallies["lost"]),
        }


def sites_of(nodes: Iterable[str], label: str | None) -> dict[str, str | None]:
    """Each Ray node's site, as its label says; ``None`` where it has none."""
    labels = {node["NodeID"]: node.get("Labels") or {} for node in ray.nodes()} if label else {}
    return {node: labels.get(node, {}).get(label) for node in nodes}


def relayed(
    manager: CheckpointEngineManager, options: WeightsConfig = _DEFAULT, rollout: Any = None
) -> CheckpointEngineManager:
    """Ours in the place of verl's, where the relay is what carries weights.

    Args:
        manager: verl's.
        options: Ours.
        rollout: verl's config of the engines, which tells what they make of weights.
    """
    if manager.backend != BACKEND:
        return manager
    return RelayManager(manager.config, manager.actor_wg, manager.replicas, options, travels_in(rollout))


def travels_in(rollout: Any) -> str | None:
    """What matrices are written in: what engines compute in, but for those that quantise what the actor has."""
    if rollout is None or rollout.get("quantization"):
        return None
    return _NARROW.get(str(rollout.get("dtype")).removeprefix("torch."))
