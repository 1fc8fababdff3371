"""Lengths of prompts, as their requests report them; an unknown prompt has the mean of the others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping


class PromptLengths:
    """Tokens by prompt, of at most ``most`` prompts; the one recorded longest ago goes first. Has no clock."""

    def __init__(self, most: int = 1 << 20) -> None:
        self._most = most
        self._tokens: OrderedDict[str, int] = OrderedDict()
        self._sum = 0
        self._changed: dict[str, None] = {}  # recorded since the last pop_changes(), in this order

    def __len__(self) -> int:
        return len(self._tokens)

    def record(self, prompt: str, tokens: int) -> None:
        self._sum += tokens - self._tokens.pop(prompt, 0)
        self._tokens[prompt] = tokens
        self._changed.pop(prompt, None)
        self._changed[prompt] = None
        if len(self._tokens) > self._most:
            self._sum -= self._tokens.popitem(last=False)[1]

    def expected(self, prompt: str) -> int:
        """Return the tokens of a prompt, or the mean of all; 0 before any is known."""
        tokens = self._tokens.get(prompt)
        return round(self._sum / max(1, len(self._tokens))) if tokens is None else tokens

    def pop_changes(self) -> dict[str, int]:
        """Return the tokens recorded since the last call, or since :meth:`load_state_dict`, for JSON."""
        changed, self._changed = self._changed, {}
        return {prompt: self._tokens[prompt] for prompt in changed if prompt in self._tokens}

    def update(self, changes: Mapping[str, int]) -> None:
        """Take over the :meth:`pop_changes` of an object that was equal to this one."""
        for prompt, tokens in changes.items():
            self.record(prompt, int(tokens))
        self._changed = {}

    def state_dict(self) -> dict[str, int]:
        return dict(self._tokens)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._tokens, self._sum = OrderedDict(), 0
        self.update(state)
