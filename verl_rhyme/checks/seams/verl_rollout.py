"""verl: rollout servers, clients and agent loops."""

from __future__ import annotations

from verl_rhyme.checks.seam_check import RAY_CLASS, Seam

_AGENT = "verl.trainer.ppo.v1.agent_loop_tq"
_CLIENT = "verl.workers.rollout.llm_server"
_ROUTER = "verl.workers.rollout.router"
_SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server"
_GENERATE = (
    "(self, request_id, *, prompt_ids, sampling_params, image_data, video_data, audio_data, mm_processor_kwargs, "
    "**kwargs)"
)

SEAMS: tuple[Seam, ...] = (
    Seam("verl.workers.rollout.replica:RolloutReplicaRegistry.register", "our replica", signature="(name, loader)"),
    Seam(
        "verl.workers.rollout.replica:TokenOutput",
        "counts of each request",
        accepts=("token_ids", "stop_reason", "extra_fields"),
    ),
    Seam(
        f"{_SERVER}:vLLMReplica.__init__",
        "our server",
        contains=("self.server_class = ray.remote(vLLMHttpServer)",),
    ),
    Seam(
        f"{_SERVER}:vLLMHttpServer.generate",
        "identity and counts of each request",
        signature="(self, prompt_ids, sampling_params, request_id, image_data, video_data, audio_data, "
        "mm_processor_kwargs, priority, kv_transfer_params)",
        contains=(
            "SamplingParams(max_tokens=max_tokens, **sampling_params)",
            "self.engine.generate(",
            "if not admitted: admitted = True self._admitting -= 1",  # the first output is empty
            "if not final_res.outputs: return TokenOutput( token_ids=[],",
        ),
    ),
    Seam(f"{_SERVER}:vLLMHttpServer._post_init", "our server", signature="(self, cuda_visible_devices)"),
    Seam(
        "verl.workers.rollout.vllm_rollout.utils:vLLMColocateWorkerExtension._get_zmq_handle",
        "socket of the weight sync: engines",
        contains=('job_id = os.environ.get("VERL_RAY_JOB_ID", "0")', "/tmp/rl-colocate-zmq-{job_id}-replica-"),
    ),
    Seam(
        "verl.workers.rollout.vllm_rollout:ServerAdapter.__init__",
        "socket of the weight sync: workers",
        contains=(
            "job_id = ray.get_runtime_context().get_job_id()",
            'self.zmq_handle = f"ipc:///tmp/rl-colocate-zmq-{job_id}-replica-',
        ),
    ),
    Seam(
        "verl.workers.rollout.base:get_rollout_class",
        "socket of the weight sync: workers",
        contains=("fqdn = _ROLLOUT_REGISTRY[(rollout_name, mode)]",),
    ),
    Seam(
        f"{_SERVER}:vLLMHttpServer._preprocess_engine_kwargs",
        "speculative_config of our proposer",
        signature="(self, engine_kwargs)",
    ),
    Seam(
        f"{_SERVER}:vLLMHttpServer._get_worker_extension_cls",
        "our worker extension",
        signature="(self)",
        contains=('"verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension"',),
    ),
    Seam(
        f"{_SERVER}:vLLMHttpServer.launch_server",
        "our engine settings override verl's",
        contains=("self._preprocess_engine_kwargs(engine_kwargs)", "self._get_worker_extension_cls()"),
    ),
    Seam(
        f"{_SERVER}:vLLMHttpServer.run_server",
        "connecting the proposer before the first request",
        signature="(self, args)",
        contains=('method="monkey_patch_model"', "self.engine = engine_client"),
    ),
    Seam(
        f"{_SERVER}:vLLMHttpServer.__init__",
        "policy version of a request; socket of the weight sync: engines",
        contains=(
            "self.global_steps = None",
            'os.environ["VERL_RAY_JOB_ID"] = ray.get_runtime_context().get_job_id()',
            "self._post_init(",
        ),
    ),
    Seam(f"{_SERVER}:vLLMHttpServer.set_global_steps", "policy version of a request", signature="(self, global_steps)"),
    Seam(
        "verl.workers.rollout.vllm_rollout.utils:vLLMColocateWorkerExtension",
        "our worker extension",
        has=("monkey_patch_model", "update_weights_from_ipc", "update_verl_delta_weights"),
    ),
    Seam(
        f"{_CLIENT}:LLMServerClient.generate",
        "identity of each request, as a keyword for router and server",
        signature=_GENERATE,
        contains=(
            "mm_processor_kwargs=mm_processor_kwargs, **kwargs, )",
            "**multimodal_kwargs, **priority_kwargs, **kwargs, )",
        ),
    ),
    Seam(
        f"{_CLIENT}:FullyAsyncLLMServerClient.generate",
        "one record for each attempt of a resumed request",
        signature=_GENERATE,
        contains=("while True:", "await super().generate("),
    ),
    Seam(
        f"{_CLIENT}:LLMServerManager.get_client",
        "the asynchronous modes' client",
        signature="(self, client_cls, **kwargs)",
    ),
    Seam(f"{_CLIENT}:LLMServerManager.get_replicas", "request slots", signature="(self)"),
    Seam(
        f"{_CLIENT}:LLMServerManager.__init__",
        "replacement of dead replicas",
        contains=("self.rollout_replica_class = get_rollout_replica_class(",),
    ),
    Seam(
        f"{_CLIENT}:LLMServerManager._initialize_llm_servers",
        "replacement of dead replicas",
        contains=(
            "self.server_handles = [server._server_handle for server in self.rollout_replicas]",
            "self.server_addresses = [server._server_address for server in self.rollout_replicas]",
        ),
    ),
    Seam(
        "verl.workers.rollout.replica:RolloutReplica.init_standalone",
        "replacement of dead replicas",
        signature="(self)",
        contains=("[self.gpus_per_replica_node] * self.nnodes", "self.resource_pool ="),
    ),
    Seam(
        f"{_SERVER}:vLLMReplica.launch_servers",
        "concurrent calls of a server; replacement of dead replicas",
        contains=(
            "max_concurrency=self.max_concurrency",
            "self._server_handle = self.servers[0]",
            "self._server_address = (",
        ),
    ),
    Seam(
        f"{_ROUTER}:GlobalRequestLoadBalancer.__init__",
        "our router",
        signature="(self, servers, max_cache_size, full_determinism)",
        contains=("self._servers:", "self._request_id_to_server:"),
    ),
    Seam(
        f"{_ROUTER}:GlobalRequestLoadBalancer.acquire_server",
        "our router: a request goes to its assigned replica",
        signature="(self, request_id)",
        contains=(
            "if request_id in self._request_id_to_server: server_id = self._request_id_to_server[request_id]",
            "return server_id, self._servers[server_id]",
        ),
    ),
    Seam(f"{_ROUTER}:GlobalRequestLoadBalancer.remove_servers", "our router", signature="(self, server_ids)"),
    Seam(
        f"{_ROUTER}:RequestLoadBalancer",
        "a user's own router",
        has=(
            "acquire_server",
            "release_server",
            "require_acquire_fields",
            "require_release_fields",
            "add_servers",
            "remove_servers",
            "get_all_servers",
            "get_status",
            "clear_sticky_cache",
            "get_total_inflight",
        ),
    ),
    Seam(
        f"{_ROUTER}:get_router_handle",
        "our router",
        signature="(servers, router_config_path, full_determinism, load_balancer_cls)",
    ),
    Seam(f"{_ROUTER}:_create_plugin_extension", "our router", contains=("ray_cls.remote(servers, yaml_config)",)),
    Seam(
        f"{_CLIENT}:LLMServerClient._acquire_server",
        "request fields that the router gets",
        signature="(self, request_id, **extra)",
        contains=("for name in self._lb_require_acquire_fields if name in extra",),
    ),
    Seam(
        f"{_CLIENT}:FullyAsyncLLMServerClient._acquire_server",
        "waiting for a replica",
        contains=('"No available servers in load balancer" in str(e)',),
    ),
    Seam(
        f"{_AGENT}:AgentLoopManagerTQ.__init__",
        "our agent loop worker",
        contains=("self.agent_loop_workers_class = AgentLoopWorkerTQ",),
    ),
    Seam(
        f"{_AGENT}:AgentLoopManagerTQ.generate_sequences",
        "pipeline: prompts for live workers",
        signature="(self, prompts)",
        contains=("prompts.chunk(len(self.agent_loop_workers))", "worker.generate_sequences.remote(chunk)"),
    ),
    Seam(
        "verl.experimental.agent_loop:AgentLoopManager._init_agent_loop_workers",
        "pipeline: new workers after the last one has died",
        signature="(self)",
        contains=("self.agent_loop_workers = []",),
    ),
    Seam(
        f"{_AGENT}:AgentLoopWorkerTQ{RAY_CLASS}._run_agent_loop",
        "sample number of each request",
        signature="(self, sampling_params, trajectory, *, agent_name, trace, **kwargs)",
    ),
    Seam(
        f"{_AGENT}:AgentLoopWorkerTQ{RAY_CLASS}._run_prompt",
        "sample number of each request; the pipeline replaces it",
        signature="(self, prompt, sampling_params, trajectory, trace)",
        contains=("session_id", '"__rollout_n__"', '"__do_sample__"'),
    ),
    Seam(
        f"{_AGENT}:AgentLoopWorkerTQ{RAY_CLASS}._agent_loop_postprocess",
        "trajectories as verl stores them",
        signature="(self, output, validate, **kwargs)",
        contains=('keys.append(f"{uid}_{session_id}_{i}")', '"max_global_steps":', "field = output.as_dict()"),
    ),
    Seam(
        f"{_AGENT}:AgentLoopWorkerTQ{RAY_CLASS}._compute_score",
        "pipeline: a sample whose reward is not a number fails before it is stored",
        signature="(self, outputs, kwargs)",
        contains=("final_output = outputs[-1]", "self.reward_loop_worker_handles is not None"),
    ),
    Seam(
        f"{_SERVER}:vLLMHttpServer.abort_all_requests",
        "pipeline: aborting samples without waiting for the queue",
        contains=("while self._admitting > 0:", "await self.engine.pause_generation("),
    ),
)
