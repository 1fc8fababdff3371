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

from verl_rhyme.lengths.calibration import fit_line
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

    Args:
        counted: int64[C], ascending, token ids that are counted separately.
        nodes: Arrays of all trees together, by name; ``left`` and ``right`` count within a tree.
        sizes: int64[T], number of nodes of each tree.
        line: Slope and intercept of log length over the log of a prompt's tokens.
        trained: Prompts it was trained on (:func:`~.pairs.identity`).
    """

    def __init__(
        self,
        counted: npt.NDArray[np.int64],
        nodes: dict[str, npt.NDArray],
        sizes: npt.NDArray[np.int64],
        line: tuple[float, float],
        trained: frozenset[int],
    ) -> None:
        if {len(nodes[name]) for name in _NODES} != {int(sizes.sum())}:
            raise ValueError("an incomplete tree")
        self._counted, self._nodes, self._sizes, self._line = counted, nodes, sizes, line
        self.trained = trained

    @classmethod
    def fit(cls, pairs: Pairs, seed: int = 0) -> Boosting:
        """Train on known prompts, each weighted by its number of responses."""
        counted = _varying(pairs.prompts)
        weights = np.array([len(lengths) for lengths in pairs.lengths], dtype=np.float64)
        line = fit_line(_sizes(pairs.prompts), pairs.locations, weights)
        left = pairs.locations - _along(line, pairs.prompts)
        model = grown(features(pairs.prompts, counted), left, weights, seed)
        trees = [estimator.tree_ for estimator in model.estimators_[:, 0]]
        nodes = {
            "left": np.concatenate([tree.children_left for tree in trees]).astype(np.int32),
            "right": np.concatenate([tree.children_right for tree in trees]).astype(np.int32),
            "feature": np.concatenate([tree.feature for tree in trees]).astype(np.int32),
            "threshold": np.concatenate([tree.threshold for tree in trees]),
            "value": _RATE * np.concatenate([tree.value[:, 0, 0] for tree in trees]),
        }
        sizes = np.array([tree.node_count for tree in trees], dtype=np.int64)
        return cls(counted, nodes, sizes, line, frozenset(map(identity, pairs.prompts)))

    def expected(self, prompts: Sequence[Ints]) -> Floats:
        """Return float64[B], expected mean log length of each prompt's responses."""
        # float32, as scikit-learn compares them
        columns = features(prompts, self._counted).astype(np.float32)
        total, rows, begin = _along(self._line, prompts), np.arange(len(prompts)), 0
        for size in self._sizes.tolist():
            left, right, feature, threshold, value = (self._nodes[name][begin : begin + size] for name in _NODES)
            begin += size
            node = np.zeros(len(prompts), dtype=np.int64)
            while (inner := left[node] >= 0).any():
                below = columns[rows, np.maximum(feature[node], 0)] <= threshold[node]
                node = np.where(inner, np.where(below, left[node], right[node]), node)
            total += value[node]
        return total

    def save(self, folder: Path) -> None:
        """Write :data:`FILE`."""
        from safetensors.numpy import save_file

        folder.mkdir(parents=True, exist_ok=True)
        about = {"line": np.array(self._line), "trained": np.array(sorted(self.trained), dtype=np.int64)}
        save_file({**self._nodes, "sizes": self._sizes, "counted": self._counted, **about}, folder / FILE)

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
            slope, at_one = kept["line"].tolist()
            nodes = {name: kept[name] for name in _NODES}
            return cls(kept["counted"], nodes, kept["sizes"], (slope, at_one), frozenset(kept["trained"].tolist()))
        except (OSError, ValueError, SafetensorError, KeyError) as error:
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
        row[-6:] = *summary, np.flatnonzero(prompt == prompt[-1])[0]
    return rows


def _sizes(prompts: Sequence[Ints]) -> Floats:
    """Return float64[B], log of the number of tokens."""
    return np.log([len(prompt) for prompt in prompts])


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
