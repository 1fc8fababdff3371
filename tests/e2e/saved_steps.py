"""One rank of training engines that save with some contents, and of new engines that load with some contents.

``ranks.py`` calls :func:`main`.
"""

import json
import os
from pathlib import Path

import torch.distributed as dist
from engine_steps import build, make_batch, ppo

#: Compared steps. Without Transformer Engine, parameters of Megatron share one counter of Adam's steps after loading:
#: there the first step decides.
STEPS = {"megatron": 1, "fsdp2": 2}


def step(engine, loss):
    """Train a step; return its loss, gradient norm and learning rate."""
    with engine.train_mode():
        done = engine.train_batch(make_batch(), loss_function=loss)
    return [sum(done["loss"]), done["metrics"]["grad_norm"], engine.lr_scheduler_step()]


def main(model, port, folder, cases):
    """Print of each engine's cases the steps of three engines: the one that has saved, one that has loaded, and a new
    one. An error in loading takes the place of the second. Cases of the same options share the first and the third.

    A case has ``save`` and ``load``, the options of the checkpoint, and ``options`` of :func:`build`.
    """
    dist.init_process_group(
        "cpu:gloo", init_method=f"tcp://127.0.0.1:{port}", rank=int(os.environ["RANK"]), world_size=1
    )
    from verl.trainer.config import CheckpointConfig

    loss, steps = ppo(), {}
    for engine, count in STEPS.items():
        shared = {}
        for case in cases[engine]:
            shared.setdefault(json.dumps(case["options"]), []).append(case)
        for number, group in enumerate(shared.values()):

            def make(case, engine=engine):
                checkpoint = {"save_contents": case["save"], "load_contents": case["load"], **case["checkpoint"]}
                return build(engine, model, 1, 1, 1e-3, checkpoint=checkpoint, warmup=10, **case["options"])

            fresh, saving = make(group[0]), make(group[0])
            new = [step(fresh, loss) for _ in range(count)]
            for _ in range(2):
                step(saving, loss)
            manager = saving.checkpoint_mananager if engine == "megatron" else saving.checkpoint_manager
            for case in group:
                case["path"] = str(Path(folder, engine, f"{number}.{group.index(case)}", "global_step_2", "actor"))
                manager.checkpoint_save_contents = case["save"]
                manager.checkpoint_config = CheckpointConfig(save_contents=case["save"], **case["checkpoint"])
                saving.save_checkpoint(case["path"], global_step=2)
            saved = [step(saving, loss) for _ in range(count)]
            for case in group:
                loading = make(case)
                try:
                    loading.load_checkpoint(case["path"], del_local_after_load=False)
                    loaded = [step(loading, loss) for _ in range(count)]
                except Exception as error:
                    loaded = repr(error)
                case["steps"] = [saved, loaded, new]
        steps[engine] = [case["steps"] for case in cases[engine]]
    print("RESULT" + json.dumps(steps))
    dist.destroy_process_group()
