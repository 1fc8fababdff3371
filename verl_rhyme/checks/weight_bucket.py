"""Whether verl's bucket of weights holds the model's largest tensor, where it must: reported before a run starts.

A bucket of ``update_weights_bucket_megabytes`` is what verl hands to an engine at a time (``BucketedWeightSender``).
Where devices share memory by handles a larger tensor goes by one of its own; on a CPU, and with ``mooncake``, whose own
buckets are whole tensors, the first weight sync ends with an assertion. The other carriers cut tensors.

``python -m verl_rhyme.checks.weight_bucket MODEL`` prints what a run on a CPU needs, in megabytes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from omegaconf import OmegaConf

from verl_rhyme.checks.combinations import Refusal
from verl_rhyme.checks.preflight import model_folder

KEY = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"
#: Megabytes that are enough for small models, and little of a machine's shared memory.
LEAST = 64
_BYTES = {"bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2, "half": 2}


def refusals(config: Any) -> Iterator[Refusal]:
    """A bucket that is too small; nothing where the model is not here.

    Args:
        config: verl's whole config.
    """
    backend = OmegaConf.select(config, "actor_rollout_ref.rollout.checkpoint_engine.backend")
    device = OmegaConf.select(config, "trainer.device")
    path, bucket = OmegaConf.select(config, "actor_rollout_ref.model.path"), OmegaConf.select(config, KEY)
    if (device != "cpu" and backend != "mooncake") or path is None or bucket is None:
        return
    largest = model_folder.largest_tensor(str(path))
    if largest is None:
        return
    name, elements = largest
    needed = _megabytes(elements * _element_bytes(config))
    if int(bucket) < needed:
        where = "on a CPU" if device == "cpu" else f"with checkpoint_engine.backend={backend}"
        detail = f"{KEY}={bucket} does not hold {path}'s {name} ({needed} MB), which {where} it must"
        yield Refusal(detail, f"set {KEY}={needed}")


def _element_bytes(config: Any) -> int:
    """Of what the actor sends: what it holds."""
    actor = "actor_rollout_ref.actor"
    engine = (
        "megatron.dtype" if OmegaConf.select(config, f"{actor}.strategy") == "megatron" else "fsdp_config.model_dtype"
    )
    return _BYTES.get(str(OmegaConf.select(config, f"{actor}.{engine}")), 4)


def _megabytes(size: int) -> int:
    return -(-size // (1 << 20))


if __name__ == "__main__":
    found = model_folder.largest_tensor(sys.argv[1])
    print(max(LEAST, 0 if found is None else _megabytes(4 * found[1])))
