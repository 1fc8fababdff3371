"""verl's agent loop manager and worker: each task says which sample it works on, a session
(:mod:`verl_rhyme.workers.session`), and for trainers that interrupt samples it reports how an attempt ended."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from typing import Any

import ray
import transfer_queue as tq
from tensordict import TensorDict
from verl.trainer.ppo.v1.agent_loop_tq import (
    AgentLoopManagerTQ,
    AgentLoopWorkerTQ,
    apply_greedy_sampling_params,
)
from verl.utils.ray_utils import auto_await
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from verl_rhyme import config_tree
from verl_rhyme.observability.audible import keep_audible
from verl_rhyme.sampling.noise import key_of
from verl_rhyme.workers.session import SESSIONS, STARTS, Interrupted, Session, Start, Turn, current, enter, sample_of

logger = logging.getLogger(__name__)

#: Seconds that a report waits for others to go with it.
_REPORT_DELAY_S = 0.01
#: Seconds that TransferQueue has to take a report, and between the tries.
_REPORT_TIMEOUT_S = 30.0
_REPORT_RETRIES_S = (0.5, 2.0, 8.0)
#: The end of an error's text that is reported: a remote one has its traceback before its message.
_ERROR_CHARS = 1000

# AgentLoopWorkerTQ is a Ray actor class, and Ray forbids to inherit from those: take the plain class below it.
_AgentLoopWorker: type = AgentLoopWorkerTQ.__ray_metadata__.modified_class.__mro__[1]


@ray.remote
class RhymeAgentLoopWorker(_AgentLoopWorker):  # type: ignore[misc, valid-type]
    """Says the sample's number. A Ray actor class, as verl's is."""

    async def _run_agent_loop(self, sampling_params: dict[str, Any], trajectory: dict[str, Any], **kwargs: Any) -> Any:
        enter(Session(sample=int(kwargs.get("session_id", -1)), group=_group(self.config, trajectory)))
        return await super()._run_agent_loop(sampling_params, trajectory, **kwargs)


def _group(config: Any, trajectory: dict[str, Any]) -> int:
    """Samples of a prompt, where it does not say how many."""
    rollout = config.actor_rollout_ref.rollout
    return rollout.val_kwargs.n if trajectory["validate"] else rollout.n


class RhymeAgentLoopManager(AgentLoopManagerTQ):
    """``actor_rollout_ref.rollout.agent.agent_loop_manager_class`` of ``+rhyme=...``; verl's with ``enable=false``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if config_tree.from_rollout(self.rollout_config) is not None:
            self.agent_loop_workers_class = RhymeAgentLoopWorker


class _Reports:
    """How samples ended, in one message where several end at about the same time, as they do at an abort."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
        self._sending: asyncio.Task[None] | None = None

    async def send(self, key: str, fields: dict[str, Any], tag: dict[str, Any]) -> None:
        """Returns when TransferQueue has it; no key may be sent again before."""
        self._rows.append((key, fields, tag))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())
        await asyncio.shield(self._sending)

    async def _send(self) -> None:
        await asyncio.sleep(_REPORT_DELAY_S)
        self._sending = None
        (keys, fields, tags), self._rows = zip(*self._rows, strict=True), []
        report = {"fields": list_of_dict_to_tensordict(list(fields)), "tags": list(tags)}
        for retry_s in (*_REPORT_RETRIES_S, None):
            try:
                put = tq.async_kv_batch_put(keys=list(keys), partition_id=SESSIONS, **report)
                return await asyncio.wait_for(put, _REPORT_TIMEOUT_S)
            except Exception as error:
                if retry_s is None:
                    raise
                logger.warning("%d reports did not reach TransferQueue (%r): trying again", len(keys), error)
                await asyncio.sleep(retry_s)


@ray.remote
class SessionAgentLoopWorker(_AgentLoopWorker):  # type: ignore[misc, valid-type]
    """Runs the samples it is told to start, one attempt each, and reports how each attempt ended."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        keep_audible()
        rollout = self.config.actor_rollout_ref.rollout
        rhyme = config_tree.from_rollout(rollout)
        assert rhyme is not None, "the trainer that dispatches sessions runs with rhyme only"
        self._coupled = rhyme.sampling.coupled
        self._seed = int(rollout.get("seed", 0) or 0)
        self._reports = _Reports()
        self._attempts: dict[str, asyncio.Task[None]] = {}

    async def attempts(self) -> list[str]:
        """Names (``session_key``) of the attempts that run here; one that is not among them has been reported."""
        return list(self._attempts)

    async def abandon(self, sessions: list[str]) -> None:
        """End these attempts, if they run here, without a report: nobody waits for it."""
        for session in sessions:
            if session in self._attempts:
                self._attempts[session].cancel()

    async def _run_prompt(self, prompt: dict, sampling_params: dict, trajectory: dict, trace: bool = False) -> None:
        starts: list[Start] | None = prompt.pop(STARTS, None)
        if starts is None:  # validation
            await super()._run_prompt(prompt, sampling_params, trajectory, trace)
            return
        prompt.pop("__rollout_n__", None)
        params = dict(sampling_params)
        if not prompt.pop("__do_sample__", True):
            apply_greedy_sampling_params(params)
        tasks = []
        for start in starts:
            task = asyncio.create_task(self._run_session(start, prompt, params, trajectory, trace))
            self._attempts[start.session] = task
            task.add_done_callback(lambda _, session=start.session: self._attempts.pop(session))  # type: ignore[misc]
            tasks.append(task)
        for start, result in zip(starts, await asyncio.gather(*tasks, return_exceptions=True), strict=True):
            if isinstance(result, Exception):
                logger.error("how %s ended could not be reported; it starts again", start.session, exc_info=result)

    async def _run_session(
        self, start: Start, prompt: dict, sampling_params: dict, trajectory: dict, trace: bool
    ) -> None:
        uid, number = sample_of(start.session)
        session = Session(start.partial, start.priority, start.session, sample=number)
        if self._coupled:
            session.noise = f"{key_of(self._seed, uid, number):016x}"
        try:
            if start.kept is not None:
                await self._recall(start.kept, session)
            enter(session)
            await self._run_agent_loop(sampling_params, trajectory=trajectory, trace=trace, session_id=number, **prompt)
        except Interrupted:
            await self._report(session, status="interrupted")
        except Exception as error:
            logger.exception("sample %d of prompt %s failed; the prompt is replaced", number, uid)
            text = "".join(traceback.format_exception_only(error)).strip()
            await self._report(session, status="failed", error=text[-_ERROR_CHARS:])

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
        session = current()
        if session is not None and session.dispatched:
            if not output:
                raise ValueError("the agent loop returned no trajectory")
            for trajectory in output if isinstance(output, list) else [output]:
                # verl wants to know the versions also of one in which the policy said nothing.
                for name in ("min_global_steps", "max_global_steps"):
                    if trajectory.extra_fields.get(name) is None:
                        trajectory.extra_fields[name] = kwargs["global_steps"] - 1
            kwargs["session_id"] = int(session.name.rpartition("_")[2])
            # Before the reward is computed: the engine need not run on for that.
            await self._report(session, status="generated")
        await super()._agent_loop_postprocess(output, validate, **kwargs)

    async def _recall(self, key: str, session: Session) -> None:
        """Take up what the attempt ``key`` left."""
        try:
            data = await tq.async_kv_batch_get(keys=[key], partition_id=SESSIONS, select_fields=["turns", "records"])
        except Exception:
            logger.warning("what %s said is not there: the sample begins anew", key, exc_info=True)
            return
        turns, records = (getattr(data[name][0], "data", data[name][0]) for name in ("turns", "records"))
        session.kept = [Turn.from_dict(turn) for turn in turns]
        session.records = list(records) if session.partial else []

    async def _report(self, session: Session, status: str, **more: str) -> None:
        """The tag is what the trainer looks at again and again, the fields what it or the next attempt may ask for."""
        # What never reached the engine is nothing to tell of.
        records = [record for record in session.records if record["response_tokens"]]
        fields = {"turns": [turn.to_dict() for turn in session.left], "records": records}
        tag = {"status": status, "tokens": session.tokens, "first_version": session.first_version, **more}
        await self._reports.send(session.name, fields, tag)


