"""verl's methods in a vLLM worker with our extension."""

import asyncio
import subprocess
import sys
import textwrap
import threading
from types import SimpleNamespace

import pytest
import torch


@pytest.mark.slow
def test_worker_that_cannot_load_its_weights_exits_and_logs_why():
    """verl's sender would wait for its reply forever; vLLM continues after an error in a worker."""
    script = """
        import logging
        logging.basicConfig()
        from verl_rhyme.engine import extension
        from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension as theirs

        def load(self, weights):
            print("loads", weights, flush=True)
            if weights == "torn":
                raise ValueError("out of memory")

        theirs.update_weights_from_ipc = load
        ours = type("Ours", (), {"update_weights_from_ipc": extension._exit_on_error(theirs.update_weights_from_ipc)})()
        for name in ("update_weights_from_ipc", "update_verl_delta_weights"):
            assert getattr(extension.RhymeWorkerExtension, name).__wrapped__.__name__ == name
        ours.update_weights_from_ipc("whole")
        ours.update_weights_from_ipc("torn")
        print("goes on")
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 1
    assert ended.stdout.split("\n")[-3:] == ["loads whole", "loads torn", ""]
    assert "could not load its weights and exits" in ended.stderr
    assert "ValueError: out of memory" in ended.stderr


def test_quantised_engines_load_whole_buckets_by_verls_way(monkeypatch):
    """``quantization=fp8`` needs kernels that a CPU lacks: here verl's calls are recorded (verl#5459, #7136)."""
    from verl.utils.vllm import vllm_quant_utils
    from verl.workers.rollout.vllm_rollout import utils
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    from verl_rhyme.engine.extension import RhymeWorkerExtension

    calls = []
    monkeypatch.setenv("VERL_RAY_JOB_ID", "quantised")
    monkeypatch.setattr(vllm_quant_utils, "prepare_quanted_weights_for_loading", lambda m: calls.append("prepare") or m)
    monkeypatch.setattr(vllm_quant_utils, "process_quanted_weights_after_loading", lambda *_: calls.append("process"))
    monkeypatch.setattr(
        utils,
        "load_quanted_weights",
        lambda weights, runner: calls.append({name: tensor.dtype for name, tensor in weights}) or [],
    )
    worker = object.__new__(RhymeWorkerExtension)
    worker.device, worker.local_rank = torch.device("cpu"), 0
    worker._is_qat_model = worker._is_modelopt_qat = False
    config = SimpleNamespace(quant_config=Fp8Config(), speculative_config=None)
    config.parallel_config = SimpleNamespace(data_parallel_size=1)
    worker.model_runner = SimpleNamespace(model=torch.nn.Linear(2, 2), vllm_config=config)
    weights = {f"model.layers.{n}.mlp.up_proj.weight": torch.ones(200, 1000) for n in range(3)}  # two in a bucket
    sender = BucketedWeightSender(worker._get_zmq_handle(), bucket_size_mb=2, use_shm=True)
    sending = threading.Thread(target=lambda: asyncio.run(sender.async_send_weights(iter(weights.items()))))
    sending.start()
    worker.update_weights_from_ipc(use_shm=True, version=4)
    sending.join()
    first, second, third = weights
    assert calls == ["prepare", dict.fromkeys([first, second], torch.float32), {third: torch.float32}, "process"]
    held = worker.held_weights()
    assert (held["version"], held["values"]) == (4, {})
    assert "quantise" in held["obstacle"]
    adapters = {"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(2, 2)}
    monkeypatch.setattr(RhymeWorkerExtension.__mro__[2], "_update_weights", lambda *_: calls.append("adapters"))
    worker._update_weights(list(adapters.items()), {"r": 2}, True)
    assert calls[-1] == "adapters"
    assert "quantise" in worker.held_weights()["obstacle"], "adapters on engines that quantise are not compared, either"
