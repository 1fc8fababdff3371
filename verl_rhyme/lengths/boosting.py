"""Length forecasts by gradient boosting over plain features of a prompt: a cheap ranker without a language model.

It uses Friedman's gradient boosting (Annals of Statistics 2001), by scikit-learn, on prompts' mean log lengths. Trees
cannot extrapolate, and the longest responses belong to prompts of a kind seen rarely. So the trees fit the residuals of
a line: log length over the log of a prompt's tokens. Trees are kept as arrays, so that a saved model holds only numbers
and loading unpickles nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from verl_rhyme.lengths.pairs import Ints, Pairs, identity

Floats = npt.NDArray[np.float64]

#: Maximum number of token ids that are counted separately: those whose counts vary most; the others count together.
COUNTED = 256
_RATE, _FEATURES = 0.05, 0.5
#: Small trees, stopped early on held-out prompts, since prompts are few.
_GROWN = {
    "n_estimators": 400,
    "n_iter_no_change": 10,
    "validation_fraction": 0.15,
    "max_depth": 3,
    "min_samples_leaf": 10,
    "subsample": 0.5,
}
#: File of a saved model.
FILE = "boosting.safetensors"
_NODES = ("left", "right", "feature", "threshold", "value")


class Boosting:
    """Boosted trees; see the module. :meth:`fit` makes an instance.

    Attributes:
        trained: Prompts it was trained on (:func:`~.pairs.identity`).
    """

    def __init__(
        self,
        counted: npt.NDArray[np.int64],
        trees: list[dict[str, npt.NDArray]],
        line: tuple[float, float],
        trained: frozenset[int],
    ) -> None:
        self._counted, self._trees, self._line, self.trained = counted, trees, line, trained

    @classmethod
    def fit(cls, pairs: Pairs, seed: int = 0) -> Boosting:
        """Train on known prompts, each weighted by its number of responses."""
        counted = _varying(pairs.prompts)
        weights = np.array([len(lengths) for lengths in pairs.lengths], dtype=np.float64)
        line = _line(_sizes(pairs.prompts), pairs.locations, weights)
        left = pairs.locations - _along(line, pairs.prompts)
        model = grown(features(pairs.prompts, counted), left, weights, seed)
        of_model = [estimator.tree_ for estimator in model.estimators_[:, 0]]
        trees = [
            {
                "left": tree.children_left.astype(np.int32),
                "right": tree.children_right.astype(np.int32),
                "feature": tree.feature.astype(np.int32),
                "threshold": tree.threshold,
                "value": _RATE * tree.value[:, 0, 0],
            }
            for tree in of_model
        ]
        return cls(counted, trees, line, frozenset(map(identity, pairs.prompts)))

    def expected(self, prompts: Sequence[Ints]) -> Floats:
        """Return float64[B], as :meth:`scores`."""
        return self.scores(prompts)

    def scores(self, prompts: Sequence[Ints]) -> Floats:
        """Return float64[B], expected mean log length of each prompt's responses."""
        # float32, as scikit-learn compares them
        columns = features(prompts, self._counted).astype(np.float32)
        total, rows = _along(self._line, prompts), np.arange(len(prompts))
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
        about = {"line": np.array(self._line), "trained": np.array(sorted(self.trained), dtype=np.int64)}
        save_file({**joined, "sizes": sizes, "counted": self._counted, **about}, folder / FILE)

    @classmethod
    def load(cls, folder: Path) -> Boosting:
        """Load a saved model.

        Raises:
            ValueError: The file is missing or invalid.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        file = folder / FILE
        try:
            kept = load_file(file)
            cuts = np.cumsum(kept["sizes"])[:-1]
            parts = {name: np.split(kept[name], cuts) for name in _NODES}
            trees = [{name: parts[name][i] for name in _NODES} for i in range(len(kept["sizes"]))]
            slope, at_one = kept["line"].tolist()
            return cls(kept["counted"], trees, (slope, at_one), frozenset(kept["trained"].tolist()))
        except (OSError, ValueError, SafetensorError, KeyError, IndexError) as error:
            raise ValueError(f"{file} holds no boosted trees of a length ranker: {error}") from error


def grown(rows: Floats, wanted: Floats, weights: Floats | None, seed: int) -> Any:
    """Return scikit-learn's model of float64[B] targets by float64[B, F] features, with small trees for few prompts."""
    from sklearn.ensemble import GradientBoostingRegressor

    kept = {"learning_rate": _RATE, "max_features": _FEATURES, **_GROWN}
    return GradientBoostingRegressor(**kept, init="zero", random_state=seed).fit(rows, wanted, sample_weight=weights)


def features(prompts: Sequence[Ints], counted: npt.NDArray[np.int64]) -> Floats:
    """Return float64[B, len(counted) + 6], features of prompts.

    They are: the count of each counted token; the number of tokens, of distinct tokens, and of uncounted tokens; the
    count of the most frequent token; the entropy of the counts; and the first position of the last token.
    """
    rows = np.zeros((len(prompts), len(counted) + 6))
    for row, prompt in zip(rows, prompts, strict=True):
        ids, counts = np.unique(prompt, return_counts=True)
        if len(counted):
            at = np.minimum(np.searchsorted(counted, ids), len(counted) - 1)
            found = counted[at] == ids
            row[at[found]] = counts[found]
        share = counts / counts.sum()
        summary = len(prompt), len(ids), len(prompt) - row.sum(), counts.max(), -(share * np.log(share)).sum()
        row[-6:-1] = summary
        row[-1] = np.flatnonzero(prompt == prompt[-1])[0]
    return rows


def _sizes(prompts: Sequence[Ints]) -> Floats:
    """Return float64[B], log of the number of tokens."""
    return np.log([len(prompt) for prompt in prompts])


def _line(sizes: Floats, locations: Floats, weights: Floats) -> tuple[float, float]:
    """Return slope and intercept by least squares; slope 0 where all prompts have the same size."""
    if np.ptp(sizes) < 1e-9:
        return 0.0, float(np.average(locations, weights=weights))
    slope, height = np.polyfit(sizes, locations, 1, w=np.sqrt(weights))
    return float(slope), float(height)


def _along(line: tuple[float, float], prompts: Sequence[Ints]) -> Floats:
    return line[1] + line[0] * _sizes(prompts)


def _varying(prompts: Sequence[Ints]) -> npt.NDArray[np.int64]:
    """Return int64, ascending: the token ids whose counts vary most between prompts."""
    ids, place = np.unique(np.concatenate(prompts), return_inverse=True)
    of = np.repeat(np.arange(len(prompts)), [len(prompt) for prompt in prompts])
    cells, counts = np.unique(of * len(ids) + place, return_counts=True)
    token = cells % len(ids)
    mean = np.bincount(token, counts, minlength=len(ids)) / len(prompts)
    variance = np.bincount(token, counts.astype(np.float64) ** 2, minlength=len(ids)) / len(prompts) - mean**2
    chosen = np.argsort(-variance, kind="stable")[:COUNTED]
    return np.sort(ids[chosen[variance[chosen] > 1e-12]]).astype(np.int64)
