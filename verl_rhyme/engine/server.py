"""verl's vLLM server with speculative drafts from histories and a record of every request."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import ray
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
from vllm.v1.engine.exceptions import EngineDeadError

from verl_rhyme import patches
from verl_rhyme.config import V1_ONLY, ConfigError, config_tree
from verl_rhyme.config.presets import POLICY_LOGPROBS
from verl_rhyme.drafting import recurrent
from verl_rhyme.drafting.bounds import engine_tokens
from verl_rhyme.engine import cuda_graphs, earlier_text, sampler, weight_socket
from verl_rhyme.engine.gate import Gate
from verl_rhyme.engine.model_drafter import speculation
from verl_rhyme.history.keys import prompt_key
from verl_rhyme.history_writer.history_copies import HistoryRequests, node_copies_dir
from verl_rhyme.history_writer.history_service import tokenizer_namespace
from verl_rhyme.history_writer.history_writer import node_history_dir
from verl_rhyme.planning import architecture
from verl_rhyme.processes.request import DIED, FIELD, RequestMeta, RequestRecord
from verl_rhyme.sampling.continuation import continued_options

logger = logging.getLogger(__name__)

#: Seconds between two checks whether an engine that does not answer is alive.
_HEALTH_POLL_S = 1.0
#: Seconds between two checks whether the engine knows a request.
_ADMISSION_POLL_S = 0.002
#: Placeholder for a first output, without tokens.
_ADMITTED = SimpleNamespace(outputs=[])
#: Requests whose counts are kept for the trainer to fetch.
_MAX_FINISHED = 1 << 15

PROPOSER = "verl_rhyme.engine.proposer.HistoryProposer"
EXTENSION = "verl_rhyme.engine.extension.RhymeWorkerExtension"


@dataclass(slots=True)
class _Request:
    """A request that runs."""

    name: str  # of the coordinator's attempt, or empty
    earlier_tokens: int  # of the attempt's response, before this request
    version: int | None  # of the policy, when the engine received it
    output: Any = None  # vLLM's latest
    engine_died: bool = False  # after it had generated tokens


class RhymeHttpServer(vLLMHttpServer):
    """Drop-in replacement for verl's server, to be wrapped by ``ray.remote`` (``RolloutReplica.server_class``)."""

    def _post_init(self, *args: Any, **kwargs: Any) -> None:
        super()._post_init(*args, **kwargs)
        weight_socket.receive_here()
        rhyme = config_tree.from_rollout(self.config)
        assert rhyme is not None, "RhymeReplica builds this server only when rhyme is enabled"
        self._rhyme = rhyme
        self._node_id = ray.get_runtime_context().get_node_id()
        self._histories = HistoryRequests(self._node_id, rhyme.history)
        self._requests: dict[str, _Request] = {}  # that have passed the gate, by id
        self._gate = Gate()
        self._rpcs = 0  # running calls to the engine's workers; loading weights takes long
        self._aborts: set[asyncio.Task[None]] = set()
        self._finished: deque[str] = deque(maxlen=_MAX_FINISHED)  # requests whose counts were not fetched

    # ---- engine settings ----

    def _get_worker_extension_cls(self) -> str:
        return EXTENSION

    def _preprocess_engine_kwargs(self, engine_kwargs: dict) -> None:
        super()._preprocess_engine_kwargs(engine_kwargs)
        # vLLM reports the times of scheduling and of the first token with its statistics only.
        engine_kwargs.setdefault("disable_log_stats", False)
        if self._rhyme.draws:
            os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # the engine's processes inherit it
            if not self._mtp and not any(name.startswith("spec") for name in engine_kwargs):
                self._settings(engine_kwargs, {})
            elif not self._rhyme.drafting.enable:
                engine_kwargs.setdefault("async_scheduling", False)  # with vLLM's own drafts it tracks no positions
        if self.config.logprobs_mode == POLICY_LOGPROBS:  # the sampler's, unknown to vLLM
            engine_kwargs["logprobs_mode"] = "processed_logprobs"
        if not self._rhyme.drafting.enable:
            return
        # The driver may not have the model's config.json; an error here is shorter than the engine's.
        fields = self.model_config.hf_config.to_dict()
        recurrent.refuse(recurrent.undrafted(fields))
        hybrid, drafting = bool(recurrent.recurrent(fields)), self._rhyme.to_dict()["drafting"]
        drafting["max_tokens"] = engine_tokens(
            config_tree.chosen_tokens(self.config) or drafting["max_tokens"],
            recurrent=hybrid,
            adapters=self.lora_as_adapter,
            slots=self.config.max_num_seqs,
            step_tokens=self.config.max_num_batched_tokens,
        )
        if hybrid and self.config.enable_prefix_caching:
            engine_kwargs["enable_prefix_caching"] = False
            logger.warning(recurrent.UNCACHED)
        if self._mtp:
            drafting["model"], drafting["model_tokens"] = "mtp", self.config.mtp.num_speculative_tokens
        if self._rhyme.history.dir is None:  # rhyme's trainers set it before any worker starts
            raise ConfigError(f"this run has a trainer of its own, {V1_ONLY}")
        if drafting["model"] is None:
            engine_kwargs["speculative_config"] = {
                "method": "custom_class",
                "model": PROPOSER,
                "num_speculative_tokens": drafting["max_tokens"],
            }
        else:
            # Not verl's config of the model, which has no MTP layers if verl's mtp is off: vLLM reads the checkpoint.
            file = architecture.find(self.model_config.local_path)
            policy = {} if file is None else architecture.read_json(file)
            found = speculation(drafting["model"], drafting["max_tokens"], policy)
            engine_kwargs["speculative_config"], drafting["max_tokens"] = found, found["num_speculative_tokens"]
        engine_kwargs["compilation_config"] = cuda_graphs.settings(
            engine_kwargs.get("compilation_config"),
            any((self.config.cudagraph_capture_sizes, *map(engine_kwargs.get, cuda_graphs.SIZES))),
            self.config.max_num_seqs,
            self.config.max_num_batched_tokens,
        )
        settings = {
            "drafting": drafting,
            "history_dir": node_history_dir(self._rhyme.history.dir, self._node_id),
            "copies_dir": node_copies_dir(self._rhyme.history.dir, self._node_id),
            "namespace": tokenizer_namespace(self.model_config.tokenizer),
        }
        self._settings(engine_kwargs, settings)

    def _settings(self, engine_kwargs: dict, settings: dict[str, Any]) -> None:
        """Set our field of the engine's ``additional_config``: such an engine schedules asynchronously."""
        engine_kwargs["additional_config"] = {**(engine_kwargs.get("additional_config") or {}), FIELD: settings}

    @property
    def _mtp(self) -> bool:
        return self.config.mtp is not None and self.config.mtp.enable and self.config.mtp.enable_rollout

    def _resolve_sleep_level(self) -> int:
        # A deeper sleep drops the weights of a drafter, which no weight sync brings back.
        return 1 if self._rhyme.drafting.enable and self._rhyme.drafting.model else super()._resolve_sleep_level()

    async def run_server(self, args: Any) -> None:
        patches.apply_vllm()  # VLLM_PLUGINS may exclude our plugin
        await super().run_server(args)
        here = map(str, patches.refused(patches.VLLM))
        refused = sorted({*here, *(line for lines in await self._ask_workers("refused_patches") for line in lines)})
        if refused:
            raise RuntimeError(
                "vLLM runs without required patches; run `verl-rhyme doctor`:\n  " + "\n  ".join(refused)
            )
        attached = await self._ask_workers("attach_proposer")
        if self._rhyme.drafting.enable and not all(attached):
            raise RuntimeError(
                f"vLLM runs without the verl-rhyme proposer (attached on each worker: {attached}); "
                "run `verl-rhyme doctor`"
            )
        if self._rhyme.draws:
            mode = POLICY_LOGPROBS if self.config.logprobs_mode == POLICY_LOGPROBS else None
            if reasons := sorted(filter(None, set(await self._ask_workers("install_sampler", mode)))):
                raise RuntimeError(f"cannot draw tokens on this engine: {'; '.join(reasons)}")
            sampler.allow_all_options(self.engine)
        if self._rhyme.drafting.enable:
            self._histories.start()
        # A request's last output carries its times; verl's generate() keeps only the tokens.
        self._engine_generate = self.engine.generate
        earlier_text.install(self.engine.output_processor)
        self.engine.generate = self._observed_generate  # type: ignore[method-assign]

    async def _observed_generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any
    ) -> AsyncIterator[Any]:
        request = self._requests.get(request_id)  # None for a client of the engine's HTTP server
        if request is not None:
            request.version = self.global_steps  # verl holds requests until weights are loaded
        outputs = self._engine_generate(prompt, sampling_params, request_id, **kwargs)
        # verl's abort waits for a first output of every request before it stops the engine (`_admitting` in its
        # generate()). With more requests than slots, that is when the last one gets a slot. The placeholder admits a
        # request as soon as the engine knows it; it is never the last output.
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
            if request is not None:
                request.output = output
            yield output
            try:
                output = await anext(outputs, None)
            except EngineDeadError:
                if request is None or not request.name or not output.outputs:
                    raise  # any other client would take the tokens so far for a complete response
                request.engine_died = True
                yield _as_aborted(output, self.config.enable_rollout_routing_replay)
                return

    async def healthy(self) -> None:
        """Return once the engine, which may hang while this process runs, has answered between two steps.

        During a call to the workers, such as loading weights, the engine need only be alive. Raises EngineDeadError.
        """
        if self.node_rank != 0:
            return
        await self.engine.check_health()
        if self._rpcs:
            return
        answer = asyncio.ensure_future(self.engine.is_sleeping())
        try:
            while not (await asyncio.wait({answer}, timeout=_HEALTH_POLL_S))[0]:
                await self.engine.check_health()  # vLLM never ends the calls to an engine that died meanwhile
            answer.result()
        finally:
            answer.cancel()

    async def collective_rpc(self, *args: Any, **kwargs: Any) -> Any:
        self._rpcs += 1
        try:
            return await super().collective_rpc(*args, **kwargs)
        finally:
            self._rpcs -= 1

    async def _ask_workers(self, method: str, *args: Any) -> list[Any]:
        """vLLM's ``collective_rpc`` drops the answers of data parallel engines but one."""
        client: Any = self.engine.engine_core
        calls = [
            client._call_utility_async("collective_rpc", method, None, args, None, engine=engine)
            for engine in client.core_engines
        ]
        return [answer for answers in await asyncio.gather(*calls) for answer in answers]

    async def cache_tokens(self) -> int:
        """Return the KV cache size in tokens of requests of maximum length, as vLLM logs it; 0 if vLLM reports none."""
        config = self.engine.vllm_config
        one = getattr(config.cache_config, "kv_cache_size_tokens", None) or 0  # of one data-parallel engine
        return one * config.parallel_config.data_parallel_size

    async def progress(self, names: list[str]) -> dict[str, int]:
        """Return the response tokens so far of these attempts that have a request here, with those of earlier turns."""
        processor, wanted = self.engine.output_processor, set(names)
        made: dict[str, int] = {}
        for request_id, request in self._requests.items():
            for internal in processor.external_req_ids.get(request_id, ()) if request.name in wanted else ():
                detokenizer = processor.request_states[internal].detokenizer
                tokens = 0 if detokenizer is None else detokenizer.num_output_tokens()
                # Requests in parallel count each other's tokens only from their own start.
                made[request.name] = max(made.get(request.name, 0), request.earlier_tokens) + tokens
        return made

    # ---- weights ----

    async def set_global_steps(self, global_steps: int) -> None:
        await super().set_global_steps(global_steps)
        await self._gate.open(global_steps)

    async def clear_kv_cache(self) -> None:
        """Empty the caches, as verl does after it loaded weights; RuntimeError where blocks of older ones remain."""
        await super().clear_kv_cache()
        if self.node_rank != 0 or self.engine.vllm_config.kv_transfer_config is None:
            return
        if not await self.engine.reset_prefix_cache(reset_connector=True):
            raise RuntimeError(
                "vLLM keeps KV blocks of older weights after a weight update; "
                "run without engine_kwargs.vllm.kv_offloading_size"
            )

    async def held_weights(self) -> list[dict[str, Any]]:
        """Return :class:`verl_rhyme.weights.samples.Held` of each worker."""
        return await self._ask_workers("held_weights")

    async def idle(self) -> None:
        """Wait until no request runs; requests that wait for newer weights do not count."""
        await self._gate.wait_until_idle()

    async def suspend(self) -> None:
        """Refuse new requests and abort running ones until new weights are loaded; free memory if the engine sleeps."""
        await self._gate.close()
        await self.abort_all_requests(reject_request=True)
        if self.node_rank == 0 and self.config.free_cache_engine and self.config.enable_sleep_mode:
            await self.engine.sleep(level=self._resolve_sleep_level())

    async def stop_engine(self) -> None:
        """Shut down vLLM's processes; if they are killed with the Ray actor, their shared memory remains."""
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
        """Generate a response, as verl's server does, with a record. ``rhyme``: RequestMeta's fields, if ours."""
        meta = RequestMeta(**{**(rhyme or {}), "id": request_id})
        arrived = time.time()
        if not await self._gate.enter(request_id, meta.assignment.oldest_version):
            fields = {"global_steps": self.global_steps, FIELD: []}
            return TokenOutput(token_ids=[], log_probs=None, stop_reason="aborted", extra_fields=fields)
        request = self._requests[request_id] = _Request(meta.name, meta.earlier_tokens, self.global_steps)
        if self._rhyme.drafting.enable:
            key = bytes.fromhex(meta.key) if meta.key else prompt_key(prompt_ids)
            meta.history_requested_ns = self._histories.ask(key)
        params = continued_options(sampling_params, meta.resumed_tokens, noise_by_position=self._rhyme.draws)
        try:
            output = await super().generate(prompt_ids, meta.put(params), request_id, **kwargs)
        finally:
            del self._requests[request_id]
            await self._gate.leave()
        if self._rhyme.drafting.enable:
            self._finished.append(request_id)  # the trainer fetches counts in bulk, so no response waits for them
        scheduled, first = _wall_times(getattr(request.output, "metrics", None))
        record = RequestRecord(
            id=request_id,
            prompt_key=meta.key,
            sample=meta.sample,
            request=meta.request,
            replica=self.replica_rank,
            node=self._node_id,
            queued_at=meta.queued_at or arrived,
            started_at=scheduled,
            first_token_at=first,
            finished_at=time.time(),
            prompt_tokens=len(prompt_ids),
            cached_tokens=getattr(request.output, "num_cached_tokens", None) or 0,
            response_tokens=len(output.token_ids),
            predicted_tokens=meta.assignment.remaining(meta.earlier_tokens)[0],
            policy_version_start=-1 if request.version is None else request.version,
            policy_version_end=-1 if self.global_steps is None else self.global_steps,
            stop_reason=output.stop_reason or "",
        )
        output.extra_fields[FIELD] = [record.to_dict()]
        if request.engine_died:
            output.extra_fields[DIED] = True
        return output

    async def abort_request(self, request_id: str, reset_prefix_cache: bool = True) -> dict[str, Any]:
        """verl's method looks the request up by its id, while vLLM 0.24 uses another id (``<id>-<8 characters>``)."""
        if await self._gate.cancel(request_id):
            return {"aborted": True, "request_id": request_id}
        known = self.node_rank == 0 and bool(self.engine.output_processor.external_req_ids.get(request_id))
        if known:
            await self.engine.abort(request_id)
            if reset_prefix_cache:
                await super().clear_kv_cache()  # others may run
        elif request_id in self._requests:  # the request waits while weights are loaded
            task = asyncio.ensure_future(self._abort_when_known(request_id))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)
        return {"aborted": known, "request_id": request_id}

    async def _abort_when_known(self, request_id: str) -> None:
        while request_id in self._requests:
            if self.engine.output_processor.external_req_ids.get(request_id):
                await self.engine.abort(request_id)
                return
            await asyncio.sleep(_ADMISSION_POLL_S)

    async def take_counts(self) -> dict[str, dict[str, Any]]:
        """Return the draft counts of requests that finished since the last call: record columns by request id."""
        if not self._finished:
            return {}
        ids = list(self._finished)
        self._finished.clear()
        by_worker = await self._ask_workers("take_request_counts", ids)
        columns = {id: counts for worker in by_worker for id, counts in worker.items()}
        for counts in columns.values():
            if "draft_errors" in counts:  # one request carries the errors of all
                counts["draft_errors"] += self._histories.take_errors()
        return columns


def _as_aborted(output: Any, replays: bool) -> Any:
    """vLLM may have extended the lists of its output unequally, and has no expert routes of a running request."""
    response = output.outputs[0]
    tokens = [] if replays else list(response.token_ids)
    if response.logprobs is not None:
        tokens = tokens[: len(response.logprobs)]
        response.logprobs = response.logprobs[: len(tokens)]
    response.token_ids, response.finish_reason = tokens, "abort"
    return output


def _wall_times(stats: Any) -> tuple[float, float]:
    """Return (scheduled, first token) in seconds since the epoch, from vLLM's monotonic stamps; NaN if missing."""
    offset = time.time() - time.monotonic()
    scheduled, first = getattr(stats, "scheduled_ts", 0.0), getattr(stats, "first_token_ts", 0.0)
    return (scheduled + offset if scheduled else math.nan, first + offset if first else math.nan)
