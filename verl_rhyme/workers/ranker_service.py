"""The length ranker beside a run: a process of low priority that is told what was answered, trains, and scores prompts.

Nothing waits for it: prompts that start before their score are taken for prompts of which nothing is known.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl_rhyme.config import RankerConfig
from verl_rhyme.lengths import boosting
from verl_rhyme.lengths.pairs import Floats, Ints, Pairs

logger = logging.getLogger(__name__)

#: Below a verl checkpoint folder ``global_step_N``.
FOLDER = "ranker"
_PAIRS, _ABOUT, _RANKER = "pairs.safetensors", "pairs.json", "model"
#: Prompts that are remembered from their announcement to their answers.
_ANNOUNCED = 1 << 16
#: Passes over the pairs when a model that was trained before is trained anew.
_EPOCHS_AGAIN = 3


class RankerService:
    """See the module. Its methods may be called from several threads.

    Args:
        config: What is trained, and how often.
        encode: Token ids of a prompt's messages.

    Attributes:
        number: How often it was trained: which ranker serves. 0 before there is one.
    """

    def __init__(self, config: RankerConfig, encode: Callable[[Any], Sequence[int]]) -> None:
        self.number = 0
        self._config, self._encode = config, encode
        self._announced: OrderedDict[str, Ints] = OrderedDict()
        self._pairs: OrderedDict[str, tuple[Ints, Ints]] = OrderedDict()
        self._untrained = 0  # prompts that were answered since
        self._ranker: Any = None
        self._lock, self._training = threading.Lock(), threading.Lock()
        if config.model is not None:
            from verl_rhyme.lengths import ranker

            if (Path(config.model) / ranker.ABOUT).is_file():
                self._ranker, self.number = ranker.load(Path(config.model)), 1

    def score(self, prompts: Mapping[str, Any]) -> tuple[dict[str, float], int]:
        """Prompts are announced.

        Args:
            prompts: Messages, by key.

        Returns:
            Log lengths to expect of those that were never answered, by key, and :attr:`number`.
        """
        with self._lock:
            new = [key for key in prompts if key not in self._pairs]
        encoded = {key: np.asarray(self._encode(prompts[key]), dtype=np.int32) for key in new}
        encoded = {key: ids for key, ids in encoded.items() if len(ids)}
        with self._lock:
            self._announced |= encoded
            while len(self._announced) > _ANNOUNCED:
                self._announced.popitem(last=False)
            ranker, number = self._ranker, self.number
        if ranker is None or not encoded:
            return {}, number
        expected: Floats = ranker.expected(list(encoded.values()))
        return dict(zip(encoded, expected.tolist(), strict=True)), number

    def learn(self, lengths: Mapping[str, Sequence[int]]) -> bool:
        """Prompts were answered, by key: so many tokens each; trains if there is enough that is new.

        Returns:
            Whether it was trained: another ranker serves now.
        """
        with self._lock:
            for key, of in lengths.items():
                known = self._pairs.pop(key, None)
                ids = self._announced.pop(key, None) if known is None else known[0]
                if ids is None or not len(of):
                    continue
                self._pairs[key] = ids, np.maximum(np.asarray(of, dtype=np.int32), 1)
                self._untrained += 1
            while len(self._pairs) > self._config.most:
                self._pairs.popitem(last=False)
            due = self._untrained >= self._config.refresh
        if not due or not self._training.acquire(blocking=False):
            return False
        try:
            with self._lock:
                self._untrained = 0
                pairs, before = Pairs(*map(list, zip(*self._pairs.values(), strict=True))), self._ranker
            ranker = self._trained(pairs, before)
            with self._lock:
                self._ranker, self.number = ranker, self.number + 1
        finally:
            self._training.release()
        return True

    def _trained(self, pairs: Pairs, before: Any) -> Any:
        config = self._config
        if config.kind == "boosting":
            return boosting.Boosting.fit(pairs)
        from verl_rhyme.lengths import ranker

        how = ranker.Training(loss=config.loss, rate=config.rate)
        if before is not None:
            how = ranker.Training(loss=config.loss, rate=config.rate / 2, epochs=_EPOCHS_AGAIN)
            return ranker.fit(copy.deepcopy(before), pairs, how)
        if config.model is not None:
            return ranker.fit(ranker.from_folder(Path(config.model)), pairs, how)
        return ranker.fit(ranker.tiny(1 + max(int(prompt.max()) for prompt in pairs.prompts)), pairs, how)

    # ---- checkpoints ----

    def save(self, folder: Path) -> None:
        """Write ranker and pairs below a checkpoint's folder."""
        from safetensors.numpy import save_file

        with self._lock:
            pairs, ranker, number = dict(self._pairs), self._ranker, self.number
        top = folder / FOLDER
        top.mkdir(parents=True, exist_ok=True)
        empty = np.zeros(0, dtype=np.int32)
        columns = {
            "prompts": np.concatenate([empty, *(ids for ids, _ in pairs.values())]),
            "lengths": np.concatenate([empty, *(of for _, of in pairs.values())]),
            "prompt_sizes": np.array([len(ids) for ids, _ in pairs.values()], dtype=np.int64),
            "length_sizes": np.array([len(of) for _, of in pairs.values()], dtype=np.int64),
        }
        save_file(columns, top / _PAIRS)
        if ranker is not None:
            ranker.save(top / _RANKER)
        (top / _ABOUT).write_text(json.dumps({"keys": list(pairs), "number": number, "kind": self._config.kind}))

    def restore(self, folder: Path) -> bool:
        """Take up what :meth:`save` wrote; ``False`` where a checkpoint has none.

        Raises:
            ValueError: It cannot be read.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        top = folder / FOLDER
        if not (top / _ABOUT).is_file():
            return False
        try:
            about = json.loads((top / _ABOUT).read_text())
            columns = load_file(top / _PAIRS)
            rows = [
                np.split(columns[name], np.cumsum(columns[sizes])[:-1])
                for name, sizes in (("prompts", "prompt_sizes"), ("lengths", "length_sizes"))
            ]
            pairs = OrderedDict(zip(about["keys"], zip(*rows, strict=True), strict=True)) if about["keys"] else {}
            kind, number = str(about["kind"]), int(about["number"])
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise ValueError(f"{top}: no pairs of a length ranker can be read: {error}") from error
        ranker: Any = None
        if number and kind == self._config.kind:
            if kind == "boosting":
                ranker = boosting.Boosting.load(top / _RANKER)
            else:
                from verl_rhyme.lengths import ranker as rankers

                ranker = rankers.load(top / _RANKER)
        with self._lock:
            self._pairs, self._ranker = OrderedDict(pairs), ranker
            self.number = number if ranker is not None else 0
            self._untrained = 0 if ranker is not None else len(pairs)
        return True


class RankerActor:
    """The service as a Ray actor, which tells the coordinator what it expects.

    Args:
        config: See :class:`RankerService`.
        tokenizer: The policy's.
        template: Options of its chat template (``data.apply_chat_template_kwargs``).
    """

    def __init__(self, config: RankerConfig, tokenizer: Any, template: Mapping[str, Any]) -> None:
        os.nice(19)
        if config.kind == "model":
            import torch

            torch.set_num_threads(1)

        def encode(messages: Any) -> Sequence[int]:
            return tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=False, **template
            )

        self._service = RankerService(config, encode)

    def announce(self, prompts: Mapping[str, Any], coordinator: Any) -> None:
        """See :meth:`RankerService.score`."""
        locations, number = self._service.score(prompts)
        if locations:
            coordinator.rank.remote(locations, number)

    def learn(self, lengths: Mapping[str, Sequence[int]]) -> int:
        """See :meth:`RankerService.learn`; how often it was trained."""
        self._service.learn(lengths)
        return self._service.number

    def save(self, folder: str) -> None:
        """See :meth:`RankerService.save`."""
        self._service.save(Path(folder))

    def restore(self, folder: str) -> bool:
        """See :meth:`RankerService.restore`."""
        return self._service.restore(Path(folder))