class SessionAgentLoopManager(AgentLoopManagerTQ):
    """``actor_rollout_ref.rollout.agent.agent_loop_manager_class`` of ``+rhyme=sorted``.

    A worker that died, or does not answer, is given up: what it was to do next goes to the others, and what it was
    about is in no answer of :meth:`attempts` any more.
    """

    agent_loop_workers: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = SessionAgentLoopWorker
        rhyme = config_tree.from_rollout(self.rollout_config)
        assert rhyme is not None, "the trainer that dispatches sessions runs with rhyme only"
        self._patience_s = rhyme.sorting.lost_after
        self._ready: list[Any] = []  # workers that have started
        self._asked: dict[Any, Any] = {}  # answer to come -> worker
        self._asked_at = 0.0

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Hand prompts with their :data:`STARTS` to the workers, without waiting for what becomes of them."""
        self._await_start()
        chunks = prompts.chunk(len(self.agent_loop_workers))
        sent = [
            (worker, chunk, worker.generate_sequences.remote(chunk))
            for worker, chunk in zip(self.agent_loop_workers, chunks, strict=False)
        ]
        for worker, chunk, taken in sent:
            try:
                ray.get(taken, timeout=self._patience_s)
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
                self._give_up(worker, error)
                self.generate_sequences(chunk)

    def _await_start(self) -> None:
        """Imports from a cold shared filesystem may take longer than a worker that runs may be silent."""
        for worker in [worker for worker in self.agent_loop_workers if worker not in self._ready]:
            try:
                ray.get(worker.__ray_ready__.remote())
            except ray.exceptions.RayActorError as error:
                if len(self.agent_loop_workers) == 1:
                    raise  # none can start
                self._give_up(worker, error)
            else:
                self._ready.append(worker)

    def attempts(self) -> set[str] | None:
        """Names of the attempts that run in any worker; ``None`` as long as not all have answered. Does not wait."""
        if not self._asked:
            self._asked = {worker.attempts.remote(): worker for worker in self.agent_loop_workers}
            self._asked_at = time.monotonic()
        told, silent = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)
        if silent and time.monotonic() - self._asked_at < self._patience_s:
            return None
        asked, self._asked = self._asked, {}
        running: set[str] = set()
        for answer in told:
            try:
                running.update(ray.get(answer))
            except ray.exceptions.RayActorError as error:
                self._give_up(asked[answer], error)
        for answer in silent:
            self._give_up(asked[answer], TimeoutError(f"no answer for {self._patience_s:.0f} s"))
        return running

    def abandon(self, sessions: list[str]) -> None:
        """End attempts nobody waits for any more, wherever they run. Does not wait."""
        for worker in self.agent_loop_workers:
            worker.abandon.remote(sessions)

    def _give_up(self, worker: Any, error: Exception) -> None:
        left = [other for other in self.agent_loop_workers if other is not worker]
        if len(left) == len(self.agent_loop_workers):
            return  # already
        logger.warning("an agent loop worker is given up, its samples start again elsewhere: %s", error)
        ray.kill(worker)  # one that only hangs must not come back with what others do by then
        self.agent_loop_workers = left
        if not left:
            auto_await(self._init_agent_loop_workers)()
