"""What is expected of prompts that are about to be answered: the length predictor, as a run's rollout goes on.

Of a prompt that is loaded it is known which one it is (its key, the same in every epoch) and how many responses it is
to have. When all are there, or it has left, they become the prompt's history. A pure state machine; an error in it
costs the expectation, never the rollout: who asks is told nothing then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

from verl_rhyme.lengths.predictor import LengthPredictor
from verl_rhyme.lengths.quality import Quality

T = TypeVar("T")


class Expectations:
    """See the module.

    Args:
        limit: Tokens a response can have.

    Attributes:
        predictor: What is known of lengths.
        errors: Calls that failed.
        last_error: The latest of them, in words.
    """

    def __init__(self, limit: int) -> None:
        self.predictor = LengthPredictor(limit)
        self.errors, self.last_error = 0, ""
        self._quality = Quality()
        self._keys: dict[str, str] = {}
        self._left: dict[str, int] = {}

    def hand(self, prompts: Iterable[tuple[str, int]], keys: Mapping[str, str]) -> dict[str, float]:
        """Prompts come: uid and responses wanted, and the key of each uid; one without a key is known to nobody.

        Returns:
            Tokens that a response of each is expected to have.
        """

        def handed() -> dict[str, float]:
            uids = []
            for uid, samples in prompts:
                self._keys[uid], self._left[uid] = keys.get(uid) or uid, samples
                uids.append(uid)
            expected = self.predictor.forecast([self._keys[uid] for uid in uids]).mean()
            return dict(zip(uids, expected.tolist(), strict=True))

        return self._try(handed, {})

    @property
    def keys(self) -> dict[str, str]:
        """Of the prompts that are here, by uid."""
        return {uid: key for uid, key in self._keys.items() if key != uid}

    def generated(self, uid: str, tokens: int) -> None:
        """A response came to its end."""
        self._try(lambda: self._generated(uid, tokens), None)

    def keep(self, needed: Callable[[str], bool]) -> None:
        """Prompts that are not needed any more have left, whether all their responses came or not."""
        for uid in [uid for uid in self._keys if not needed(uid)]:
            self._try(partial(self._close, uid), None)

    def measures(self) -> dict[str, float]:
        """How good forecasts were, of the groups that were completed since the last call (:class:`Quality`)."""
        return self._try(self._quality.take, {})

    def state_dict(self) -> dict[str, Any]:
        """Plain, for JSON: what is known of lengths. Of prompts under way nothing."""
        return self.predictor.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what :meth:`state_dict` gave; what cannot be read is as if it had not been there."""
        self._try(lambda: self.predictor.load_state_dict(state), None)

    # ---- within ----

    def _generated(self, uid: str, tokens: int) -> None:
        key = self._keys.get(uid)
        if key is None:
            return
        self.predictor.ended(key, tokens)
        self._left[uid] -= 1
        if not self._left[uid]:
            self._close(uid)

    def _close(self, uid: str) -> None:
        key = self._keys.pop(uid)
        del self._left[uid]
        if (learnt := self.predictor.close(key)) is not None:
            self._quality.add(learnt)

    def _try(self, what: Callable[[], T], otherwise: T) -> T:
        try:
            return what()
        except Exception as error:
            self.errors += 1
            self.last_error = f"{type(error).__name__}: {error}"
            return otherwise
