"""Agent loop workers whose engines are simulated, and counters for what passes between processes; for
:mod:`benchmarks.studies.coordinator`.

The workers are the real ones but for the agent loop: it sleeps for as long as its response takes, and tells what
verl's would. They stamp every end of an attempt before it is reported and every start as it arrives.
"""

from __future__ import annotations

import asyncio
import gc
import time
import zlib
from collections import Counter
from typing import Any

import numpy as np
import psutil
import ray
import transfer_queue as tq
import zmq.asyncio
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

from verl_rhyme.agent_loop.reports import Reports
from verl_rhyme.agent_loop.session import Session, current
from verl_rhyme.agent_loop.worker import SessionAgentLoopWorker
from verl_rhyme.coordinator import coordinator
from verl_rhyme.observability.request_record import RequestRecord
from verl_rhyme.scheduling.attempts import Ended, Start, sample_of

PROMPT_TOKENS, MOST_TOKENS, SAMPLES = 200, 20_480, 16


def count_wire() -> Counter[str]:
    """Messages and bytes that this process exchanges with TransferQueue, from now on."""
    counts: Counter[str] = Counter()
    send, receive = zmq.asyncio.Socket.send_multipart, zmq.asyncio.Socket.recv_multipart

    def sent(self: Any, frames: Any, *args: Any, **kwargs: Any) -> Any:
        counts["messages"] += 1
        counts["bytes"] += sum(memoryview(frame).nbytes for frame in frames)
        return send(self, frames, *args, **kwargs)

    async def received(self: Any, *args: Any, **kwargs: Any) -> Any:
        frames = await receive(self, *args, **kwargs)
        counts["messages"] += 1
        counts["bytes"] += sum(len(frame) for frame in frames)
        return frames

    zmq.asyncio.Socket.send_multipart, zmq.asyncio.Socket.recv_multipart = sent, received
    return counts


def size(*what: Any) -> int:
    """Bytes of a Ray message with this."""
    return len(ray.cloudpickle.dumps(what))


class _Counted:
    """The coordinator's handle, and how often and with how much it is told."""

    def __init__(self, actor: Any, counts: Counter[str]) -> None:
        self._actor, self._counts = actor, counts

    @property
    def ended(self) -> Any:
        return self

    def remote(self, told: list[Ended]) -> Any:
        self._counts["ended_calls"] += 1
        self._counts["ended_bytes"] += size(told)
        self._counts["ended_events"] += len(told)
        return self._actor.report_ended.remote(told)


class SimulatedWorker(SessionAgentLoopWorker.__ray_metadata__.modified_class):  # type: ignore[misc]
    """The real worker over simulated engines; :meth:`reset` comes first."""

    def __init__(self) -> None:
        tq.init()
        rollout = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "calculate_log_probs": True, "n": SAMPLES}
        self.config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})
        self.background_tasks: set[Any] = set()
        self._coupled, self._seed, self._filter_metric, self._tool_timeout = False, 0, None, 3600.0
        self.distillation_enabled, self.processor, self.reward_loop_worker_handles = False, None, None
        self.wire = count_wire()
        gc.freeze()

    async def reset(self, tokens: int, seconds: float, echo: bool) -> None:
        """Begin another measurement, whose coordinator is another.

        Args:
            tokens: Of a response, on average; log-normal, among prompts and within each.
            seconds: That such a response takes.
            echo: What it is to start has ended at once, and leaves nothing in TransferQueue.
        """
        await self.stop()
        self._tokens, self._token_s, self._echo = tokens, seconds / tokens, echo
        self._version, self._stopped = 0, False
        self._attempts: dict[str, Any] = {}
        self._reports = Reports()
        self.counts: Counter[str] = Counter()
        self.wire.clear()
        self.begun: list[float] = []  # a stamp for each start
        self.freed: list[float] = []  # for each attempt that the engine is done with
        self._cpu = time.process_time()

    async def figures(self) -> dict[str, Any]:
        """Counts, and the stamps."""
        return {
            "counts": dict(self.counts),
            "wire": dict(self.wire),
            "begun": np.array(self.begun),
            "freed": np.array(self.freed),
            "cpu": time.process_time() - self._cpu,
        }

    # ---- the engines ----

    _running: set[asyncio.Future[None]] = set()  # noqa: RUF012  one worker in a process

    async def stop(self) -> None:
        """Abort what runs and what comes."""
        self._stopped = True
        for response in self._running:
            if not response.done():
                response.set_result(None)

    async def resume(self, version: int) -> None:
        self._version, self._stopped = version, False

    # ---- the worker's ----

    async def attach(self, actor: Any) -> list[str]:
        return await super().attach(_Counted(actor, self.counts))

    async def start_attempts(self, starts: list[Start], step: int) -> None:
        self.begun += [time.time()] * len(starts)
        self.counts["begin_calls"] += 1
        self.counts["begin_bytes"] += size(starts)
        self.counts["starts"] += len(starts)
        if not self._echo:
            await super().start_attempts(starts, step)
            return
        task = asyncio.ensure_future(self._end(starts))
        self.background_tasks.add(task)
        task.add_done_callback(self.background_tasks.discard)

    async def _end(self, starts: list[Start]) -> None:
        now, told = time.time(), []
        for start in starts:
            record = _record(Session(), "0" * 32, sample_of(start.name)[1], now, self._tokens, 0)
            told.append(Ended(start.name, "generated", self._tokens, 0, [record]))
        self.freed += [now] * len(starts)
        await asyncio.gather(*(self._reports.send(ended) for ended in told))
        await asyncio.gather(*(self._reports.send(Ended(start.name, "finished")) for start in starts))

    async def _report(self, session: Session, status: Any) -> None:
        self.freed.append(time.time())
        await super()._report(session, status)

    async def _run_agent_loop(
        self, sampling_params: Any, trajectory: Any, *, session_id: int, agent_name: str, trace: bool, **prompt: Any
    ) -> None:
        session = current()
        assert session is not None
        tokens, log_probs, versions = await self._generate(session, prompt["uid"], session_id)
        output = AgentLoopOutput(
            prompt_ids=list(range(PROMPT_TOKENS)),
            response_ids=tokens,
            response_mask=[1] * len(tokens),
            response_logprobs=log_probs,
            reward_score=float(len(tokens) % 2),
            num_turns=2,
            metrics=AgentLoopMetrics(),
            extra_fields={"turn_scores": [], "tool_rewards": [], **versions},
        )
        await self._agent_loop_postprocess(output, trajectory["validate"], session_id=session_id, **prompt)

    async def _generate(self, session: Session, uid: str, number: int) -> tuple[list[int], list[float], dict[str, Any]]:
        turn, _ = session.begin_turn(zlib.crc32(uid.encode()).to_bytes(4, "big").hex() * 4)
        before, began, version = len(turn.tokens), time.time(), self._version
        left = self._length(uid, number) - before
        aborted = self._stopped or await self._sleep(left * self._token_s)
        made = min(left, int((time.time() - began) / self._token_s)) if aborted else left
        if made:
            session.records.append(_record(session, turn.prompt, number, began, made, version))
        session.extend(turn, [7] * made, [-0.5] * made, version, "abort" if aborted else "stop", version)
        told = {"min_global_steps": turn.first_version, "max_global_steps": turn.version, "global_steps": turn.version}
        return turn.tokens.tolist(), turn.log_probs.tolist(), told  # type: ignore[union-attr]

    async def _sleep(self, seconds: float) -> bool:
        """Whether it was aborted."""
        response = asyncio.get_running_loop().create_future()
        self._running.add(response)
        try:
            await asyncio.wait_for(response, seconds)
        except TimeoutError:
            return False
        finally:
            self._running.discard(response)
        return True

    def _length(self, uid: str, number: int) -> int:
        random = np.random.default_rng(zlib.crc32(uid.encode()))
        drawn = random.lognormal(0.0, 0.7) * random.lognormal(0.0, 0.4, number + 1)[number]
        return int(np.clip(drawn / np.exp(0.7**2 / 2 + 0.4**2 / 2) * self._tokens, 1, MOST_TOKENS))


