"""Live texts: recent text of this engine's requests, indexed token by token, in bounded memory.

Texts lie in linked blocks of a ring; the blocks filled longest ago are overwritten first. A hash table holds the latest
position of every token by group, and each position links to the previous one with the same token.

A second table counts over all responses how often each token followed the latest 1, 2, 3, 4 and 6 tokens: prediction by
partial matching (Cleary and Witten, IEEE Trans. Commun. 32(4), 1984). Its entries lie in buckets of one cache line. In
a full one the least frequent entries are replaced (after Misra and Gries, Sci. Comput. Program. 2, 1982), else counts
are exact except for hash collisions. Prompts and resumed texts, counted before, are left out.
"""

from __future__ import annotations

import numpy as np

from verl_rhyme.drafting.arrays import LiveArrays
from verl_rhyme.drafting.kernels import BLOCK, WAYS


class LiveTexts:
    """Ring of live texts. It takes 8 bytes a token of capacity and 12 a hash bucket: 20 bytes a token at the default.

    ``capacity`` are tokens, prompts included, rounded up to whole blocks, at least ``4 * slots`` of them, so that
    ``slots`` running requests hold at most a quarter of the blocks open.
    """

    def __init__(self, capacity: int, slots: int):
        blocks = max(-(-capacity // BLOCK), 4 * slots)
        buckets = 1 << int(np.ceil(np.log2(min(blocks * BLOCK, 1 << 22))))
        self.arrays = LiveArrays(  # a position is ``block * BLOCK + offset``
            text=np.zeros(blocks * BLOCK, dtype=np.int32),
            link_group=np.full(blocks * BLOCK, -1, dtype=np.int32),  # earlier position of the token in the group, or -1
            head_group=np.full(buckets, -1, dtype=np.int32),  # latest position by hash
            counts=_aligned(buckets),  # context's mark (23 bits), count (8) and next token (32), by buckets of WAYS
            fill=np.zeros(blocks, dtype=np.int32),  # tokens in the block
            before=np.full(blocks, -1, dtype=np.int32),  # previous block of the same text, or -1
            after=np.full(blocks, -1, dtype=np.int32),  # next block of the same text, or -1
            owner=np.full(blocks, -1, dtype=np.int64),  # number of the text
            group=np.full(blocks, -1, dtype=np.int64),  # group of the text
            open=np.zeros(blocks, dtype=np.bool_),  # whether a running request writes to the block
            cursor=np.zeros(1, dtype=np.int64),  # next block to take
        )

    def discard(self, block: int) -> None:
        """Forget the text that ends in ``block``; its request moves to another group and adds the text again."""
        live = self.arrays
        while block >= 0:
            live.fill[block] = 0
            live.open[block] = False
            block = int(live.before[block])

    def close(self, block: int) -> None:
        """Close the block of a finished request; its text stays until the space is needed."""
        if block >= 0:
            self.arrays.open[block] = False


def _aligned(entries: int) -> np.ndarray:
    """int64[entries] of zeros, aligned to a cache line."""
    room = np.zeros(entries + WAYS, dtype=np.int64)
    return room[-(room.ctypes.data // 8) % WAYS :][:entries]
