"""Maximum number of samples in the engines at a time, by request slots and by the size of the KV caches.

Slots alone are not enough: with long responses a cache fills before its slots do, and vLLM preempts running requests.
"""

from __future__ import annotations

#: Attempts after which an observation counts half.
_HALF_LIFE = 4096
_DECAY = 0.5 ** (1 / _HALF_LIFE)


class Capacity:
    """Running mean of the cache tokens of a request, from ended attempts.

    At a random moment a response of ``L`` tokens is met in proportion to ``L``, with half of its tokens. A running
    request thus holds ``(sum p L + sum L**2 / 2) / sum L`` tokens, with ``p`` the tokens of its prompt. At most
    ``limit`` samples fit into the slots, and ``room`` tokens into all caches (``None`` where unknown).
    """

    def __init__(self, limit: int, room: int | None = None, state: tuple[float, float] | None = None) -> None:
        self._most, self._room = limit, room
        self._lengths, self._held = state or (0.0, 0.0)
        self.share = 1.0  # of the replicas that serve

    @property
    def state(self) -> tuple[float, float]:
        """For JSON."""
        return self._lengths, self._held

    def observe(self, prompt_tokens: int, response_tokens: int) -> None:
        """Record an ended attempt: tokens before it, and tokens it generated."""
        self._lengths = self._lengths * _DECAY + response_tokens
        self._held = self._held * _DECAY + response_tokens * (prompt_tokens + response_tokens / 2)

    @property
    def held(self) -> float:
        """Mean tokens that a running request holds; 0 before any ended."""
        return self._held / self._lengths if self._lengths else 0.0

    @property
    def limit(self) -> int:
        limit = float(self._most)
        if self._room is not None and self.held:
            limit = min(limit, self._room / self.held)
        return max(1, int(self.share * limit))
