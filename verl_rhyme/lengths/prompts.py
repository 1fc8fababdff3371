"""How many tokens prompts have, as their requests tell; of one never seen, the mean of those that were."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping


class PromptLengths:
    """See the module. A state machine without a clock.

    Args:
        most: Prompts that are remembered; the one that was told of longest ago goes first.
    """

    def __init__(self, most: int = 1 << 20) -> None:
        self._most = most
        self._tokens: OrderedDict[str, int] = OrderedDict()
        self._sum = 0

    def __len__(self) -> int:
        """Prompts that are remembered."""
        return len(self._tokens)

    def tell(self, prompt: str, tokens: int) -> None:
        """A prompt has so many tokens."""
        self._sum += tokens - self._tokens.pop(prompt, 0)
        self._tokens[prompt] = tokens
        if len(self._tokens) > self._most:
            self._sum -= self._tokens.popitem(last=False)[1]

    def of(self, prompt: str) -> int:
        """Tokens of a prompt; 0 before any was told of."""
        tokens = self._tokens.get(prompt)
        return round(self._sum / max(1, len(self._tokens))) if tokens is None else tokens

    def state_dict(self) -> dict[str, int]:
        """Plain, for JSON: tokens by prompt."""
        return dict(self._tokens)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Take up what :meth:`state_dict` gave, in the place of what is here."""
        self._tokens, self._sum = OrderedDict(), 0
        for prompt, tokens in state.items():
            self.tell(prompt, int(tokens))
