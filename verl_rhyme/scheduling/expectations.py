"""What is expected of prompts that are about to be answered: the length predictor, as a run's rollout goes on.

Of a prompt that is loaded it is known which one it is (its key, the same in every epoch), and then how long it is, and
how long each of its samples became, the latest attempt at it. When it leaves, these become the prompt's history. A pure
state machine; an error in it costs the expectation, never the rollout: who asks is told nothing then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from verl_rhyme.lengths.predictor import Forecast, LengthPredictor
from verl_rhyme.lengths.prompts import PromptLengths
from verl_rhyme.lengths.quality import Quality

T = TypeVar("T")

#: What is known is worth telling again when so many of its prompts have been learnt from since: telling costs by all.
_TOLD_AGAIN = 1 / 16
#: Of prompts without a key; nothing is ever learnt of it.
_NOBODY = ""


class Expectations:
    """See the module.

    Args:
        limit: Tokens a response can have.

    Attributes:
        predictor: What is known of lengths.
        prompts: What is known of those of prompts.
        errors: Calls that failed.
        last_error: The latest of them, in words.
    """

    def __init__(self, limit: int) -> None:
        self.predictor = LengthPredictor(limit)
        self.prompts = PromptLengths()
        self.errors, self.last_error = 0, ""
        self._quality = Quality()
        self._keys: dict[str, str] = {}
        self._lengths: dict[str, dict[int, int]] = {}
        self._untold = 0  # prompts that were learnt from since what is known was told

    def hand(self, keys: Mapping[str, str]) -> dict[str, float]:
        """Prompts come, by uid; an empty key is of one that nobody knows.

        Returns:
            Tokens that a response of each is expected to have.
        """
        return self._try(partial(self._hand, keys), {})

    def rank(self, locations: Mapping[str, float], ranker: int) -> dict[str, float]:
        """A ranker, by its number, expects these log lengths of responses to prompts, by key.

        Returns:
            As :meth:`hand`, of those that are here.
        """

        def ranked() -> dict[str, float]:
            for key, location in locations.items():
                self.predictor.rank(key, location, ranker)
            here = {uid: key for uid, key in self._keys.items() if key in locations}
            return self._expected(here) if here else {}

        return self._try(ranked, {})

    def lengths(self, uids: Sequence[str], emitted: Sequence[int]) -> Forecast | None:
        """How long responses to these prompts that have so many tokens will be; ``None`` where that cannot be told."""

        def forecast() -> Forecast:
            # One without a key is no sibling of others without; a prompt with one may be here twice.
            keys = {uid: self._keys.get(uid) or f"{_NOBODY} {i}" for i, uid in enumerate(dict.fromkeys(uids))}
            ended: dict[str, list[int]] = {}
            for uid, key in keys.items():
                ended.setdefault(key, []).extend(self._lengths.get(uid, {}).values())
            return self.predictor.forecast([keys[uid] for uid in uids], emitted, ended)

        return self._try(forecast, None)

    def prompted(self, uid: str, tokens: int) -> None:
        """A prompt has so many tokens."""
        if key := self._keys.get(uid, _NOBODY):
            self.prompts.tell(key, tokens)

    def prompt_tokens(self, uids: Sequence[str]) -> list[int]:
        """Of these prompts; 0 where nothing is known."""
        return [self.prompts.of(self._keys.get(uid, _NOBODY)) for uid in uids]

    def generated(self, uid: str, number: int, tokens: int) -> None:
        """A sample came to its end; what an earlier attempt at it had counts no more. Without tokens it tells nothing:
        its agent loop may have dropped them."""
        if uid in self._lengths and tokens:
            self._lengths[uid][number] = tokens

    def keep(self, needed: Callable[[str], bool]) -> dict[str, list[int]]:
        """Prompts that are not needed any more have left, whether all their samples came to their end or not.

        Returns:
            Tokens of their samples that did, by key: of trained prompts, and of those that were filtered or failed, if
            only none.
        """
        answered: dict[str, list[int]] = {}
        for uid in [uid for uid in self._keys if not needed(uid)]:
            key, lengths = self._keys.pop(uid), self._lengths.pop(uid)
            self._try(partial(self._learn, key, lengths), None)
            if key != _NOBODY:
                answered.setdefault(key, []).extend(lengths.values())
        return answered

    def measures(self) -> dict[str, float]:
        """How good forecasts were, of the groups that left since the last call (:class:`Quality`)."""
        return self._try(self._quality.take, {})

    @property
    def under_way(self) -> dict[str, Any]:
        """Of the prompts that are here: key, and the number and tokens of each sample that ended. JSON."""
        return {uid: [key, list(self._lengths[uid].items())] for uid, key in self._keys.items()}

    def resume(self, under_way: Mapping[str, Any], needed: Callable[[str], bool]) -> dict[str, float]:
        """Take up what :attr:`under_way` told, as far as it is needed; answers as :meth:`hand`."""

        def resumed() -> dict[str, float]:
            known = {uid: (str(key), lengths) for uid, (key, lengths) in under_way.items() if needed(uid)}
            expected = self._hand({uid: key for uid, (key, _) in known.items()})
            for uid, (_, lengths) in known.items():
                self._lengths[uid] = {int(number): int(tokens) for number, tokens in lengths}
            return expected

        return self._try(resumed, {})

    def state_dict(self) -> dict[str, Any]:
        """Plain, for JSON: what is known of lengths, without the prompts that are here."""
        self._untold = 0
        return self._try(lambda: {**self.predictor.state_dict(), "prompt_tokens": self.prompts.state_dict()}, {})

    def news(self) -> dict[str, Any] | None:
        """As :meth:`state_dict`, if much has been learnt since that was last asked for."""
        return self.state_dict() if self._untold > _TOLD_AGAIN * len(self.predictor) else None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what :meth:`state_dict` gave; what cannot be read is as if it had not been there."""
        self._try(lambda: self.predictor.load_state_dict(state), None)
        self._try(lambda: self.prompts.load_state_dict(state.get("prompt_tokens", {})), None)  # older states have none

    # ---- within ----

    def _hand(self, keys: Mapping[str, str]) -> dict[str, float]:
        for uid, key in keys.items():
            self._keys[uid] = key
            self._lengths.setdefault(uid, {})
        return self._expected(keys)

    def _expected(self, keys: Mapping[str, str]) -> dict[str, float]:
        """Tokens of a response to each prompt before it begins, by uid."""
        expected = self.predictor.forecast(list(keys.values())).expected.astype(float)
        return dict(zip(keys, expected.tolist(), strict=True))

    def _learn(self, key: str, lengths: Mapping[int, int]) -> None:
        if key == _NOBODY or not lengths:
            return
        tokens, predictor = list(lengths.values()), self.predictor
        expected = float(predictor.forecast([key]).expected[0])
        self._quality.add(expected, tokens, predictor.knows(key), predictor.ranked(key))
        predictor.learn(key, tokens)
        self._untold += 1

    def _try(self, what: Callable[[], T], otherwise: T) -> T:
        try:
            return what()
        except Exception as error:
            self.errors += 1
            self.last_error = f"{type(error).__name__}: {error}"
            return otherwise
