"""Routing replay (R3): the experts that computed the tokens of a sample, over all its requests and turns.

A request returns the experts of its prompt and of all its tokens but the last. It computes the text of earlier requests
and turns again, under the weights that its engine has by then. Training replays the experts of the weights that sampled
each token: of each text the first request's are kept. Those of a prompt's last token drew the first token of the
answer, so they are never an earlier turn's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from verl_rhyme.agent_loop.session import Session, Turn


class TurnRoutes:
    """The experts of one turn and of what it answers; ``prompt`` has all tokens before the turn.

    It drops a turn of an earlier attempt whose experts are not known: the turn is generated again.
    """

    def __init__(self, session: Session, turn: Turn, prompt: Sequence[int]) -> None:
        self._session, self._turn, self._prompt = session, turn, prompt
        self._known = np.zeros(0, dtype=np.uint8)  # of the prompt's beginning that an earlier turn has computed
        wanted = np.asarray(prompt[:-1], dtype=np.int32)
        for text, experts in session.routes:
            length = _common(text[:-1], wanted)
            if length > len(self._known):
                self._known = experts[:length]
        if turn.tokens and (turn.routes is None or self._end - len(turn.routes) > len(self._known)):
            turn.drop()

    @property
    def _end(self) -> int:
        return len(self._prompt) + len(self._turn.tokens) - 1

    @property
    def begin(self) -> int:
        """Number of tokens whose experts the next request need not return."""
        return self._end if self._turn.tokens else len(self._known)

    def of(self, output: Any) -> np.ndarray | None:
        """Return the experts that came with the next tokens of the turn, in verl's ``TokenOutput``. Raise ValueError if
        they are of fewer or more tokens, or none."""
        if not output.token_ids:
            return None
        found, expected = output.routed_experts, self._end + len(output.token_ids) - self.begin
        if found is None or len(found) != expected:
            raise ValueError(
                f"{self._session.deadline.where}: the rollout server returned the experts of "
                f"{0 if found is None else len(found)} tokens instead of {expected}, so training cannot replay them; "
                "set actor_rollout_ref.rollout.enable_rollout_routing_replay=false"
            )
        if found.shape[-1] > 1 and not found[-1].any():  # the choices of a token differ
            raise ValueError(
                f"{self._session.deadline.where}: the rollout engine reports no experts (all are 0): some kernels, as "
                "FlashInfer's on Blackwell, choose them unseen by vLLM; set "
                "+actor_rollout_ref.rollout.engine_kwargs.vllm.moe_backend=triton"
            )
        return np.array(found)  # a view would keep Ray's object of the whole answer

    def whole(self) -> np.ndarray | None:
        """Return the experts of the prompt and of all the turn's tokens but the last, for later turns as well; ``None``
        without any."""
        own = self._turn.routes
        if own is None:
            return self._known if len(self._known) else None
        known = self._known[: self._end - len(own)]
        experts = np.concatenate([known, own]) if len(known) else own
        text = np.array([*self._prompt, *self._turn.tokens], dtype=np.int32)
        others = [each for each in self._session.routes if _common(each[0], text) < len(each[0])]
        self._session.routes = [*others, (text, experts)]
        return experts


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """Return the number of tokens with which both begin."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(differ.argmax()) if differ.any() else length
