"""The length ranker beside a run: a process of low priority that is told what was answered, trains, and scores prompts.

Nothing waits for it: prompts that start before their score are taken for prompts of which nothing is known.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import logging
import os
import threading
import time
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
#: Prompts that it is trained on, the latest ones.
_MOST = 8192
#: Passes over the pairs when a model that was trained before is trained anew.
_EPOCHS_AGAIN = 3


class RankerService:
    """See the module. Its methods may be called from several threads.

    Args:
        config: What is trained, and how often.
        encode: Token ids of a prompt's messages.
        clock: Seconds, of a clock that never goes back.

    Attributes:
        number: How often it was trained: which ranker serves. 0 before there is one.

    Raises:
        ValueError: ``config.model`` has a ranker that cannot be read.
    """

    def __init__(
        self,
        config: RankerConfig,
        encode: Callable[[Any], Sequence[int]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.number = 0
        self._config, self._encode, self._clock = config, encode, clock
        self._announced: OrderedDict[str, Ints] = OrderedDict()
        self._pairs: OrderedDict[str, tuple[Ints, Ints]] = OrderedDict()
        self._untrained = 0  # prompts that were answered since
        self._new = False  # prompts came since that were never answered
        self._trained_here = False
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
            unknown = [key for key in prompts if key not in self._pairs]
        encoded = {key: np.asarray(self._encode(prompts[key]), dtype=np.int32) for key in unknown}
        encoded = {key: ids for key, ids in encoded.items() if len(ids)}
        with self._lock:
            self._announced |= encoded
            self._new = self._new or bool(encoded)
            while len(self._announced) > _ANNOUNCED:
                self._announced.popitem(last=False)
        return self._expected(encoded)

    def waiting(self) -> tuple[dict[str, float], int]:
        """As :meth:`score`, of those that were announced and not answered yet: another ranker serves."""
        with self._lock:
            announced = dict(self._announced)
        return self._expected(announced)

    def learn(self, lengths: Mapping[str, Sequence[int]]) -> bool:
        """Prompts have left, by key, with so many tokens each response that came to its end; trains if there is enough
        that is new, and somebody to ask.

        Where every prompt that comes was answered before, nobody asks: history tells more than any ranker.

        Returns:
            Whether it was trained: another ranker serves now.
        """
        with self._lock:
            for key, of in lengths.items():
                ids = self._announced.pop(key, None)
                if len(of) and key in self._pairs:
                    ids = self._pairs.pop(key)[0]
                if ids is None or not len(of):
                    continue
                self._pairs[key] = ids, np.maximum(np.asarray(of, dtype=np.int32), 1)
                self._untrained += 1
            while len(self._pairs) > _MOST:
                self._pairs.popitem(last=False)
            due = self._untrained >= self._config.refresh and self._new
        if not due or not self._training.acquire(blocking=False):
            return False
        try:
            with self._lock:
                self._untrained, self._new = 0, bool(self._announced)
                pairs, before = Pairs(*map(list, zip(*self._pairs.values(), strict=True))), self._ranker
            ranker = self._trained(pairs, before)
            with self._lock:
                self._ranker, self.number, self._trained_here = ranker, self.number + 1, True
        finally:
            self._training.release()
        return True

    def _expected(self, encoded: Mapping[str, Ints]) -> tuple[dict[str, float], int]:
        with self._lock:
            ranker, number = self._ranker, self.number
        if ranker is None or not encoded:
            return {}, number
        expected: Floats = ranker.expected(list(encoded.values()))
        return dict(zip(encoded, expected.tolist(), strict=True)), number

    def _trained(self, pairs: Pairs, before: Any) -> Any:
        config = self._config
        if config.kind == "boosting":
            return boosting.Boosting.fit(pairs)
        from verl_rhyme.lengths import ranker

        of = config.training
        if before is not None:
            made = copy.deepcopy(before)
            how = ranker.Training(loss=of.loss, rate=of.rate / 2, epochs=_EPOCHS_AGAIN)
        else:
            how = ranker.Training(loss=of.loss, rate=of.rate)
            made = ranker.tiny_for(pairs) if config.model is None else ranker.from_folder(Path(config.model))
        began, allowed = self._clock(), 60 * config.minutes
        return ranker.fit(made, pairs, how, gone=lambda: (self._clock() - began) / allowed)

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
        about = json.dumps({"keys": list(pairs), "number": number, "kind": self._config.kind})
        torn = top / f"{_ABOUT}.torn"  # the last file, and whole: without it there is no ranker here
        torn.write_text(about)
        torn.replace(top / _ABOUT)

    def restore(self, folder: Path) -> bool:
        """Take up what :meth:`save` wrote; ``False`` where a checkpoint has none.

        What was answered, or trained, in the meantime stays.

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
            for key in pairs:
                self._announced.pop(key, None)
            self._pairs = OrderedDict({**pairs, **self._pairs})
            if ranker is None:
                self._untrained = len(self._pairs)
            elif not self._trained_here:
                self._ranker, self.number = ranker, number
        return True


