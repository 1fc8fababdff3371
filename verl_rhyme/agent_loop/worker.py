"""Subclasses of verl's agent loop worker that give each task a session (:mod:`verl_rhyme.agent_loop.session`) and
report the ends of attempts that the coordinator started."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import traceback
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import ray
import transfer_queue as tq
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ, apply_greedy_sampling_params
from verl.trainer.ppo.v1.replay_buffer import FILTER_GROUPS_REWARD_METRIC
from verl.utils import tensordict_utils as tu

from verl_rhyme.agent_loop.reports import NotReported, Reports
from verl_rhyme.agent_loop.session import PROMPTS, STARTS, Interrupted, Session, current, set_current
from verl_rhyme.agent_loop.stored_attempts import REPORT, KeptTurns, Left, fetch_finished_turns, fetch_turns
from verl_rhyme.agent_loop.tools import answer_once
from verl_rhyme.agent_loop.validation import Validation
from verl_rhyme.config import config_tree
from verl_rhyme.history.keys import data_key, template_label
from verl_rhyme.observability.errors import is_broken
from verl_rhyme.observability.log_handler import add_log_handler
from verl_rhyme.placement import Move
from verl_rhyme.processes import queue
from verl_rhyme.processes.deadline import Deadline, NoAnswer
from verl_rhyme.processes.request import FIELD
from verl_rhyme.sampling.noise import key_of
from verl_rhyme.scheduling.attempts import Attempt, AttemptReport, Start, Status
from verl_rhyme.scheduling.retries import HANG_TRIES

logger = logging.getLogger(__name__)

#: Characters reported of an error's text, from its end: a remote error has its traceback before its message.
_ERROR_CHARS = 1000

# AgentLoopWorkerTQ is a Ray actor class, which cannot be inherited from: take the plain class below it.
_AgentLoopWorker: Any = AgentLoopWorkerTQ.__ray_metadata__.modified_class.__mro__[1]


class _RhymeWorker(_AgentLoopWorker):
    """verl's worker with a session in each task and the tool timeout."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        queue.join()
        rhyme = config_tree.from_rollout(self.config.actor_rollout_ref.rollout)
        assert rhyme is not None, "verl's worker runs without rhyme"
        self._tool_timeout, self._outage_timeout = rhyme.scheduling.tool_timeout, rhyme.scheduling.outage_timeout

    async def _run_prompt(self, prompt: dict, *args: Any, **kwargs: Any) -> None:
        set_current(self._prompt_session(prompt))
        await super()._run_prompt(prompt, *args, **kwargs)

    async def _run_agent_loop(self, sampling_params: dict[str, Any], trajectory: dict[str, Any], **kwargs: Any) -> Any:
        of_prompt = current()
        session = Session(sample=int(kwargs.get("session_id", -1)), key=of_prompt.key if of_prompt else "")
        with self._deadline(session, kwargs):
            return await super()._run_agent_loop(sampling_params, trajectory, **kwargs)

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
        outputs = output if isinstance(output, list) else [output] if output else []
        if outputs and (session := current()) is not None:
            # Each record goes to one output: an agent loop may keep the extra fields of its first turn alone.
            left = {record["id"]: record for record in session.records}
            for each in outputs:
                records = each.extra_fields.get(FIELD) or []
                each.extra_fields[FIELD] = [left.pop(record["id"]) for record in records if record["id"] in left]
            outputs[-1].extra_fields[FIELD] += left.values()
        await super()._agent_loop_postprocess(output, validate, **kwargs)

    def _prompt_session(self, prompt: Mapping[str, Any]) -> Session:
        """Return a session with the prompt's key, computed before an agent loop can change the messages."""
        if "raw_prompt" not in prompt:
            return Session()
        options = self.config.data.get("apply_chat_template_kwargs")
        return Session(key=data_key(prompt, template_label(self.tokenizer, self.processor, options)))

    def _deadline(self, session: Session, prompt: dict[str, Any]) -> Deadline:
        """Set the task's session; return its deadline, a context for an agent loop and its reward."""
        where = f"agent loop {prompt.get('agent_name')}, prompt {prompt.get('uid')}, sample {session.sample}"
        session.deadline = Deadline(self._tool_timeout, where)
        set_current(session)
        return session.deadline


@ray.remote
class RhymeAgentLoopWorker(_RhymeWorker):
    """Worker of preset ``histospec``. A Ray actor class, as verl's is."""


