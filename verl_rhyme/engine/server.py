"""verl's vLLM server with HistoSpec and a record of every request."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import ray
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
from vllm.v1.engine.exceptions import EngineDeadError

from verl_rhyme import patches
from verl_rhyme.config import config_tree
from verl_rhyme.drafting import recurrent
from verl_rhyme.engine import cuda_graphs, earlier_text, sampler, weight_socket
from verl_rhyme.engine.gate import Gate
from verl_rhyme.history.keys import prompt_key
from verl_rhyme.history_writer.history_copies import HistoryRequests, node_copies_dir
from verl_rhyme.history_writer.history_service import tokenizer_namespace
from verl_rhyme.history_writer.history_writer import node_history_dir
from verl_rhyme.processes.request import DIED, DRAFT_COUNTS, FIELD, RequestMeta, RequestRecord
from verl_rhyme.sampling.continuation import continued

#: Seconds between two looks whether an engine that does not answer is there.
_HEALTH_POLL_S = 1.0
#: Seconds between two looks whether the engine knows a request.
_ADMISSION_POLL_S = 0.002
#: In place of a first output: no tokens yet.
_ADMITTED = SimpleNamespace(outputs=[])
#: Requests whose counts are kept for the trainer to fetch.
_MAX_FINISHED = 1 << 15

PROPOSER = "verl_rhyme.engine.proposer.HistoryProposer"
EXTENSION = "verl_rhyme.engine.extension.RhymeWorkerExtension"


class RhymeHttpServer(vLLMHttpServer):
    """Drop-in for verl's server; to be wrapped by ``ray.remote`` (``RolloutReplica.server_class``)."""

    def _post_init(self, *args: Any, **kwargs: Any) -> None:
        super()._post_init(*args, **kwargs)
        weight_socket.receive_here()
        rhyme = config_tree.from_rollout(self.config)
        assert rhyme is not None, "RhymeReplica builds this server only when rhyme is enabled"
        self._rhyme = rhyme
        self._node_id = ray.get_runtime_context().get_node_id()
        self._histories = HistoryRequests(self._node_id, rhyme.history)
        self._final: dict[str, Any] = {}  # request id -> vLLM's latest output for it
        self._began: dict[str, int | None] = {}  # request id -> policy version under which the engine got it
        self._gate = Gate()
        self._told = 0  # calls to the engine that take their time: weights
        self._aborts: set[asyncio.Task[None]] = set()
        #: Requests of a coordinator's attempts whose engine died after it had said something.
        self._cut: set[str] = set()
        self._names: dict[str, str] = {}  # request id -> attempt's name, of a coordinator's
        self._finished: deque[str] = deque(maxlen=_MAX_FINISHED)  # requests whose counts nobody has asked for

    # ---- engine settings ----

    def _get_worker_extension_cls(self) -> str:
        return EXTENSION

    def _preprocess_engine_kwargs(self, engine_kwargs: dict) -> None:
        super()._preprocess_engine_kwargs(engine_kwargs)
        # When a request was scheduled and when its first token came: vLLM tells it with its statistics only.
        engine_kwargs.setdefault("disable_log_stats", False)
        if not self._rhyme.drafting.enable:
            return
        # The driver may not have had the model's config.json; an engine that refuses a model ends with many lines.
        recurrent.refuse(recurrent.recurrent(self.model_config.hf_config.to_dict()))
        assert self._rhyme.history.dir is not None, "the trainer sets history.dir before any worker starts"
        engine_kwargs["speculative_config"] = {
            "method": "custom_class",
            "model": PROPOSER,
            "num_speculative_tokens": self._rhyme.drafting.max_tokens,
        }
        engine_kwargs["compilation_config"] = cuda_graphs.settings(
            engine_kwargs.get("compilation_config"),
            any((self.config.cudagraph_capture_sizes, *map(engine_kwargs.get, cuda_graphs.SIZES))),
            self.config.max_num_seqs,
            self.config.max_num_batched_tokens,
        )
        engine_kwargs["additional_config"] = {
            **(engine_kwargs.get("additional_config") or {}),
            FIELD: {
                "drafting": self._rhyme.to_dict()["drafting"],
                "history_dir": node_history_dir(self._rhyme.history.dir, self._node_id),
                "copies_dir": node_copies_dir(self._rhyme.history.dir, self._node_id),
                "namespace": tokenizer_namespace(self.model_config.tokenizer),
            },
        }

    async def run_server(self, args: Any) -> None:
        patches.apply_vllm()  # the front end's, whatever VLLM_PLUGINS leaves out
        await super().run_server(args)
        here = map(str, patches.refused(patches.VLLM))
        refused = sorted(
            {*here, *(line for lines in await self.engine.collective_rpc("refused_patches") for line in lines)}
        )
        if refused:
            raise RuntimeError("vLLM lacks patches it needs, see `verl-rhyme doctor`:\n  " + "\n  ".join(refused))
        attached = await self.engine.collective_rpc("attach_proposer")
        if self._rhyme.drafting.enable and not all(attached):
            raise RuntimeError(f"vLLM runs without the rhyme proposer (workers: {attached}); see `verl-rhyme doctor`")
        if self._rhyme.drafting.enable:
            if reasons := sorted(filter(None, set(await self.engine.collective_rpc("install_sampler")))):
                raise RuntimeError(f"our sampler cannot verify drafts here: {'; '.join(reasons)}")
            sampler.allow_all_options(self.engine)
            self._histories.start()
        # Its last output carries the request's times; verl's generate() keeps only the tokens.
        self._engine_generate = self.engine.generate
        earlier_text.install(self.engine.output_processor)
        self.engine.generate = self._observed_generate  # type: ignore[method-assign]

    async def _observed_generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any
    ) -> AsyncIterator[Any]:
        self._began[request_id] = self.global_steps  # one that came while weights were loaded has waited until here
        outputs = self._engine_generate(prompt, sampling_params, request_id, **kwargs)
        # verl's abort waits until every request has given its first output, before it stops the engine: with more
        # requests than slots that is when the last of them gets one (`_admitting` in its generate()). They are
        # admitted as soon as the engine knows them; what stands in here for a first output is never the last one.
        first = asyncio.ensure_future(anext(outputs))
        try:
            while not (first.done() or self.engine.output_processor.external_req_ids.get(request_id)):
                await asyncio.wait({first}, timeout=_ADMISSION_POLL_S)
            if not first.done():
                yield _ADMITTED
            output = await first
        except BaseException:
            first.cancel()
            await asyncio.wait({first})
            raise
        while output is not None:
            if request_id in self._final:
                self._final[request_id] = output
            yield output
            try:
                output = await anext(outputs, None)
            except EngineDeadError:
                if request_id not in self._names or not output.outputs:
                    raise  # whoever asked would take it for the whole response
                self._cut.add(request_id)
                yield _cut_short(output)
                return

    async def healthy(self) -> None:
        """As soon as the engine, too, has answered, which it does between two steps; it has a process of its own, which
        may hang while this one runs. One that is about something longer, its weights, is not asked.

        Raises:
            EngineDeadError: It has died (vLLM's class); this actor may outlive it.
        """
        if self.node_rank != 0:
            return
        await self.engine.check_health()
        if self._told:
            return
        answer = asyncio.ensure_future(self.engine.is_sleeping())
        try:
            while not (await asyncio.wait({answer}, timeout=_HEALTH_POLL_S))[0]:
                await self.engine.check_health()  # vLLM leaves calls open whose engine died meanwhile
            answer.result()
        finally:
            answer.cancel()

    async def collective_rpc(self, *args: Any, **kwargs: Any) -> Any:
        """As verl's."""
        self._told += 1
        try:
            return await super().collective_rpc(*args, **kwargs)
        finally:
            self._told -= 1

    async def cache_tokens(self) -> int:
        """Tokens that the engine's cache holds of requests of the longest kind, as vLLM logs it: with their recurrent
        states, and layers that have caches of their own (sliding windows). 0 where vLLM does not say.
        """
        config = self.engine.vllm_config
        one = getattr(config.cache_config, "kv_cache_size_tokens", None) or 0  # of one data-parallel engine
        return one * config.parallel_config.data_parallel_size

    async def progress(self, names: list[str]) -> dict[str, int]:
        """Response tokens so far of these attempts' running requests; those that do not run here are left out."""
        requests, wanted = self.engine.output_processor, set(names)
        made: dict[str, int] = {}
        for request_id, name in self._names.items():
            for internal in requests.external_req_ids.get(request_id, ()) if name in wanted else ():
                detokenizer = requests.request_states[internal].detokenizer
                made[name] = made.get(name, 0) + (0 if detokenizer is None else detokenizer.num_output_tokens())
        return made

    # ---- weights ----

    async def set_global_steps(self, global_steps: int) -> None:
        """As verl's; requests that need this policy come in."""
        await super().set_global_steps(global_steps)
        await self._gate.serve(global_steps)

    async def idle(self) -> None:
        """Wait until nothing runs; what needs newer weights waits for these."""
        await self._gate.empty()

    async def rest(self) -> None:
        """Leave the rotation until new weights come: what comes is turned away, what runs is cut short, and the memory
        of the devices is given back where the engine can (vLLM's sleep; not on a CPU, nor with
        ``free_cache_engine=false``).
        """
        await self._gate.shut_out()
        await self.abort_all_requests(reject_request=True)
        if self.node_rank == 0 and self.config.free_cache_engine and self.config.enable_sleep_mode:
            await self.engine.sleep(level=self._resolve_sleep_level())

    async def let_go(self) -> None:
        """The replica is given up: what its requests have said goes back to those who asked, while this actor lives."""
        if self.node_rank == 0:
            self.engine.output_processor.propagate_error(EngineDeadError())
            while self._final:
                await asyncio.sleep(_ADMISSION_POLL_S)

    async def stop_engine(self) -> None:
        """End vLLM's own processes in order; killed with the Ray actor they leave their shared memory behind."""
        if self.node_rank == 0:
            self.engine.shutdown()

    # ---- requests ----

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        *,
        rhyme: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> TokenOutput:
        """As verl's.

        Args:
            rhyme: :class:`RequestMeta` as our client sends it; ``None`` from any other.
        """
        meta = RequestMeta(**{**(rhyme or {}), "id": request_id})
        arrived = time.time()
        if not await self._gate.enter(request_id, meta.assignment.oldest_version):
            told = {"global_steps": self.global_steps, FIELD: []}
            return TokenOutput(token_ids=[], log_probs=None, stop_reason="aborted", extra_fields=told)
        self._final[request_id] = None
        if meta.name:
            self._names[request_id] = meta.name
        if self._rhyme.drafting.enable:
            meta.asked = self._histories.ask(bytes.fromhex(meta.key) if meta.key else prompt_key(prompt_ids))
        params = continued(sampling_params, meta.made, noise_by_position=self._rhyme.drafting.enable)
        try:
            output = await super().generate(prompt_ids, meta.put(params), request_id, **kwargs)
        finally:
            final = self._final.pop(request_id)
            version = self._began.pop(request_id, self.global_steps)
            cut = request_id in self._cut
            self._cut.discard(request_id)
            self._names.pop(request_id, None)
            await self._gate.leave()
        if self._rhyme.drafting.enable:
            self._finished.append(request_id)  # the response goes first: the trainer asks for the counts of many
        scheduled, first = _wall_times(getattr(final, "metrics", None))
        record = RequestRecord(
            id=request_id,
            prompt_key=meta.key,
            sample=meta.sample,
            attempt=meta.attempt,
            replica=self.replica_rank,
            node=self._node_id,
            queued_at=meta.queued_at or arrived,
            started_at=scheduled,
            first_token_at=first,
            finished_at=time.time(),
            prompt_tokens=len(prompt_ids),
            response_tokens=len(output.token_ids),
            predicted_tokens=meta.assignment.left(meta.before)[0],
            policy_version_start=-1 if version is None else version,
            policy_version_end=-1 if self.global_steps is None else self.global_steps,
            stop_reason=output.stop_reason or "",
        )
        output.extra_fields[FIELD] = [record.to_dict()]
        if cut:
            output.extra_fields[DIED] = True
        return output

    async def abort_request(self, request_id: str, reset_prefix_cache: bool = True) -> dict[str, Any]:
        """End one request; nothing happens when it is not known.

        verl's looks for it by its name, while vLLM 0.24 knows it by another (``<name>-<8 characters>``).
        """
        if await self._gate.turn_away(request_id):
            return {"aborted": True, "request_id": request_id}
        known = self.node_rank == 0 and bool(self.engine.output_processor.external_req_ids.get(request_id))
        if known:
            await self.engine.abort(request_id)
            if reset_prefix_cache:
                await self.clear_kv_cache()
        elif request_id in self._final:  # it waits while weights are loaded
            task = asyncio.ensure_future(self._abort_when_known(request_id))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)
        return {"aborted": known, "request_id": request_id}

    async def _abort_when_known(self, request_id: str) -> None:
        while request_id in self._final:
            if self.engine.output_processor.external_req_ids.get(request_id):
                await self.engine.abort(request_id)
                return
            await asyncio.sleep(_ADMISSION_POLL_S)

    async def take_counts(self) -> dict[str, dict[str, Any]]:
        """What the drafter did for the requests that finished since the last call: record columns by request id."""
        if not self._finished:
            return {}
        ids = list(self._finished)
        self._finished.clear()
        told = await self.engine.collective_rpc("take_request_counts", args=(ids,))
        found = {
            id: {DRAFT_COUNTS[name]: count for name, count in counts.items()}
            for worker in told
            for id, counts in worker.items()
        }
        for counts in found.values():
            if "draft_errors" in counts:  # one of them has the errors of all
                counts["draft_errors"] += self._histories.take_errors()
        return found


def _cut_short(output: Any) -> Any:
    """vLLM's output so far as that of an aborted request; its lists may have grown by different lengths since."""
    said = output.outputs[0]
    tokens = list(said.token_ids)
    if said.logprobs is not None:
        tokens = tokens[: len(said.logprobs)]
        said.logprobs = said.logprobs[: len(tokens)]
    said.token_ids, said.finish_reason = tokens, "abort"
    return output


def _wall_times(stats: Any) -> tuple[float, float]:
    """(scheduled, first token) in seconds since the epoch, from vLLM's monotonic stamps; NaN where there is none."""
    offset = time.time() - time.monotonic()
    scheduled, first = getattr(stats, "scheduled_ts", 0.0), getattr(stats, "first_token_ts", 0.0)
    return (scheduled + offset if scheduled else math.nan, first + offset if first else math.nan)
