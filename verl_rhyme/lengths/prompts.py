"""Lengths of prompts, as their requests report them; an unknown prompt has the mean of the others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping


class PromptLengths:
    """Tokens by prompt. A state machine without a clock.

    Args:
        most: Maximum number of prompts; the one recorded longest ago goes first.
    """

    def __init__(self, most: int = 1 << 20) -> None:
        self._most = most
        self._tokens: OrderedDict[str, int] = OrderedDict()
        self._sum = 0

    def __len__(self) -> int:
        return len(self._tokens)

    def record(self, prompt: str, tokens: int) -> None:
        """Set the tokens of a prompt."""
        self._sum += tokens - self._tokens.pop(prompt, 0)
        self._tokens[prompt] = tokens
        if len(self._tokens) > self._most:
            self._sum -= self._tokens.popitem(last=False)[1]

    def expected(self, prompt: str) -> int:
        """Return the tokens of a prompt, or the mean of all; 0 before any is known."""
        tokens = self._tokens.get(prompt)
        return round(self._sum / max(1, len(self._tokens))) if tokens is None else tokens

    def state_dict(self) -> dict[str, int]:
        """Return the tokens by prompt, for JSON."""
        return dict(self._tokens)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Replace the state by a :meth:`state_dict`."""
        self._tokens, self._sum = OrderedDict(), 0
        for prompt, tokens in state.items():
            self.record(prompt, int(tokens))
