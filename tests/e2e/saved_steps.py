"""One rank of a training engine that saves with some contents, and of a new engine that loads with some contents.

``RANK=0 WORLD_SIZE=1 python saved_steps.py '{"engine": "fsdp2", "model": DIR, "folder": DIR, "cases": [...]}'``; see
:func:`main`.
"""

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist
from engine_steps import build, make_batch, ppo


def step(engine, loss):
    """Train a step; return its loss, gradient norm and learning rate."""
    with engine.train_mode():
        done = engine.train_batch(make_batch(), loss_function=loss)
    return [sum(done["loss"]), done["metrics"]["grad_norm"], engine.lr_scheduler_step()]


def main(engine, model, port, folder, cases):
    """Print of each case two steps of three engines: the one that has saved, one that has loaded, and a new one. An
    error in loading takes the place of the second.

    Args:
        engine: "megatron", "fsdp" or "fsdp2".
        model: A model folder.
        port: Of the rendezvous on this machine.
        folder: For checkpoints.
        cases: Dictionaries with ``save`` and ``load``, the options of the checkpoint, and ``options`` of :func:`build`.
    """
    dist.init_process_group(
        "cpu:gloo", init_method=f"tcp://127.0.0.1:{port}", rank=int(os.environ["RANK"]), world_size=1
    )
    import verl  # noqa: F401  (loads the plugins)

    steps, loss = [], ppo()
    for number, case in enumerate(cases):
        checkpoint = {"save_contents": case["save"], "load_contents": case["load"], **case.get("checkpoint", {})}
        path = str(Path(folder, f"{engine}{number}", "global_step_2", "actor"))

        def make(checkpoint=checkpoint, case=case):
            return build(engine, model, 1, 1, 1e-3, checkpoint=checkpoint, warmup=10, **case.get("options", {}))

        saving, fresh, loading = make(), make(), make()
        for _ in range(2):
            step(saving, loss)
        saving.save_checkpoint(path, global_step=2)
        saved, new = ([step(each, loss) for _ in range(2)] for each in (saving, fresh))
        try:
            loading.load_checkpoint(path, del_local_after_load=False)
            loaded = [step(loading, loss) for _ in range(2)]
        except Exception as error:
            loaded = repr(error)
        steps.append([saved, loaded, new])
    print("RESULT" + json.dumps(steps))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
