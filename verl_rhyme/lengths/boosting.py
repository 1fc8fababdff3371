"""Lengths by gradient boosting over plain features of a prompt: the cheap ranker, without a language model.

Friedman's gradient boosting (Annals of Statistics 2001) by scikit-learn, on the log of prompts' mean lengths. Its trees
are kept as arrays, so that a saved one is numbers and nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from verl_rhyme.lengths.pairs import Ints, Pairs, identity

Floats = npt.NDArray[np.float64]

#: Token ids that are counted each, those in the most prompts but not in all alike; all others count together.
COUNTED = 256
_RATE, _FEATURES = 0.05, 0.5
#: Small trees, and no more of them than help on a share of the prompts that is held out: prompts are few.
_GROWN = {
    "n_estimators": 400,
    "n_iter_no_change": 10,
    "validation_fraction": 0.15,
    "max_depth": 3,
    "min_samples_leaf": 10,
    "subsample": 0.5,
}
#: File of a saved one.
FILE = "boosting.safetensors"
_NODES = ("left", "right", "feature", "threshold", "value")


class Boosting:
    """See the module; :meth:`fit` makes one.

    Attributes:
        trained: Prompts it was trained on (:func:`~.pairs.identity`).
    """

    def __init__(
        self,
        counted: npt.NDArray[np.int64],
        trees: list[dict[str, npt.NDArray]],
        base: float,
        trained: frozenset[int],
    ) -> None:
        self._counted, self._trees, self._base, self.trained = counted, trees, base, trained

    @classmethod
    def fit(cls, pairs: Pairs, seed: int = 0) -> Boosting:
        """Learn from known prompts, each weighted by its responses."""
        from sklearn.ensemble import GradientBoostingRegressor

        counted = _telling(pairs.prompts)
        weights = np.array([len(lengths) for lengths in pairs.lengths], dtype=np.float64)
        logs = np.log(pairs.means)
        base = float(np.average(logs, weights=weights))
        model = GradientBoostingRegressor(
            learning_rate=_RATE, max_features=_FEATURES, init="zero", random_state=seed, **_GROWN
        ).fit(features(pairs.prompts, counted), logs - base, sample_weight=weights)
        grown = [estimator.tree_ for estimator in model.estimators_[:, 0]]
        trees = [
            {
                "left": tree.children_left.astype(np.int32),
                "right": tree.children_right.astype(np.int32),
                "feature": tree.feature.astype(np.int32),
                "threshold": tree.threshold,
                "value": _RATE * tree.value[:, 0, 0],
            }
            for tree in grown
        ]
        return cls(counted, trees, base, frozenset(map(identity, pairs.prompts)))

    def expected(self, prompts: Sequence[Ints]) -> Floats:
        """float64[B], as :meth:`scores`: above the mean of log lengths by what the predictor learns of it."""
        return self.scores(prompts)

    def scores(self, prompts: Sequence[Ints]) -> Floats:
        """float64[B], log of the mean length that each prompt's responses are expected to have."""
        # float32, as scikit-learn compares them
        columns = features(prompts, self._counted).astype(np.float32)
        total, rows = np.full(len(prompts), self._base), np.arange(len(prompts))
        for tree in self._trees:
            node = np.zeros(len(prompts), dtype=np.int64)
            while (inner := tree["left"][node] >= 0).any():
                below = columns[rows, np.maximum(tree["feature"][node], 0)] <= tree["threshold"][node]
                node = np.where(inner, np.where(below, tree["left"][node], tree["right"][node]), node)
            total += tree["value"][node]
        return total

    def save(self, folder: Path) -> None:
        """Write :data:`FILE`."""
        from safetensors.numpy import save_file

        folder.mkdir(parents=True, exist_ok=True)

        joined = {name: np.concatenate([tree[name] for tree in self._trees]) for name in _NODES}
        sizes = np.array([len(tree["left"]) for tree in self._trees], dtype=np.int64)
        about = {"base": np.array([self._base]), "trained": np.array(sorted(self.trained), dtype=np.int64)}
        save_file({**joined, "sizes": sizes, "counted": self._counted, **about}, folder / FILE)

    @classmethod
    def load(cls, folder: Path) -> Boosting:
        """Read what :meth:`save` wrote.

        Raises:
            ValueError: It is something else.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        file = folder / FILE
        try:
            kept = load_file(file)
            cuts = np.cumsum(kept["sizes"])[:-1]
            parts = {name: np.split(kept[name], cuts) for name in _NODES}
            trees = [{name: parts[name][i] for name in _NODES} for i in range(len(kept["sizes"]))]
            return cls(kept["counted"], trees, float(kept["base"][0]), frozenset(kept["trained"].tolist()))
        except (OSError, SafetensorError, KeyError, IndexError) as error:
            raise ValueError(f"{file}: no boosted trees of a length ranker: {error}") from error


def features(prompts: Sequence[Ints], counted: npt.NDArray[np.int64]) -> Floats:
    """float64[B, len(counted) + 6]: how often each counted token is there; of all tokens how many there are, how many
    differ, how many are not counted, the most frequent one's count, how even the counts are (their entropy); and where
    the last token came first."""
    rows = np.zeros((len(prompts), len(counted) + 6))
    for row, prompt in zip(rows, prompts, strict=True):
        ids, counts = np.unique(prompt, return_counts=True)
        if len(counted):
            at = np.minimum(np.searchsorted(counted, ids), len(counted) - 1)
            found = counted[at] == ids
            row[at[found]] = counts[found]
        share = counts / counts.sum()
        told = len(prompt), len(ids), len(prompt) - row.sum(), counts.max(), -(share * np.log(share)).sum()
        row[-6:-1] = told
        row[-1] = np.flatnonzero(prompt == prompt[-1])[0]
    return rows


def _telling(prompts: Sequence[Ints]) -> npt.NDArray[np.int64]:
    """int64, ascending: the token ids whose counts differ most between prompts."""
    ids, place = np.unique(np.concatenate(prompts), return_inverse=True)
    of = np.repeat(np.arange(len(prompts)), [len(prompt) for prompt in prompts])
    cells, counts = np.unique(of * len(ids) + place, return_counts=True)
    token = cells % len(ids)
    mean = np.bincount(token, counts, minlength=len(ids)) / len(prompts)
    variance = np.bincount(token, counts.astype(np.float64) ** 2, minlength=len(ids)) / len(prompts) - mean**2
    chosen = np.argsort(-variance, kind="stable")[:COUNTED]
    return np.sort(ids[chosen[variance[chosen] > 1e-12]]).astype(np.int64)
