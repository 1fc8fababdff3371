"""References to a step's samples: processes that need the tokens fetch them from TransferQueue, in pieces. verl clears
the samples at the end of the step. TransferQueue omits missing samples and may reuse the place of a cleared one, so the
fetched data are compared with the request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import transfer_queue as tq

from verl_rhyme.history.record import Trajectory
from verl_rhyme.processes import queue

#: Bytes to fetch at a time; a prompt whose samples are larger comes in one piece.
PIECE_BYTES = 128 << 20

_TOKEN_ID_BYTES, _FLOAT_BYTES = 8, 4  # as verl stores token ids (int64), log-probs and rewards (float32)


class MissingSamples(RuntimeError):
    """TransferQueue no longer has the requested samples, or not yet."""


@dataclass(frozen=True)
class StoredSamples:
    """Finished samples in TransferQueue."""

    partition: str  # of verl, "train" or "val"
    keys: list[str]  # of the N samples
    lengths: np.ndarray  # response tokens, int64[N]

    def columns(self, rows: Sequence[int], fields: Sequence[str]) -> list[list[Any]]:
        """Fetch fields of some samples, each a list with one value per row (a tensor, or another type verl stored).
        Raise :class:`MissingSamples` if some are missing."""
        if not len(rows):
            return [[] for _ in fields]
        keys = [self.keys[row] for row in rows]
        queue.join()
        data = tq.kv_batch_get(keys=keys, partition_id=self.partition, select_fields=list(fields))
        if len(data) != len(keys):
            raise MissingSamples(
                f"{len(keys) - len(data)} of {len(keys)} samples were cleared before they were fetched"
            )
        return [list(data[name].unbind() if hasattr(data[name], "unbind") else data[name]) for name in fields]

    def pieces(self, token_bytes: int, together: Sequence[Any] | None = None) -> Iterator[list[int]]:
        """Split the rows into pieces of at most :data:`PIECE_BYTES`, at ``token_bytes`` per response token. Rows with
        the same label in ``together`` stay in one piece, which may then be larger."""
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
        """Return the sum of each sample's token rewards, float64[N]."""
        summed = np.zeros(len(self.keys))
        for rows in self.pieces(_FLOAT_BYTES):
            (scores,) = self._per_token(rows, ["rm_scores"])
            summed[rows] = [float(score.sum()) for score in scores]
        return summed

    def responses(
        self, logprobs: bool, mixed: Sequence[bool], together: Sequence[Any] | None = None
    ) -> Iterator[tuple[list[int], list[np.ndarray], list[np.ndarray | None], list[np.ndarray]]]:
        """Fetch rows, tokens (int32[length] each), log-probs (float32[length] each; without ``logprobs``, ``None``) and
        the positions of tokens that the policy generated (int64[k] each) in :meth:`pieces`. Only responses that are
        ``mixed``, [N], have other tokens. Raise :class:`MissingSamples` if some are missing."""
        fields = ["responses", *(["rollout_log_probs"] if logprobs else [])]
        for rows in self.pieces(_TOKEN_ID_BYTES + _FLOAT_BYTES * logprobs, together):
            responses, *sampled = self._per_token(rows, fields)
            tokens = [response.numpy().astype(np.int32) for response in responses]
            masked = [row for row in rows if mixed[row]]
            masks = dict(zip(masked, self._per_token(masked, ["response_mask"])[0], strict=True))
            policy = [
                np.flatnonzero(masks[row].numpy()) if mixed[row] else np.arange(self.lengths[row]) for row in rows
            ]
            known = [p.numpy().astype(np.float32) for p in sampled[0]] if sampled else [None] * len(rows)
            yield rows, tokens, known, policy

    def _per_token(self, rows: Sequence[int], fields: Sequence[str]) -> list[list[Any]]:
        columns = self.columns(rows, fields)
        for column in columns:
            if any(len(values) != self.lengths[row] for row, values in zip(rows, column, strict=True)):
                raise MissingSamples("samples were cleared and replaced by others before they were fetched")
        return columns


@dataclass(frozen=True)
class TrainedBatch:
    """A step's samples with all data that the history keeps, except the tokens."""

    stored: StoredSamples  # N samples
    prompts: list[bytes]  # prompt key of each sample (history.keys)
    visits: list[int]  # history.keys.visit_label of each sample
    rewards: np.ndarray  # float64[N]
    numbers: list[int]  # of each sample in the group of its prompt
    versions: list[int]  # policy version that finished each sample
    mixed: list[bool]  # whether its response may have tokens that the policy did not generate
    epoch: int  # from 0
    logprobs: bool = True  # whether verl stores those of sampled tokens (rollout.calculate_log_probs)

    def pieces(self) -> Iterator[TrainedBatch]:
        """Split the batch into pieces to fetch and record one at a time; all samples of a prompt are in one piece."""
        token_bytes = _TOKEN_ID_BYTES + _FLOAT_BYTES * self.logprobs
        for rows in self.stored.pieces(token_bytes, together=self.prompts):
            yield self._of(rows)

    def _of(self, rows: list[int]) -> TrainedBatch:
        keys = [self.stored.keys[row] for row in rows]
        stored = replace(self.stored, keys=keys, lengths=self.stored.lengths[rows])
        names = ("prompts", "visits", "numbers", "versions", "mixed")
        lists: dict[str, Any] = {name: [getattr(self, name)[row] for row in rows] for name in names}
        return replace(self, stored=stored, rewards=self.rewards[rows], **lists)

    def trajectories(self) -> Iterator[list[Trajectory]]:
        """Fetch the trajectories in :meth:`pieces`."""
        for rows, tokens, logprobs, policy in self.stored.responses(self.logprobs, self.mixed, self.prompts):
            yield [
                Trajectory(
                    key=self.prompts[row],
                    tokens=tokens[i][policy[i]],
                    reward=float(self.rewards[row]),
                    policy_version=self.versions[row],
                    epoch=self.epoch,
                    sample=self.numbers[row],
                    logprobs=None if (known := logprobs[i]) is None else known[policy[i]],
                    visit=self.visits[row],
                )
                for i, row in enumerate(rows)
            ]
