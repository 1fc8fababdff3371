"""verl: rollout servers, clients, routers and agent loops."""

from __future__ import annotations

from tests.contract.seam_check import RAY_CLASS, Shapes

_AGENT = "verl.trainer.ppo.v1.agent_loop_tq"
_CLIENT = "verl.workers.rollout.llm_server"
_ROUTER = "verl.workers.rollout.router"
_VLLM = "verl.workers.rollout.vllm_rollout"
_GENERATE = (
    "(self, request_id, *, prompt_ids, sampling_params, image_data, video_data, audio_data, mm_processor_kwargs, "
    "**kwargs)"
)

SEAMS: Shapes = {
    "our server and its engine": {
        "verl.workers.rollout.replica:RolloutReplicaRegistry": {"register": "(name, loader)"},
        f"{_VLLM}.vllm_async_server:vLLMReplica": {"__init__": "self.server_class = ray.remote(vLLMHttpServer)"},
        f"{_VLLM}.vllm_async_server:vLLMHttpServer": {
            "_post_init": "(self, cuda_visible_devices)",
            "_preprocess_engine_kwargs": "(self, engine_kwargs)",
            "_get_worker_extension_cls": (
                "(self)",
                '"verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension"',
            ),
            "launch_server": ("self._preprocess_engine_kwargs(engine_kwargs)", "self._get_worker_extension_cls()"),
            "run_server": ("(self, args)", 'method="monkey_patch_model"', "self.engine = engine_client"),
            "set_global_steps": "(self, global_steps)",
        },
        f"{_VLLM}.utils:vLLMColocateWorkerExtension": {
            "monkey_patch_model": (),
            "update_weights_from_ipc": (),
            "update_verl_delta_weights": (),
        },
    },
    "identity, counts and times of requests": {
        "verl.workers.rollout.replica": {"TokenOutput": "(token_ids, stop_reason, extra_fields, ...)"},
        f"{_VLLM}.vllm_async_server:vLLMHttpServer": {
            "generate": (
                "(self, prompt_ids, sampling_params, request_id, image_data, video_data, audio_data, "
                "mm_processor_kwargs, priority, kv_transfer_params)",
                "SamplingParams(max_tokens=max_tokens, **sampling_params)",
                "self.engine.generate(",
                "if not admitted: admitted = True self._admitting -= 1",  # the first output is empty
                "if not final_res.outputs: return TokenOutput( token_ids=[],",
            )
        },
        f"{_CLIENT}:FullyAsyncLLMServerClient": {
            "generate": (
                _GENERATE,
                "while True:",
                "await super().generate(",
            )
        },
        f"{_AGENT}:AgentLoopWorkerTQ{RAY_CLASS}": {
            "_run_agent_loop": "(self, sampling_params, trajectory, *, agent_name, trace, **kwargs)",
            "_run_prompt": (
                "(self, prompt, sampling_params, trajectory, trace)",
                "session_id",
                '"__rollout_n__"',
                '"__do_sample__"',
            ),
        },
    },
    "socket of the weight sync": {
        f"{_VLLM}.utils:vLLMColocateWorkerExtension": {
            "_get_zmq_handle": (
                'job_id = os.environ.get("VERL_RAY_JOB_ID", "0")',
                "/tmp/rl-colocate-zmq-{job_id}-replica-",
            )
        },
        f"{_VLLM}:ServerAdapter": {
            "__init__": (
                "job_id = ray.get_runtime_context().get_job_id()",
                'self.zmq_handle = f"ipc:///tmp/rl-colocate-zmq-{job_id}-replica-',
            )
        },
        "verl.workers.rollout.base": {"get_rollout_class": "fqdn = _ROLLOUT_REGISTRY[(rollout_name, mode)]"},
        f"{_VLLM}.vllm_async_server:vLLMHttpServer": {
            "__init__": (
                "self.global_steps = None",
                'os.environ["VERL_RAY_JOB_ID"] = ray.get_runtime_context().get_job_id()',
                "self._post_init(",
            )
        },
    },
    "routers": {
        f"{_CLIENT}:LLMServerClient": {
            "generate": (
                _GENERATE,
                "mm_processor_kwargs=mm_processor_kwargs, **kwargs, )",
                "**multimodal_kwargs, **priority_kwargs, **kwargs, )",
            ),
            "_acquire_server": (
                "(self, request_id, **extra)",
                "for name in self._lb_require_acquire_fields if name in extra",
            ),
        },
        f"{_ROUTER}:GlobalRequestLoadBalancer": {
            "__init__": (
                "(self, servers, max_cache_size, full_determinism)",
                "self._servers:",
                "self._request_id_to_server:",
            ),
            "acquire_server": (
                "(self, request_id)",
                "if request_id in self._request_id_to_server: server_id = self._request_id_to_server[request_id]",
                "return server_id, self._servers[server_id]",
            ),
            "remove_servers": "(self, server_ids)",
        },
        _ROUTER: {"_create_plugin_extension": "ray_cls.remote(servers, yaml_config)"},
    },
    "trainers": {
        f"{_CLIENT}:LLMServerManager": {
            "get_client": "(self, client_cls, **kwargs)",
            "get_replicas": "(self)",
        },
        f"{_AGENT}:AgentLoopManagerTQ": {"__init__": "self.agent_loop_workers_class = AgentLoopWorkerTQ"},
        f"{_AGENT}:AgentLoopWorkerTQ{RAY_CLASS}": {
            "_agent_loop_postprocess": (
                "(self, output, validate, **kwargs)",
                'keys.append(f"{uid}_{session_id}_{i}")',
                '"max_global_steps":',
                "field = output.as_dict()",
            )
        },
    },
    "replacement of dead replicas": {
        f"{_CLIENT}:LLMServerManager": {
            "__init__": "self.rollout_replica_class = get_rollout_replica_class(",
            "_initialize_llm_servers": (
                "self.server_handles = [server._server_handle for server in self.rollout_replicas]",
                "self.server_addresses = [server._server_address for server in self.rollout_replicas]",
            ),
        },
        "verl.workers.rollout.replica:RolloutReplica": {
            "init_standalone": ("(self)", "[self.gpus_per_replica_node] * self.nnodes", "self.resource_pool =")
        },
        f"{_VLLM}.vllm_async_server:vLLMReplica": {
            "launch_servers": (
                "max_concurrency=self.max_concurrency",
                "self._server_handle = self.servers[0]",
                "self._server_address = (",
            )
        },
        f"{_CLIENT}:FullyAsyncLLMServerClient": {
            "_acquire_server": '"No available servers in load balancer" in str(e)'
        },
    },
    "pipeline": {
        f"{_AGENT}:AgentLoopManagerTQ": {
            "generate_sequences": (
                "(self, prompts)",
                "prompts.chunk(len(self.agent_loop_workers))",
                "worker.generate_sequences.remote(chunk)",
            )
        },
        "verl.experimental.agent_loop:AgentLoopManager": {
            "_init_agent_loop_workers": ("(self)", "self.agent_loop_workers = []")
        },
        f"{_AGENT}:AgentLoopWorkerTQ{RAY_CLASS}": {
            "_compute_score": (
                "(self, outputs, kwargs)",
                "final_output = outputs[-1]",
                "self.reward_loop_worker_handles is not None",
            )
        },
        f"{_VLLM}.vllm_async_server:vLLMHttpServer": {
            "abort_all_requests": ("while self._admitting > 0:", "await self.engine.pause_generation(")
        },
    },
}
