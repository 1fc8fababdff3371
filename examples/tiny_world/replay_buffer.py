"""verl's own replay buffers, looking for finished samples more often: steps of the tiny world take seconds.

``trainer.v1.sampler.custom_sampler`` of the tiny recipe, in every arm of a comparison.
"""

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

_POLL_INTERVAL_S = 0.05


class QuickReplayBuffer(ReplayBuffer):
    """For ``trainer_mode=sync``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, poll_interval=_POLL_INTERVAL_S, **kwargs)


class QuickReplayBufferAsync(ReplayBufferAsync):
    """For verl's asynchronous modes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, poll_interval=_POLL_INTERVAL_S, **kwargs)