@ray.remote
class SessionAgentLoopWorker(_RhymeWorker):
    """Runs one attempt for each sample that the coordinator starts, and reports how each attempt ended."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        add_log_handler()
        gc.freeze()  # as in Coordinator
        self.tools: list[Any] = answer_once(self.tools)
        self._seed = int(self.config.actor_rollout_ref.rollout.get("seed", 0) or 0)
        filtering = self.config.algorithm.get("filter_groups", None) or {}
        self._filter_metric = filtering.get("metric") if filtering.get("enable") else None
        self._reports = Reports()
        self._attempts: dict[Attempt, asyncio.Task[None] | None] = {}  # None: its prompt's data are being fetched
        self._sessions: dict[Attempt, Session] = {}  # sessions of attempts that have begun
        self._kept = KeptTurns()  # of ended attempts
        self._validation = Validation(self._outage_timeout)

    # ---- called by the coordinator ----

    async def attach(self, coordinator: Any) -> tuple[dict[Attempt, str], list[AttemptReport]]:
        """Report to ``coordinator`` from now on. Return :meth:`replica_by_attempt`, and the reports of attempts that
        wait for their rewards and of ended ones whose turns are kept."""
        self._reports.coordinator = coordinator
        generated = [session.generated for session in self._sessions.values() if session.generated]
        kept = [report for report in self._kept.reports if report.attempt not in self._attempts]
        return await self.replica_by_attempt(), [*generated, *kept]

    async def replica_by_attempt(self) -> dict[Attempt, str]:
        """Return the replica's address of each attempt; empty where it is unknown."""
        return {each: session.replica if (session := self._sessions.get(each)) else "" for each in self._attempts}

    async def attempts(self) -> list[Attempt]:
        """Return the running attempts; all others have been reported."""
        return list(self._attempts)

    async def validating(self) -> list[str]:
        return list(self._validation.prompts)

    async def forget(self, attempts: list[Attempt]) -> None:
        self._kept.forget(attempts)

    async def store_turns(self) -> None:
        sessions = (session for attempt in list(self._sessions) if (session := self._sessions.get(attempt)))
        running = ((_report_of(session, "interrupted"), session.carried_over) for session in sessions if session.tokens)
        await self._kept.store(running)

    async def start_attempts(self, starts: list[Start], step: int) -> None:
        """Start samples in the training step ``step``, without waiting for their ends."""
        self._attempts.update(dict.fromkeys(start.attempt for start in starts))
        task = asyncio.create_task(self._start_attempts(starts, step))
        self.background_tasks.add(task)
        task.add_done_callback(self.background_tasks.discard)

    async def abandon(self, attempts: list[Attempt], drafts: list[Attempt]) -> None:
        """End the attempts among these that run here, without a report. Keep the turns of ``drafts``, generated ones
        that are too stale."""
        self._kept.forget({*attempts} - {*drafts})  # a report may be under way
        for attempt in attempts:
            session = self._sessions.get(attempt)
            if attempt in drafts and session is not None and session.generated is not None:
                self._kept.keep(session.generated, session.carried_over)
            task = self._attempts.get(attempt)
            if task is not None:
                assert session is not None  # begun with its task
                session.abandoned = True
                task.cancel()
            else:
                self._attempts.pop(attempt, None)

    async def move(self, moves: list[Move]) -> None:
        for attempt, replica, reason in moves:
            if (session := self._sessions.get(attempt)) is not None:
                session.move(replica, reason)

    # ---- internal ----

    async def _start_attempts(self, starts: list[Start], step: int) -> None:
        """Fetch prompts and earlier turns in one message each, then call :meth:`_run_prompt` through verl."""
        groups: dict[str, list[Start]] = defaultdict(list)
        for start in starts:
            groups[start.attempt.uid].append(start)
        try:
            batch = await tq.async_kv_batch_get(keys=list(groups), partition_id=PROMPTS)
            if len(batch) < len(groups):  # the queue leaves out missing prompts
                raise ValueError(f"TransferQueue has the data of {len(batch)} of {len(groups)} prompts")
            again = [(start.predecessor, start.stored) for start in starts if start.predecessor]
            left = self._kept.find(each for each, finished in again if not finished)
            left |= await fetch_turns([each for each, finished in again if not finished and each not in left])
            left |= await fetch_finished_turns([each for each, finished in again if finished])
            tu.assign_non_tensor_data(batch, "global_steps", step)
            tu.assign_non_tensor_stack(batch, STARTS, [_Order(group, left) for group in groups.values()])
            await self.generate_sequences(batch)
        except ValueError as error:
            if len(groups) > 1:  # isolate the missing prompt
                await asyncio.gather(*(self._start_attempts(group, step) for group in groups.values()))
                return
            await self._not_begun(starts, "failed", f"its prompt's data are missing: {error}")
        except Exception as error:
            await self._not_begun(starts, "lost", repr(error)[-_ERROR_CHARS:])

    async def _not_begun(self, starts: list[Start], status: Literal["failed", "lost"], error: str) -> None:
        waiting = [start.attempt for start in starts if self._attempts.get(start.attempt, self) is None]
        for attempt in waiting:  # first: the coordinator finds missing attempts even if the report fails
            del self._attempts[attempt]
        await asyncio.gather(*(self._reports.send(AttemptReport(each, status, error=error)) for each in waiting))

    async def _run_prompt(self, prompt: dict, sampling_params: dict, trajectory: dict, trace: bool = False) -> None:
        order: _Order | None = prompt.pop(STARTS, None)
        if order is None:  # validation
            uid = str(prompt["uid"])
            self._validation.prompts.add(uid)
            try:
                await super()._run_prompt(prompt, sampling_params, trajectory, trace)
            finally:
                self._validation.prompts.discard(uid)
            return
        key = self._prompt_session(prompt).key
        prompt.pop("__rollout_n__", None)
        params = dict(sampling_params)
        if not prompt.pop("__do_sample__", True):
            apply_greedy_sampling_params(params)
        starts = [start for start in order.starts if start.attempt in self._attempts]  # others were abandoned
        tasks = []
        for start in starts:
            session = self._session(start, order.left.get(start.predecessor) if start.predecessor else None)
            session.key = key
            work = self._run_session(session, prompt, params, trajectory, trace)
            task = asyncio.create_task(work)
            self._attempts[start.attempt], self._sessions[start.attempt] = task, session
            task.add_done_callback(partial(self._done, start.attempt))
            tasks.append(task)
        for start, result in zip(starts, await asyncio.gather(*tasks, return_exceptions=True), strict=True):
            if isinstance(result, Exception):
                logger.error("the end of %s could not be reported; it starts again", start.attempt, exc_info=result)

    def _done(self, attempt: Attempt, task: asyncio.Task[None]) -> None:
        self._attempts.pop(attempt, None)
        self._sessions.pop(attempt, None)

    def _session(self, start: Start, left: Left | None) -> Session:
        uid, number = start.attempt.sample
        noise = f"{key_of(self._seed, uid, number):016x}"  # the same in every attempt: what is regenerated repeats
        session = Session(start.spans, start.assignment, start.attempt, sample=number, noise=noise)
        if left is not None:
            session.inherit(*left, start.partial)
        return session

    async def _run_session(
        self, session: Session, prompt: dict, sampling_params: dict, trajectory: dict, trace: bool
    ) -> None:
        try:
            with self._deadline(session, prompt):
                await self._run_agent_loop(
                    sampling_params, trajectory=trajectory, trace=trace, session_id=session.sample, **prompt
                )
        except NotReported:
            raise
        except BaseException as error:  # agent loops may wrap an interruption (ExceptionGroup)
            if session.abandoned and isinstance(error, asyncio.CancelledError):
                raise
            if not session.generated and (session.interrupted or isinstance(error, Interrupted)):
                session.interrupted = True
                await session.settle()
                await self._report(session, "interrupted")
                return
            if isinstance(error, asyncio.CancelledError):
                error = RuntimeError(f"{session.deadline.where}: its agent loop, tool or reward cancelled its own task")
            if not isinstance(error, Exception | Interrupted):
                raise
            logger.exception("%s failed", session.attempt)
            session.interrupted = True  # calls of its tasks that go on raise
            await session.settle()
            text = "".join(traceback.format_exception_only(error)).strip()
            tries = HANG_TRIES if isinstance(error, NoAnswer) else 1
            failure = {"error": text[-_ERROR_CHARS:], "broken": is_broken(error), "tries": tries}
            await self._report(session, "failed", **failure)
        else:
            finished = _report_of(session, "finished")._replace(records=[])  # they were reported
            await self._reports.send(finished._replace(scores=session.scores, empty=session.no_trajectory))

    async def _run_agent_loop(self, sampling_params: dict[str, Any], trajectory: dict[str, Any], **kwargs: Any) -> Any:
        if trajectory["validate"]:
            run = partial(super()._run_agent_loop, sampling_params, trajectory, **kwargs)
            return await self._validation.run((str(kwargs["uid"]), kwargs["session_id"]), run)
        return await _AgentLoopWorker._run_agent_loop(self, sampling_params, trajectory, **kwargs)  # has its session

    async def _compute_score(self, outputs: list[Any], kwargs: dict[str, Any]) -> None:
        await super()._compute_score(outputs, kwargs)
        session, score = current(), outputs[-1].reward_score
        if session is None or not session.dispatched:
            return
        by_trainer = score is None and self.reward_loop_worker_handles is None
        if not by_trainer and (score is None or not math.isfinite(score)):
            raise ValueError(
                f"the reward of prompt {kwargs['uid']}, sample {session.sample}, is {score}, but training needs a "
                "finite number: fix the reward function (reward.custom_reward_function)"
            )
        if self._filter_metric is not None:
            session.scores = [_score(outputs[-1], self._filter_metric)] * len(outputs)  # verl gives all the last one's
            outputs[0].extra_fields[REPORT]["scores"] = session.scores

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
        session = current()
        if session is None or not session.dispatched:
            await super()._agent_loop_postprocess(output, validate, **kwargs)
            return
        if session.interrupted:  # the agent loop returned a partial result
            raise Interrupted
        if output is None:
            raise ValueError("the agent loop returned None: it must return a trajectory or a list of trajectories")
        outputs = output if isinstance(output, list) else [output]
        session.earlier_turns = []  # the agent loop has done without them
        if not outputs:  # its tokens are in no trajectory
            session.turns.clear()
        # verl needs versions also for a trajectory without generated tokens. An agent loop may keep those of its first
        # turn, while a later one may be of an older policy (another replica) or a newer one.
        versions = {"min_global_steps": session.first_version, "max_global_steps": session.version}
        for trajectory in outputs:
            _check_policy_tokens(session, sum(trajectory.response_mask))
            for name, version in versions.items():
                if trajectory.extra_fields.get(name) is None or (version is not None and len(outputs) == 1):
                    trajectory.extra_fields[name] = kwargs["global_steps"] - 1 if version is None else version
        assert session.attempt is not None
        kwargs["session_id"] = session.attempt.session_id
        # Before the reward: the slot is free for another sample while the reward is computed.
        session.generated = _report_of(session, "generated")
        with session.deadline.pause():
            await self._reports.send(session.generated)
        if outputs:
            outputs[0].extra_fields[REPORT] = session.generated._replace(status="finished").to_dict()
        await super()._agent_loop_postprocess(output, validate, **kwargs)
        session.no_trajectory = not outputs

    async def _report(self, session: Session, status: Status, **failure: Any) -> None:
        """Report an attempt that was interrupted or failed; keep the turns that the next one may begin with."""
        report = _report_of(session, status)._replace(**failure)
        if report.leaves_turns:
            self._kept.keep(report, session.carried_over)
        try:
            await self._reports.send(report)
        except NotReported:
            self._kept.forget([report.attempt])
            raise


