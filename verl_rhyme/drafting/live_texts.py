"""What this engine's requests say and lately said, indexed token by token, in bounded memory.

Texts lie in linked blocks of a ring: the blocks filled longest ago are overwritten first, so a finished request serves
its group and other prompts until newer text needs the room. Two hash tables hold the latest position of every short
n-gram, one per group and one over all texts, and each position links to the one before with the same n-gram: latest
first is also the order in which occurrences are looked at.
"""

from __future__ import annotations

import numpy as np

from verl_rhyme.drafting.arrays import LiveArrays
from verl_rhyme.drafting.kernels import BLOCK


class LiveTexts:
    """Memory: 12 bytes a token of capacity and 8 a bucket of the hash tables; 20 bytes a token at the default.

    Args:
        capacity: Tokens kept, prompts included; rounded up to whole blocks, and at least ``4 * slots`` blocks, so that
            running requests never hold more than a quarter of them open.
        slots: Requests that may run at a time.
    """

    def __init__(self, capacity: int, slots: int):
        blocks = max(-(-capacity // BLOCK), 4 * slots)
        buckets = 1 << int(np.ceil(np.log2(min(blocks * BLOCK, 1 << 22))))
        self.arrays = LiveArrays(
            text=np.zeros(blocks * BLOCK, dtype=np.int32),
            link_group=np.full(blocks * BLOCK, -1, dtype=np.int32),
            link_other=np.full(blocks * BLOCK, -1, dtype=np.int32),
            head_group=np.full(buckets, -1, dtype=np.int32),
            head_other=np.full(buckets, -1, dtype=np.int32),
            fill=np.zeros(blocks, dtype=np.int32),
            before=np.full(blocks, -1, dtype=np.int32),
            after=np.full(blocks, -1, dtype=np.int32),
            owner=np.full(blocks, -1, dtype=np.int64),
            group=np.full(blocks, -1, dtype=np.int64),
            open=np.zeros(blocks, dtype=np.bool_),
            cursor=np.zeros(1, dtype=np.int64),
        )

    @property
    def tokens(self) -> int:
        """Tokens held now."""
        return int(self.arrays.fill.sum())

    @property
    def nbytes(self) -> int:
        """Memory taken, whatever is held."""
        return sum(array.nbytes for array in self.arrays)

    def discard(self, block: int) -> None:
        """Forget the text that ends in ``block``: its request has another group now, and adds all of it anew."""
        live = self.arrays
        while block >= 0:
            live.fill[block] = 0
            live.open[block] = False
            block = int(live.before[block])

    def close(self, block: int) -> None:
        """The request that wrote to ``block`` has ended; its text stays until the room is needed."""
        if block >= 0:
            self.arrays.open[block] = False
