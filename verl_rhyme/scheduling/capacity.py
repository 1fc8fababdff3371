"""How many samples engines are given at a time: by their request slots, and by the room of their KV caches.

Slots are not capacity: with long responses a cache is full before its slots are, and vLLM preempts what it has begun.
"""

from __future__ import annotations

#: Attempts after which an observation counts half.
_HALF_LIFE = 4096
_DECAY = 0.5 ** (1 / _HALF_LIFE)


class Capacity:
    """A running mean of what a request holds of a cache, by attempts that ended.

    At a random moment one of ``L`` response tokens is met in proportion to ``L`` and has half of them, so that the
    requests that run hold ``(sum p L + sum L**2 / 2) / sum L`` tokens each, ``p`` those of its prompt.

    Args:
        limit: Samples at a time, whatever they hold.
        room: Tokens that they may hold together; ``None`` where nobody knows.
        state: Of an earlier one.

    Attributes:
        share: Of the replicas that limit and room are of, those that serve.
    """

    def __init__(self, limit: int, room: int | None = None, state: tuple[float, float] | None = None) -> None:
        self._most, self._room = limit, room
        self._lengths, self._held = state or (0.0, 0.0)
        self.share = 1.0

    @property
    def state(self) -> tuple[float, float]:
        """Plain, for JSON."""
        return self._lengths, self._held

    def observe(self, prompt_tokens: int, response_tokens: int) -> None:
        """An attempt ended: tokens before it, and tokens that it made."""
        self._lengths = self._lengths * _DECAY + response_tokens
        self._held = self._held * _DECAY + response_tokens * (prompt_tokens + response_tokens / 2)

    @property
    def held(self) -> float:
        """Tokens that a running request holds on average; 0 before any ended."""
        return self._held / self._lengths if self._lengths else 0.0

    @property
    def limit(self) -> int:
        """Samples at a time."""
        limit = float(self._most)
        if self._room is not None and self.held:
            limit = min(limit, self._room / self.held)
        return max(1, int(self.share * limit))