def _record(session: Session, key: str, number: int, began: float, made: int, version: int) -> dict[str, Any]:
    """What the server would say of a request."""
    return RequestRecord(
        id=f"{key}{zlib.crc32(f'{session.name}{began}'.encode()):08x}",
        prompt_key=key,
        sample=number,
        attempt=len(session.records),
        replica=number,
        node="10.0.0.1",
        queued_at=began,
        started_at=began,
        first_token_at=began,
        finished_at=time.time(),
        prompt_tokens=PROMPT_TOKENS,
        response_tokens=made,
        policy_version_start=version,
        policy_version_end=version,
        stop_reason="stop",
    ).to_dict()


class ProbedRollout(coordinator.Rollout):
    """Tells when a batch had settled."""

    settled_at = 0.0

    def give_up(self) -> list[str]:
        self.settled_at = time.perf_counter()
        return super().give_up()


class ProbedCoordinator(coordinator.Coordinator):
    """The real one, and what it costs."""

    def __init__(self) -> None:
        super().__init__()
        coordinator.Rollout = ProbedRollout  # type: ignore[misc]
        self._wire = count_wire()
        self._take_ms: list[float] = []
        self._profile: Any = None
        self._gc_ms: list[float] = []
        gc.callbacks.append(self._collected)

    def _collected(self, phase: str, about: dict[str, int]) -> None:
        if phase == "start":
            self._gc_began = time.perf_counter()
        elif about["generation"] == 2:
            self._gc_ms.append((time.perf_counter() - self._gc_began) * 1e3)

    async def take(self) -> Any:
        reply = await super().take()
        if reply is not None:
            self._take_ms.append((time.perf_counter() - self._open[1].settled_at) * 1e3)  # type: ignore[attr-defined]
        return reply

    async def figures(self) -> dict[str, Any]:
        """Processor seconds of the process and of its event loop; bytes of memory."""
        return {
            "cpu": time.process_time(),
            "loop": time.thread_time(),
            "rss": psutil.Process().memory_info().rss,
            "pid": psutil.Process().pid,
            "wire": dict(self._wire),
            "take_ms": self._take_ms,
            "gc_ms": self._gc_ms,
        }

    async def profile(self, path: str | None) -> None:
        """Profile the event loop from now on (``None``), or write what was found."""
        import cProfile

        if path is None:
            self._profile = cProfile.Profile()
            self._profile.enable()
        else:
            self._profile.disable()
            self._profile.dump_stats(path)


def latencies(workers: list[dict[str, Any]], slots: int, windows: list[tuple[float, float]]) -> np.ndarray:
    """float[starts], seconds between an end and the start that took its slot, oldest slots first.

    Args:
        workers: Their figures.
        slots: Free at the beginning.
        windows: When samples could be started; what spans two is left out.
    """
    events = sorted(
        [(at, True) for worker in workers for at in worker["freed"]]
        + [(at, False) for worker in workers for at in worker["begun"]]
    )
    ends = np.array([end for _, end in windows])
    free, found, taken = [-1.0] * slots, [], 0
    for at, freed in events:
        if freed:
            free.append(at)
        elif taken < len(free):
            before, taken = free[taken], taken + 1
            window = int(np.searchsorted(ends, at))
            if window < len(windows) and before >= windows[window][0]:
                found.append(at - before)
    return np.array(found)
