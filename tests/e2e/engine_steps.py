"""A training engine of verl, a batch that is always the same, and a PPO loss."""

import dataclasses
from functools import partial

import torch
from tensordict import TensorDict

PROMPT = 5
LENGTHS = (20, 13, 30, 25, 9, 31, 16, 22)
MICRO_BATCH = 4


def build(engine, model, tp, pp, lr, options=None, checkpoint=None, warmup=0, schedule=False):
    import verl.workers.engine.fsdp
    import verl.workers.engine.megatron  # noqa: F401  (both register their engines)
    from verl.trainer.config import CheckpointConfig
    from verl.workers import config
    from verl.workers.engine.base import EngineRegistry

    batch = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": MICRO_BATCH}
    if engine == "megatron":
        settings = config.McoreEngineConfig(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            use_remove_padding=False,
            **batch,
            **(options or {}),
        )
        optimizer = config.McoreOptimizerConfig(
            lr=lr,
            clip_grad=1.0,
            lr_decay_steps=100,
            lr_warmup_steps=warmup,
            use_checkpoint_opt_param_scheduler=schedule,
        )
    else:
        full = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
        settings = config.FSDPEngineConfig(
            strategy=engine, use_remove_padding=False, use_torch_compile=False, mixed_precision=full, **batch
        )
        optimizer = config.FSDPOptimizerConfig(lr=lr, clip_grad=1.0, total_training_steps=100, lr_warmup_steps=warmup)
    described = config.HFModelConfig(
        path=model,
        use_remove_padding=False,
        override_config={"attn_implementation": "sdpa"},
    )
    saved = CheckpointConfig(**(checkpoint or {}))
    built = EngineRegistry.new("language_model", settings.strategy, described, settings, optimizer, saved)
    built.initialize()
    return built


def make_batch(seed=1):
    """Random sequences with random advantages; log-probs of the policy that made them near a new model's own."""
    import verl.utils.tensordict_utils as tu
    from verl.utils.dataset.dataset_utils import DatasetPadMode

    random = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(0, 60, (length,), generator=random) for length in LENGTHS]
    responses = [length - PROMPT for length in LENGTHS]

    def nested(rows):
        return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)

    batch = TensorDict(
        {
            "input_ids": nested(tokens),
            "position_ids": nested(torch.arange(length) for length in LENGTHS),
            "prompts": nested(row[:PROMPT] for row in tokens),
            "responses": nested(row[PROMPT:] for row in tokens),
            "loss_mask": nested(torch.ones(n) for n in responses),
            "response_mask": nested(torch.ones(n) for n in responses),
            "advantages": nested(torch.randn(n, generator=random) for n in responses),
            "old_log_probs": nested(-1 - 4 * torch.rand(n, generator=random) for n in responses),
            "ref_log_prob": nested(-1 - 4 * torch.rand(n, generator=random) for n in responses),
            "temperature": torch.ones(len(LENGTHS)),
        },
        batch_size=[len(LENGTHS)],
    )
    tu.assign_non_tensor(
        batch,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=MICRO_BATCH,
        global_batch_size=len(LENGTHS),
        max_response_length=64,
        pad_mode=DatasetPadMode.NO_PADDING,
        calculate_entropy=True,
        use_remove_padding=False,
    )
    return batch


def actor_config(**changes):
    """verl's defaults but for these."""
    from verl.workers.config import ActorConfig

    config = ActorConfig.__new__(ActorConfig)  # __init__ would check batch sizes that only a trainer has
    for field in dataclasses.fields(ActorConfig):
        if field.default is not dataclasses.MISSING:
            object.__setattr__(config, field.name, field.default)
        elif field.default_factory is not dataclasses.MISSING:
            object.__setattr__(config, field.name, field.default_factory())
    for name, value in changes.items():
        object.__setattr__(config, name, value)
    return config


def ppo(**changes):
    from verl.workers.utils.losses import ppo_loss

    return partial(ppo_loss, actor_config(**changes))
