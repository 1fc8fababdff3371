"""Runs a script of this folder on several ranks of a training engine: forks of one process, which imports verl once.

``python ranks.py SCRIPT WORLD FOLDER '{"model": DIR, ...}'`` calls ``main`` of the script on each rank.
A rank prints to ``FOLDER/RANK``.
"""

import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

MODELS = Path(__file__).parents[2] / "examples/tiny_world/models"


def run(world, script, **settings):
    """What a script of this folder reports, of so many ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        settings["port"] = free.getsockname()[1]
    environment = os.environ | {"WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, script, str(world), folder, json.dumps(settings)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
        outputs = [file.read_text() for file in sorted(Path(folder).iterdir())]
    lines = [line for output in outputs for line in output.splitlines() if line.startswith("RESULT")]
    assert len(lines) == 1, "\n".join(output[-3000:] for output in [*outputs, done.stderr])
    return json.loads(lines[0][len("RESULT") :])


def rank_main(rank, main, folder, settings):
    os.environ["RANK"] = str(rank)
    output = os.open(f"{folder}/{rank}", os.O_WRONLY | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    main(**settings)
    sys.stdout.flush()


if __name__ == "__main__":
    import verl.workers.engine.fsdp
    import verl.workers.engine.megatron  # noqa: F401
    from torch.multiprocessing import start_processes

    script, world, folder, settings = sys.argv[1:]
    arguments = (importlib.import_module(script).main, folder, json.loads(settings))
    start_processes(rank_main, arguments, nprocs=int(world), start_method="fork")
