"""Runs a script of this folder on several ranks of a training engine."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

MODELS = Path(__file__).parents[2] / "examples/tiny_world/models"


def run(world, script, **settings):
    """What a script of this folder reports, of so many ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        settings["port"] = free.getsockname()[1]
    command = [sys.executable, str(Path(__file__).with_name(f"{script}.py")), json.dumps(settings)]
    environment = os.environ | {"WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
    ranks = [
        subprocess.Popen(
            command,
            env=environment | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        outputs = [rank.communicate(timeout=400)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    lines = [line for output in outputs for line in output.splitlines() if line.startswith("RESULT")]
    assert len(lines) == 1, "\n".join(output[-3000:] for output in outputs)
    return json.loads(lines[0][len("RESULT") :])