class RankerActor:
    """The service as a Ray actor, which tells the coordinator what it expects. Each call returns :attr:`number`.

    Args:
        config: See :class:`RankerService`.
        tokenizer: The policy's.
        template: Options of its chat template (``data.apply_chat_template_kwargs``).
    """

    def __init__(self, config: RankerConfig, tokenizer: Any, template: Mapping[str, Any]) -> None:
        if config.kind == "model":
            import torch
            from transformers import AutoModel, LlamaModel  # noqa: F401  seconds, more at the lowest priority
            from transformers.utils import logging as bars

            torch.set_num_threads(1)
            bars.disable_progress_bar()  # of a checkpoint's files, in the run's log
        else:
            import sklearn.ensemble  # noqa: F401
        os.nice(19)  # before Ray makes the threads that calls run on: on Linux they inherit it

        def encode(messages: Any) -> Sequence[int]:
            return tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=False, **template
            )

        self._service = RankerService(config, encode)
        self._coordinator: Any = None

    def announce(self, prompts: Mapping[str, Any], coordinator: Any) -> int:
        """See :meth:`RankerService.score`."""
        self._coordinator = coordinator
        return self._tell(*self._service.score(prompts))

    def learn(self, lengths: Mapping[str, Sequence[int]]) -> int:
        """See :meth:`RankerService.learn`."""
        return self._tell(*self._service.waiting()) if self._service.learn(lengths) else self._service.number

    def save(self, folder: str) -> int:
        """See :meth:`RankerService.save`."""
        self._service.save(Path(folder))
        return self._service.number

    def restore(self, folder: str) -> int:
        """See :meth:`RankerService.restore`."""
        return self._tell(*self._service.waiting()) if self._service.restore(Path(folder)) else self._service.number

    def _tell(self, locations: dict[str, float], number: int) -> int:
        if locations and self._coordinator is not None:
            self._coordinator.rank.remote(locations, number)
        return number


def lacking(config: RankerConfig, vocabulary: int | None) -> str:
    """What is not there for a ranker to be trained or served, and how to mend it; empty: nothing.

    Args:
        config: Of a run.
        vocabulary: Token ids of the policy's tokenizer, if that is known.
    """
    key = "lengths.ranker"
    if config.kind == "boosting":
        installed = importlib.util.find_spec("sklearn") is not None
        return "" if installed else f"{key}.kind=boosting without scikit-learn: pip install scikit-learn, or kind=model"
    if config.model is None:
        return ""
    folder = Path(config.model).expanduser()
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        return (
            f"{key}.model={config.model} is no folder with config.json and *.safetensors: name one on this machine, or "
            "a ranker of `verl-rhyme ranker train`, or null for a tiny model from nothing"
        )
    try:
        known = json.loads((folder / "config.json").read_text())
    except ValueError as error:
        return f"{key}.model={config.model} has a config.json that cannot be read ({error}): copy the model anew"
    tells = int(known.get("vocab_size") or (known.get("text_config") or {}).get("vocab_size") or 0)
    ranker = (folder / "ranker.json").is_file()  # of a small one ids beyond are folded on purpose
    if vocabulary and tells and tells < vocabulary and not ranker:
        return (
            f"{key}.model={config.model} tells {tells} tokens apart, the policy's tokenizer {vocabulary}: take a "
            "model of the policy's family, or null"
        )
    return ""
