"""What this engine's requests say and lately said, indexed token by token, in bounded memory.

Texts lie in linked blocks of a ring: the blocks filled longest ago are overwritten first, so a finished request serves
its group until newer text needs the room. A hash table holds the latest position of every token by group, and each
position links to the one before with the same token: latest first is also the order in which occurrences are looked at.

Of all responses together it is counted how often each token followed the latest 1, 2, 3, 4 and 6: a table of entries
(context, token, count) in buckets of one cache line, of which a lookup reads one for each length. The idea is that of
prediction by partial matching (Cleary and Witten, IEEE Trans. Commun. 32(4), 1984). While a bucket has room its counts
are exact but for collisions of hashes; where it has none the least frequent give way (after Misra and Gries, Sci.
Comput. Program. 2, 1982). Prompts and resumed texts are not counted: a group has the first in common, the others were.
"""

from __future__ import annotations

import numpy as np

from verl_rhyme.drafting.arrays import LiveArrays
from verl_rhyme.drafting.kernels import BLOCK, WAYS


class LiveTexts:
    """Memory: 8 bytes a token of capacity and 12 a bucket of the hash tables; 20 bytes a token at the default.

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
            head_group=np.full(buckets, -1, dtype=np.int32),
            counts=_aligned(buckets),
            fill=np.zeros(blocks, dtype=np.int32),
            before=np.full(blocks, -1, dtype=np.int32),
            after=np.full(blocks, -1, dtype=np.int32),
            owner=np.full(blocks, -1, dtype=np.int64),
            group=np.full(blocks, -1, dtype=np.int64),
            open=np.zeros(blocks, dtype=np.bool_),
            cursor=np.zeros(1, dtype=np.int64),
        )

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


def _aligned(entries: int) -> np.ndarray:
    """int64[entries] of zeros that begin where a cache line does."""
    room = np.zeros(entries + WAYS, dtype=np.int64)
    return room[-(room.ctypes.data // 8) % WAYS :][:entries]
