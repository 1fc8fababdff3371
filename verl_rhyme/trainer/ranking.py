"""The trainer's hand on the length ranker: it tells what is loaded and what was answered, and waits for nothing.

Whatever fails costs the ranker's word: it is counted, the first failure is a warning, and forecasts go on without.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from verl_rhyme.config import RankerConfig
from verl_rhyme.observability import metrics as names
from verl_rhyme.observability.errors import first_line
from verl_rhyme.scheduling.attempts import Attempt
from verl_rhyme.workers.ranker_service import RankerActor

logger = logging.getLogger(__name__)

#: Calls that may be under way; where it is behind by more, a step's are left out.
_UNDER_WAY = 64
#: Prompts whose key is remembered until they are answered.
_REMEMBERED = 1 << 17
#: Seconds that a checkpoint waits for it.
_SAVE_S = 60.0


class Ranking:
    """One for a run.

    Args:
        config: Of the run, ``enable`` true.
        tokenizer: The policy's.
        template: Options of its chat template.
        actor: In the place of one that is started here.
    """

    def __init__(self, config: RankerConfig, tokenizer: Any, template: Mapping[str, Any], actor: Any = None) -> None:
        self.failures, self.trained = 0, 0
        self._keys: OrderedDict[str, str] = OrderedDict()
        self._under_way: list[Any] = []
        # A thread more than calls that train: prompts are scored by the ranker before, meanwhile.
        options = {"num_cpus": 0, "max_concurrency": 4}
        self._actor = actor or ray.remote(RankerActor).options(**options).remote(config, tokenizer, dict(template))

    def loaded(self, prompts: Mapping[str, tuple[str, Any]], coordinator: Any) -> None:
        """Prompts are handed to the coordinator.

        Args:
            prompts: Key and messages, by uid; an empty key is of nobody.
            coordinator: Is told what is expected of them, as soon as that is known.
        """
        known = {uid: (key, messages) for uid, (key, messages) in prompts.items() if key}
        self._keys |= {uid: key for uid, (key, _) in known.items()}
        while len(self._keys) > _REMEMBERED:
            self._keys.popitem(last=False)
        self._tell("announce", dict(known.values()), coordinator)

    def answered(self, keys: Sequence[str], tags: Sequence[Mapping[str, Any]]) -> None:
        """An update batch: names of its trajectories, and what verl keeps of each."""
        lengths: dict[str, list[int]] = {}
        for name, tag in zip(keys, tags, strict=True):
            key = self._keys.get(Attempt.named(name.rpartition("_")[0]).uid)
            if key is not None and not tag.get("is_padding", False):
                lengths.setdefault(key, []).append(int(tag["response_len"]))
        self._tell("learn", lengths)

    def metrics(self) -> dict[str, float]:
        """How often it was trained, and what failed, as far as that is known."""
        self._look()
        failed = {names.RANKER_FAILURES: float(self.failures)} if self.failures else {}
        return {names.RANKER_TRAINED: float(self.trained), **failed}

    def save(self, folder: str) -> None:
        """With a checkpoint."""
        self._wait("save", folder)

    def restore(self, folder: str) -> None:
        """Of a checkpoint; what it lacks or what cannot be read is learnt anew."""
        self._wait("restore", folder)

    def close(self) -> None:
        ray.kill(self._actor)

    def _tell(self, method: str, what: Mapping[str, Any], *arguments: Any) -> None:
        self._look()
        if what and len(self._under_way) < _UNDER_WAY:
            self._under_way.append(getattr(self._actor, method).remote(what, *arguments))

    def _look(self) -> None:
        """At what came of calls, without waiting."""
        if not self._under_way:
            return
        done, self._under_way = ray.wait(self._under_way, num_returns=len(self._under_way), timeout=0)
        for call in done:
            try:
                self.trained = ray.get(call) or self.trained
            except Exception as error:
                self._failed(error)

    def _wait(self, method: str, folder: str) -> None:
        try:
            ray.get(getattr(self._actor, method).remote(folder), timeout=_SAVE_S)
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        if self.failures == 1:
            logger.warning("the length ranker failed, forecasts go on without it (told once): %s", first_line(error))
