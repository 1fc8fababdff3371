"""The length ranker of a run: a process of low priority that trains on finished prompts and scores new ones.

No process waits for it: prompts that start before their score count as unknown.
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
#: Number of announced prompts that are kept until their answers come.
_ANNOUNCED = 1 << 16
#: Number of prompts that the ranker is trained on, the latest ones.
_MOST = 8192
#: Passes over the pairs when a trained model is trained again.
_EPOCHS_AGAIN = 3


class RankerService:
    """Training and serving of a length ranker; its methods may be called from several threads.

    Args:
        config: Options of the ranker.
        encode: Function that returns the token ids of a prompt's messages.
        clock: Monotonic clock, in seconds.

    Attributes:
        number: Number of trainings, which identifies the serving ranker; 0 before the first.

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
        self._untrained = 0  # prompts that were answered since the last training
        self._new = False  # whether prompts without an earlier answer came since the last training
        self._trained_here = False
        self._ranker: Any = None
        self._lock, self._training = threading.Lock(), threading.Lock()
        if config.model is not None:
            from verl_rhyme.lengths import ranker

            if (Path(config.model) / ranker.ABOUT).is_file():
                self._ranker, self.number = ranker.load(Path(config.model)), 1

    def score(self, prompts: Mapping[str, Any]) -> tuple[dict[str, float], int]:
        """Announce prompts, as messages by key, and score them.

        Returns:
            Expected log lengths of prompts without an earlier answer, by key, and :attr:`number`.
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

    def score_waiting(self) -> tuple[dict[str, float], int]:
        """Return scores as :meth:`score` does, of the prompts announced and not answered yet."""
        with self._lock:
            announced = dict(self._announced)
        return self._expected(announced)

    def learn(self, lengths: Mapping[str, Sequence[int]]) -> bool:
        """Record the lengths of finished prompts; train if enough prompts are new.

        Nothing is trained while every announced prompt was answered before: its history predicts better.

        Args:
            lengths: Tokens of each response that ended, by prompt key.

        Returns:
            Whether a new ranker serves.
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
            how: dict[str, Any] = {"rate": of.rate / 2, "epochs": _EPOCHS_AGAIN}
        else:
            how = {"rate": of.rate}
            made = ranker.tiny_for(pairs) if config.model is None else ranker.from_folder(Path(config.model))
        began, allowed = self._clock(), 60 * config.minutes
        return ranker.fit(made, pairs, loss=of.loss, **how, gone=lambda: (self._clock() - began) / allowed)

    # ---- checkpoints ----

    def save(self, folder: Path) -> None:
        """Write the ranker and its pairs below a checkpoint's folder."""
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
        torn = top / f"{_ABOUT}.torn"  # renamed last: a checkpoint without this file has no ranker
        torn.write_text(about)
        torn.replace(top / _ABOUT)

    def restore(self, folder: Path) -> bool:
        """Restore what :meth:`save` wrote, except what was answered or trained in the meantime.

        Returns:
            ``False`` if the checkpoint has no ranker.

        Raises:
            ValueError: The files cannot be read.
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
            raise ValueError(f"{top}: the pairs of the length ranker cannot be read: {error}") from error
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
    """The service as a Ray actor, which sends its scores to the coordinator. Each call returns :attr:`number`.

    Args:
        config: Options of the ranker.
        tokenizer: Tokenizer of the policy.
        template: Options of its chat template (``data.apply_chat_template_kwargs``).
    """

    def __init__(self, config: RankerConfig, tokenizer: Any, template: Mapping[str, Any]) -> None:
        if config.kind == "model":
            import torch
            from transformers import AutoModel, LlamaModel  # noqa: F401  slow, and slower at the lowest priority
            from transformers.utils import logging as bars

            torch.set_num_threads(1)
            bars.disable_progress_bar()  # else bars of checkpoint loading appear in the run's log
        else:
            import sklearn.ensemble  # noqa: F401
        os.nice(19)  # before Ray makes its call threads: on Linux they inherit the priority

        def encode(messages: Any) -> Sequence[int]:
            return tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=False, **template
            )

        self._service = RankerService(config, encode)
        self._coordinator: Any = None

    def announce(self, prompts: Mapping[str, Any], coordinator: Any) -> int:
        """See :meth:`RankerService.score`."""
        self._coordinator = coordinator
        return self._push(*self._service.score(prompts))

    def learn(self, lengths: Mapping[str, Sequence[int]]) -> int:
        """See :meth:`RankerService.learn`."""
        return self._push(*self._service.score_waiting()) if self._service.learn(lengths) else self._service.number

    def save(self, folder: str) -> int:
        """See :meth:`RankerService.save`."""
        self._service.save(Path(folder))
        return self._service.number

    def restore(self, folder: str) -> int:
        """See :meth:`RankerService.restore`."""
        return (
            self._push(*self._service.score_waiting()) if self._service.restore(Path(folder)) else self._service.number
        )

    def _push(self, locations: dict[str, float], number: int) -> int:
        if locations and self._coordinator is not None:
            self._coordinator.rank.remote(locations, number)
        return number


def missing_requirement(config: RankerConfig, vocabulary: int | None) -> str:
    """Return what a ranker lacks to be trained or served, and how to fix it; empty if nothing.

    Args:
        config: Options of the ranker.
        vocabulary: Number of token ids of the policy's tokenizer, if known.
    """
    key = "lengths.ranker"
    if config.kind == "boosting":
        installed = importlib.util.find_spec("sklearn") is not None
        return "" if installed else f"{key}.kind=boosting needs scikit-learn: pip install scikit-learn or kind=model"
    if config.model is None:
        return ""
    folder = Path(config.model).expanduser()
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        return (
            f"{key}.model={config.model} is not a folder with config.json and *.safetensors: name such a folder on "
            "this machine, a ranker of `verl-rhyme ranker train`, or null to train a tiny model from scratch"
        )
    try:
        known = json.loads((folder / "config.json").read_text())
    except ValueError as error:
        return f"{key}.model={config.model} has a config.json that cannot be read ({error}): copy the model again"
    embedded = int(known.get("vocab_size") or (known.get("text_config") or {}).get("vocab_size") or 0)
    ranker = (folder / "ranker.json").is_file()  # small rankers fold larger ids on purpose
    if vocabulary and embedded and embedded < vocabulary and not ranker:
        return (
            f"{key}.model={config.model} has {embedded} token ids, the policy's tokenizer {vocabulary}: choose a "
            "model of the policy's family, or null"
        )
    return ""
