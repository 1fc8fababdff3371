"""verl's methods in a vLLM worker with our extension."""

import subprocess
import sys
import textwrap

import pytest


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
        assert extension.RhymeWorkerExtension.update_weights_from_ipc.__wrapped__ is not load
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


def test_both_weight_loaders_exit_on_error():
    from verl_rhyme.engine.extension import RhymeWorkerExtension

    for name in ("update_weights_from_ipc", "update_verl_delta_weights"):
        assert getattr(RhymeWorkerExtension, name).__wrapped__.__name__ == name
