"""What a step trains, by name: whoever needs its tokens fetches them from TransferQueue itself, in pieces.

verl clears the samples when the step is over. TransferQueue leaves out what it has no more, and may give a cleared
sample's place to another: what comes is compared with what was asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import transfer_queue as tq

from verl_rhyme.history.record import Trajectory

#: Bytes that are fetched at a time, but for a prompt whose samples take more.
PIECE_BYTES = 128 << 20

_TOKEN_ID_BYTES, _FLOAT_BYTES = 8, 4  # as verl stores token ids (int64), log-probs and rewards (float32)


class SamplesGone(RuntimeError):
    """TransferQueue has no longer, or not yet, what was asked for."""


@dataclass(frozen=True)
class StoredSamples:
    """Finished samples in TransferQueue.

    Attributes:
        partition: verl's ``"train"`` or ``"val"``.
        keys: Of the samples, N.
        lengths: int64[N], response tokens.
    """

    partition: str
    keys: list[str]
    lengths: np.ndarray

    def columns(self, rows: Sequence[int], fields: Sequence[str]) -> list[list[Any]]:
        """Fields of some samples, each a list with a tensor (or what else verl put there) per row.

        Raises:
            SamplesGone: Not all are there.
        """
        if not len(rows):
            return [[] for _ in fields]
        keys = [self.keys[row] for row in rows]
        # It joins the run's queue when first called. `tq.init` would, where there is none, start another.
        data = tq.kv_batch_get(keys=keys, partition_id=self.partition, select_fields=list(fields))
        if len(data) != len(keys):
            raise SamplesGone(f"{len(keys) - len(data)} of {len(keys)} samples were cleared before they were fetched")
        return [list(data[name].unbind() if hasattr(data[name], "unbind") else data[name]) for name in fields]

    def pieces(self, token_bytes: int, together: Sequence[Any] | None = None) -> Iterator[list[int]]:
        """Rows in pieces of at most :data:`PIECE_BYTES`.

        Args:
            token_bytes: Of each response token.
            together: A label of each row; rows of one label are in one piece, which may be larger for it.
        """
        groups: dict[Any, list[int]] = {}
        for row in range(len(self.keys)):
            groups.setdefault(row if together is None else together[row], []).append(row)
        piece: list[int] = []
        size = 0
        for group in groups.values():
            weight = token_bytes * int(self.lengths[group].sum())
            if piece and size + weight > PIECE_BYTES:
                yield piece
                piece, size = [], 0
            piece.extend(group)
            size += weight
        if piece:
            yield piece

    def rewards(self) -> np.ndarray:
        """float64[N]: the sum of each sample's rewards over its tokens."""
        summed = np.zeros(len(self.keys))
        for rows in self.pieces(_FLOAT_BYTES):
            (scores,) = self._per_token(rows, ["rm_scores"])
            summed[rows] = [float(score.sum()) for score in scores]
        return summed

    def responses(
        self, logprobs: bool, together: Sequence[Any] | None = None
    ) -> Iterator[tuple[list[int], list[np.ndarray], list[np.ndarray | None]]]:
        """Piece by piece: rows, their tokens (int32[length] each), and log-probs (float32[length] each, or ``None``).

        Args:
            logprobs: They are stored.
            together: As of :meth:`pieces`.

        Raises:
            SamplesGone: Not all are there.
        """
        fields = ["responses", *(["rollout_log_probs"] if logprobs else [])]
        for rows in self.pieces(_TOKEN_ID_BYTES + _FLOAT_BYTES * logprobs, together):
            responses, *sampled = self._per_token(rows, fields)
            tokens = [response.numpy().astype(np.int32) for response in responses]
            yield rows, tokens, [p.numpy().astype(np.float32) for p in sampled[0]] if sampled else [None] * len(rows)

    def _per_token(self, rows: Sequence[int], fields: Sequence[str]) -> list[list[Any]]:
        columns = self.columns(rows, fields)
        for column in columns:
            if any(len(values) != self.lengths[row] for row, values in zip(rows, column, strict=True)):
                raise SamplesGone("samples were cleared, and others took their place, before they were fetched")
        return columns


@dataclass(frozen=True)
class TrainedBatch:
    """A step's samples with all that the history keeps of them but their tokens.

    Attributes:
        stored: Where their tokens are, N samples.
        prompts: Key of each one's prompt (:mod:`verl_rhyme.history.keys`).
        visits: Label of the prompt's visit that each is of (:func:`verl_rhyme.history.keys.visit_label`).
        rewards: float64[N].
        numbers: Each one's number within the group of its prompt.
        versions: Version of the weights that ended it.
        epoch: Pass over the data, from 0.
        logprobs: verl keeps the log-probs of sampled tokens (``rollout.calculate_log_probs``).
    """

    stored: StoredSamples
    prompts: list[bytes]
    visits: list[int]
    rewards: np.ndarray
    numbers: list[int]
    versions: list[int]
    epoch: int
    logprobs: bool = True

    def pieces(self) -> Iterator[TrainedBatch]:
        """In pieces that are fetched and recorded at a time: all samples of a prompt are in one, few megabytes else."""
        token_bytes = _TOKEN_ID_BYTES + _FLOAT_BYTES * self.logprobs
        for rows in self.stored.pieces(token_bytes, together=self.prompts):
            yield self._of(rows)

    def _of(self, rows: list[int]) -> TrainedBatch:
        def pick(column: list[Any]) -> list[Any]:
            return [column[row] for row in rows]

        stored = replace(self.stored, keys=pick(self.stored.keys), lengths=self.stored.lengths[rows])
        return replace(
            self,
            stored=stored,
            prompts=pick(self.prompts),
            visits=pick(self.visits),
            rewards=self.rewards[rows],
            numbers=pick(self.numbers),
            versions=pick(self.versions),
        )

    def trajectories(self) -> Iterator[list[Trajectory]]:
        """Fetched piece by piece; all samples of a prompt come in one piece."""
        for rows, tokens, logprobs in self.stored.responses(self.logprobs, together=self.prompts):
            yield [
                Trajectory(
                    key=self.prompts[row],
                    tokens=tokens[i],
                    reward=float(self.rewards[row]),
                    policy_version=self.versions[row],
                    epoch=self.epoch,
                    sample=self.numbers[row],
                    logprobs=logprobs[i],
                    visit=self.visits[row],
                )
                for i, row in enumerate(rows)
            ]
