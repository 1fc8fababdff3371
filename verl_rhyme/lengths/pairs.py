"""Prompts with the lengths of their responses: the training data of a length ranker."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from verl_rhyme.lengths.quality import rank_correlation, tail_recall

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]

#: Shares of the longest responses for which recall is measured (as in StreamRL, arXiv:2504.15930).
_TAILS = (0.05, 0.1, 0.2)


@dataclass(frozen=True)
class Pairs:
    """P prompts with response lengths."""

    prompts: list[Ints]  # int32[tokens] each, token ids
    lengths: list[Ints]  # int32[n] each, tokens of its responses, at least one

    @classmethod
    def from_rows(cls, rows: Iterable[tuple[Sequence[int], Sequence[int]]]) -> Pairs:
        """Make pairs of (token ids, lengths); a length of 0 counts as 1."""
        made = [(np.asarray(p, dtype=np.int32), np.maximum(np.asarray(n, dtype=np.int32), 1)) for p, n in rows]
        return cls([prompt for prompt, _ in made], [lengths for _, lengths in made])

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def means(self) -> Floats:
        """float64[P], mean length of each prompt's responses."""
        return np.array([lengths.mean(dtype=np.float64) for lengths in self.lengths], dtype=np.float64)

    @property
    def locations(self) -> Floats:
        """float64[P], mean log length of each prompt's responses."""
        return np.array([np.log(lengths).mean(dtype=np.float64) for lengths in self.lengths], dtype=np.float64)

    def select(self, rows: Iterable[int]) -> Pairs:
        rows = list(rows)
        return Pairs([self.prompts[i] for i in rows], [self.lengths[i] for i in rows])

    def excluding(self, trained: Container[int]) -> Pairs:
        """Return the prompts whose :func:`identity` is not in ``trained``."""
        return self.select(i for i, prompt in enumerate(self.prompts) if identity(prompt) not in trained)

    def split(self, share: float) -> tuple[Pairs, Pairs]:
        """Split off a share of the prompts by :func:`identity`: they stay split off when others are added.

        Each side has at least one prompt, if there are two.
        """
        order = np.argsort([identity(prompt) for prompt in self.prompts], kind="stable")
        aside = min(max(1, round(share * len(self))), len(self) - 1)
        return self.select(order[aside:]), self.select(order[:aside])

    def evaluate(self, predicted: Floats) -> dict[str, float]:
        """Return how well a prediction (float64[P], any scale) finds the longest responses, next to an oracle's.

        ``rank_correlation`` is with the prompts' means. For the longest 5, 10 and 20% of the responses: ``recall_*``,
        ``oracle_*`` (with each prompt's true mean of these responses) and ``share_*``, the ratio of both.
        """
        sizes = np.array([len(lengths) for lengths in self.lengths])
        lengths, means = np.concatenate(self.lengths).astype(np.float64), self.means
        recalls = {"rank_correlation": rank_correlation(predicted, means)}
        for tail in _TAILS:
            name = round(100 * tail)
            ours, best = (tail_recall(np.repeat(of, sizes), lengths, tail) for of in (predicted, means))
            recalls |= {f"recall_{name}": ours, f"oracle_{name}": best, f"share_{name}": ours / max(best, 1e-9)}
        return recalls


def identity(prompt: Ints) -> int:
    """Return a prompt's id among trained prompts: 63 bits of its token ids' hash."""
    digest = hashlib.blake2b(np.asarray(prompt, dtype="<i4").tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
