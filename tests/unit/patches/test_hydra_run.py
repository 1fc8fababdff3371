"""An interrupt of a training command."""

import signal
import subprocess
import sys

COMMAND = """
from types import SimpleNamespace
from verl_rhyme.checks import startup
from verl_rhyme.config import config_tree
from verl_rhyme.patches import BEFORE_RAY

config_tree.is_used = lambda config: True
startup.begin = lambda *arguments: None
startup.how_to_resume = lambda config: "the same command resumes"

def train(config):
    raise {error}

run = BEFORE_RAY.replace(lambda task_function, **_: task_function(None))
hydra = SimpleNamespace(compose_config=len, config_loader=SimpleNamespace(load_sweep_config=len))
run(hydra=hydra, config_name=None, task_function=train, overrides=[])
"""


def ended(error):
    return subprocess.run(
        [sys.executable, "-c", COMMAND.format(error=error)], capture_output=True, text=True, timeout=60
    )


def test_an_interrupt_has_no_traceback_and_ends_the_shells_loop():
    """A shell continues after an exit status, not after the signal."""
    interrupted = ended("KeyboardInterrupt")
    assert (interrupted.returncode, interrupted.stderr) == (-signal.SIGINT, "verl-rhyme: the same command resumes\n")
    assert "Traceback" in ended("ValueError").stderr
