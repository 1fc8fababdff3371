"""Custom worker: verl's with an additional metric per training step, on FSDP and on Megatron.

Drafting takes place in the rollout server, so a worker needs no code of verl-rhyme.
"""

from typing import Any

from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker


class MyTrainingWorker(TrainingWorker):
    """Counts its training steps."""

    updates = 0

    def _postprocess_output(self, output: dict, *, forward_only: bool, **kwargs: Any) -> Any:
        if not forward_only:
            self.updates += 1
            output["metrics"]["mine/updates"] = [self.updates]  # one value per micro-batch, or one for all
        return super()._postprocess_output(output, forward_only=forward_only, **kwargs)


class MyWorker(ActorRolloutRefWorker):
    """Actor, rollout and reference of one rank."""

    actor_worker_cls = MyTrainingWorker
