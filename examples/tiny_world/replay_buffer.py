"""verl's replay buffers with the polling interval of ours, because steps of the tiny world take only seconds.

``trainer.v1.sampler.custom_sampler`` of the tiny recipe's ``rhyme=off``.
"""

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

_POLL_INTERVAL_S = 0.25


def quick_replay_buffer(trainer_mode: str, **options: Any) -> ReplayBuffer:
    """Return the replay buffer that verl builds for a trainer mode."""
    buffer = ReplayBuffer if trainer_mode == "sync" else ReplayBufferAsync
    return buffer(trainer_mode=trainer_mode, poll_interval=_POLL_INTERVAL_S, **options)