def _check_policy_tokens(session: Session, tokens: int) -> None:
    if tokens <= session.tokens:
        return
    raise ValueError(
        f"{session.deadline.where}: the agent loop returned a trajectory of {tokens} policy tokens (response_mask 1), "
        f"but generated {session.tokens} with its server_manager. The policy version of the others is unknown, "
        "so they cannot be trained. Generate with server_manager.generate() within run(), not by HTTP and not in "
        "another sample's task; set response_mask to 0 for tokens that the agent loop adds itself"
    )


def _report_of(session: Session, status: Status) -> AttemptReport:
    assert session.attempt is not None
    records = [{**record, "uid": session.attempt.uid} for record in session.records if record["response_tokens"]]
    return AttemptReport(session.attempt, status, session.tokens, session.first_version, records)


@dataclass(frozen=True)
class _Order:
    """Samples of a prompt to start, and the turns of earlier attempts."""

    starts: list[Start]
    left: dict[Attempt, Left]


def _score(trajectory: Any, metric: str) -> float:
    """Return the value by which verl filters groups (``ReplayBuffer._dapo_filtered_keys``)."""
    if metric == FILTER_GROUPS_REWARD_METRIC:
        return float(trajectory.reward_score)
    extra = trajectory.extra_fields.get("reward_extra_info") or {}
    if metric not in extra:
        raise ValueError(
            f"algorithm.filter_groups.metric={metric}: the reward function returns {sorted(extra) or 'no extra info'}"
        )
    return float(extra[metric])
