"""verl's agent loop manager and worker: each request is told the number of its sample in the group, and for trainers
that interrupt samples each runs as a session of its own (:mod:`verl_rhyme.workers.session`)."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import ray
import transfer_queue as tq
from verl.trainer.ppo.v1.agent_loop_tq import (
    AgentLoopManagerTQ,
    AgentLoopWorkerTQ,
    apply_greedy_sampling_params,
)
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from verl_rhyme import config as rhyme_config
from verl_rhyme.sampling.noise import key_of
from verl_rhyme.workers.request import RequestMeta
from verl_rhyme.workers.session import SESSIONS, STARTS, Interrupted, Session, Start, Turn, current, enter

logger = logging.getLogger(__name__)

#: Seconds that a report waits for others to go with it.
_REPORT_DELAY_S = 0.01

# AgentLoopWorkerTQ is a Ray actor class, and Ray forbids to inherit from those: take the plain class below it.
_AgentLoopWorker: type = AgentLoopWorkerTQ.__ray_metadata__.modified_class.__mro__[1]


@ray.remote
class RhymeAgentLoopWorker(_AgentLoopWorker):  # type: ignore[misc, valid-type]
    """Adds the sample number. A Ray actor class, as verl's is."""

    async def _run_agent_loop(self, sampling_params: dict[str, Any], trajectory: dict[str, Any], **kwargs: Any) -> Any:
        sampling_params = RequestMeta(sample=int(kwargs.get("session_id", -1))).put(sampling_params)
        return await super()._run_agent_loop(sampling_params, trajectory, **kwargs)


class RhymeAgentLoopManager(AgentLoopManagerTQ):
    """``actor_rollout_ref.rollout.agent.agent_loop_manager_class`` of ``+rhyme=...``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
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
        await tq.async_kv_batch_put(
            keys=list(keys),
            partition_id=SESSIONS,
            fields=list_of_dict_to_tensordict(list(fields)),
            tags=list(tags),
        )


@ray.remote
class SessionAgentLoopWorker(_AgentLoopWorker):  # type: ignore[misc, valid-type]
    """Runs the samples it is told to start, one attempt each, and reports how each attempt ended."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        rollout = self.config.actor_rollout_ref.rollout
        rhyme = rhyme_config.from_rollout(rollout)
        assert rhyme is not None, "the trainer that dispatches sessions runs with rhyme only"
        self._sorting = rhyme.sorting
        self._coupled = rhyme.sampling.coupled
        self._redraft = rhyme.sorting.redraft and rhyme.drafting.enable
        self._seed = int(rollout.get("seed", 0) or 0)
        self._reports = _Reports()

    async def _run_prompt(self, prompt: dict, sampling_params: dict, trajectory: dict, trace: bool = False) -> None:
        starts: list[Start] | None = prompt.pop(STARTS, None)
        if starts is None:  # validation
            await super()._run_prompt(prompt, sampling_params, trajectory, trace)
            return
        prompt.pop("__rollout_n__", None)
        params = dict(sampling_params)
        if not prompt.pop("__do_sample__", True):
            apply_greedy_sampling_params(params)
        await asyncio.gather(*(self._run_session(start, prompt, params, trajectory, trace) for start in starts))

    async def _run_session(
        self, start: Start, prompt: dict, sampling_params: dict, trajectory: dict, trace: bool
    ) -> None:
        uid, key = prompt["uid"], f"{prompt['uid']}_{start.number}"
        session = Session(self._sorting.mode == "partial", self._redraft, start.priority)
        meta = RequestMeta(sample=start.number)
        if self._coupled:
            meta.noise = f"{key_of(self._seed, uid, start.number):016x}"
        try:
            if start.kept:
                await self._recall(key, session)
            enter(session)
            await self._run_agent_loop(
                meta.put(sampling_params), trajectory=trajectory, trace=trace, session_id=start.number, **prompt
            )
        except Interrupted:
            await self._report(key, session, status="interrupted")
        except Exception:
            logger.exception("sample %d of prompt %s failed; the prompt is replaced", start.number, uid)
            await self._report(key, session, status="failed")

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
        session = current()
        if session is not None:
            if not output:
                raise ValueError("the agent loop returned no trajectory")
            # Before the reward is computed: the engine need not run on for that.
            await self._report(f"{kwargs['uid']}_{kwargs['session_id']}", session, status="generated")
        await super()._agent_loop_postprocess(output, validate, **kwargs)

    async def _recall(self, key: str, session: Session) -> None:
        """Take up what the attempt before left."""
        data = await tq.async_kv_batch_get(keys=[key], partition_id=SESSIONS, select_fields=["turns", "records"])
        turns, records = (getattr(data[name][0], "data", data[name][0]) for name in ("turns", "records"))
        session.kept = [Turn(**turn) for turn in turns]
        session.records = list(records) if session.partial else []

    async def _report(self, key: str, session: Session, status: str) -> None:
        """The tag is what the trainer looks at again and again, the fields what it or the next attempt may ask for."""
        # What never reached the engine is nothing to tell of.
        records = [record for record in session.records if record["response_tokens"]]
        fields = {"turns": [turn.to_dict() for turn in session.left], "records": records}
        tag = {"status": status, "tokens": session.tokens, "first_version": session.first_version}
        await self._reports.send(key, fields, tag)


class SessionAgentLoopManager(AgentLoopManagerTQ):
    """``actor_rollout_ref.rollout.agent.agent_loop_manager_class`` of ``+rhyme=sorted``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = SessionAgentLoopWorker
