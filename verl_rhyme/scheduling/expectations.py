"""Expected lengths of a run's responses: the length predictor, fed by the rollout.

A loaded prompt has a key, the same in every epoch. Its length and the lengths of its samples (of the latest attempts)
follow. When the prompt leaves, these lengths become the prompt's history. The class is a pure state machine. An error
costs only the expectation, never the rollout: the caller then gets no value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from verl_rhyme.lengths.predictor import Forecast, LengthPredictor, PromptLengths
from verl_rhyme.lengths.quality import Quality

#: Key of prompts without a key; no history is kept for it.
_NO_KEY = ""


class Expectations:
    """Expected lengths of responses of at most ``limit`` tokens."""

    def __init__(self, limit: int) -> None:
        self.predictor = LengthPredictor(limit)
        self.prompts = PromptLengths()
        self.errors, self.last_error = 0, ""  # number of failed calls, and type and text of the latest
        self._quality = Quality()
        self._keys: dict[str, str] = {}
        self._lengths: dict[str, dict[int, int]] = {}

    def add_prompts(self, keys: Mapping[str, str]) -> dict[str, float]:
        """Add prompts, by uid their key (empty without one); return their expected response tokens."""
        self._keys.update(keys)
        for uid in keys:
            self._lengths.setdefault(uid, {})
        return self._expected(keys)

    def rank(self, locations: Mapping[str, float]) -> dict[str, float]:
        """Take in a ranker's expected log lengths by key; return expected response tokens of these prompts by uid."""
        with self._errors_counted():
            for key, location in locations.items():
                self.predictor.rank(key, location)
        return self._expected({uid: key for uid, key in self._keys.items() if key in locations})

    def lengths(self, uids: Sequence[str], emitted: Sequence[int]) -> Forecast | None:
        """Return the forecast of responses that have ``emitted`` tokens; ``None`` after an error."""
        with self._errors_counted():
            # Prompts without a key are no siblings; a prompt with a key may be present twice.
            keys = {uid: self._keys.get(uid) or f"{_NO_KEY} {i}" for i, uid in enumerate(dict.fromkeys(uids))}
            ended: dict[str, list[int]] = {}
            for uid, key in keys.items():
                ended.setdefault(key, []).extend(self._lengths.get(uid, {}).values())
            return self.predictor.forecast([keys[uid] for uid in uids], emitted, ended)
        return None

    def set_prompt_tokens(self, uid: str, tokens: int) -> None:
        if key := self._keys.get(uid, _NO_KEY):
            self.prompts.record(key, tokens)

    def prompt_tokens(self, uids: Sequence[str]) -> list[int]:
        """Return the tokens of prompts; 0 where unknown."""
        return [self.prompts.expected(self._keys.get(uid, _NO_KEY)) for uid in uids]

    def generated(self, uid: str, number: int, tokens: int) -> None:
        """Record the tokens of a finished response; zero is ignored, since the agent loop may have dropped it."""
        if uid in self._lengths and tokens:
            self._lengths[uid][number] = tokens

    def retain(self, needed: Callable[[str], bool]) -> None:
        """Remove the prompts that are not needed any more, and learn their lengths."""
        for uid in [uid for uid in self._keys if not needed(uid)]:
            key, lengths = self._keys.pop(uid), list(self._lengths.pop(uid).values())
            if lengths and key != _NO_KEY:
                with self._errors_counted():
                    self._learn(key, lengths)

    def measures(self) -> dict[str, float]:
        """Return the quality of forecasts for the groups removed since the last call (:class:`Quality`)."""
        with self._errors_counted():
            return self._quality.pop_metrics()
        return {}

    @property
    def prompt_state(self) -> dict[str, Any]:
        """Present prompts, for JSON: key, and number and tokens of each ended sample."""
        return {uid: [key, list(self._lengths[uid].items())] for uid, key in self._keys.items()}

    def restore_prompts(self, state: Mapping[str, Any], needed: Callable[[str], bool]) -> dict[str, float]:
        """Restore the needed prompts of a :attr:`prompt_state`; return as :meth:`add_prompts`."""
        with self._errors_counted():
            known = {uid: (str(key), lengths) for uid, (key, lengths) in state.items() if needed(uid)}
            expected = self.add_prompts({uid: key for uid, (key, _) in known.items()})
            for uid, (_, lengths) in known.items():
                self._lengths[uid] = {int(number): int(tokens) for number, tokens in lengths}
            return expected
        return {}

    def pop_changes(self) -> dict[str, Any]:
        """Return the lengths learnt since the last call, for JSON, for :meth:`update` elsewhere."""
        with self._errors_counted():
            return {**self.predictor.pop_changes(), "prompt_tokens": self.prompts.pop_changes()}
        return {}

    def update(self, changes: Mapping[str, Any]) -> None:
        """Take over the :meth:`pop_changes` of an object that was equal to this one; unreadable parts are ignored."""
        with self._errors_counted():
            self.predictor.update(changes)
        with self._errors_counted():
            self.prompts.update(changes.get("prompt_tokens", {}))

    def state_dict(self) -> dict[str, Any]:
        """Return the known lengths for JSON, without the present prompts."""
        with self._errors_counted():
            return {**self.predictor.state_dict(), "prompt_tokens": self.prompts.state_dict()}
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Unreadable parts are ignored."""
        with self._errors_counted():
            self.predictor.load_state_dict(state)
        with self._errors_counted():
            self.prompts.load_state_dict(state.get("prompt_tokens", {}))

    # ---- within ----

    def _expected(self, keys: Mapping[str, str]) -> dict[str, float]:
        with self._errors_counted():
            expected = self.predictor.forecast(list(keys.values())).expected.astype(float)
            return dict(zip(keys, expected.tolist(), strict=True))
        return {}

    def _learn(self, key: str, tokens: list[int]) -> None:
        predictor = self.predictor
        expected = float(predictor.forecast([key]).expected[0])
        self._quality.add(expected, tokens, predictor.knows(key), predictor.ranked(key))
        predictor.learn(key, tokens)

    @contextmanager
    def _errors_counted(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.errors += 1
            self.last_error = f"{type(error).__name__}: {error}"
