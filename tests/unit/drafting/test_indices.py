"""The adaptive drafter's compiled code has no index out of bounds, which would overwrite other memory.

Random batches in a process with checks (``NUMBA_BOUNDSCHECK=1``) and a cache of its own, because code with checks is
compiled separately. Arrays that it reads by address are overwritten when the drafter releases them, so that a late read
is out of bounds as well.
"""

import os
import subprocess
import sys
import time

import numpy as np
import pytest

from verl_rhyme.config import DraftingConfig
from verl_rhyme.drafting import adaptive
from verl_rhyme.drafting.adaptive import AdaptiveDrafter
from verl_rhyme.drafting.policy import DecodeStep
from verl_rhyme.history.record import PromptHistory, Trajectory

WIDTH, KEYS = 700, [bytes([i]) * 16 for i in range(4)]


class Histories:
    """A source of histories, some of which arrive late or never."""

    def __init__(self, rng, vocabulary):
        self.rng, self.vocabulary, self.spoilt = rng, vocabulary, []

    def make(self):
        rng = self.rng
        if rng.random() < 0.2:
            return None
        made = []
        for length in rng.integers(1, 200, rng.integers(1, 6)):
            tokens = np.resize(rng.integers(0, self.vocabulary, rng.choice([7, 200])), length).astype(np.int32)
            logprobs = -5 * rng.random(length) if rng.random() < 0.7 else None
            made.append(Trajectory(KEYS[0], tokens, 1.0, 0, 0, 0, logprobs))
        history = PromptHistory.build(made, int(rng.integers(5)))
        return PromptHistory.decode(history.encode()) if rng.random() < 0.5 else history

    def get(self, key):
        return None if self.rng.random() < 0.7 else self.make()

    def release(self, key, history):
        if history is not None:
            for array in (history.tokens, history.suffixes, history.first_tokens):
                array[:] = 1 << 30
            self.spoilt.append(history)


def one_engine(rng):
    """Start, draft, verify, restart and end random requests while histories arrive."""
    vocabulary = int(rng.choice([2, 3, 12, 300, 152064, (1 << 31) - 1]))
    allowed = int(rng.choice([vocabulary, max(1, vocabulary // 2)]))
    config = DraftingConfig(
        live_tokens=int(rng.choice([1 << 10, 1 << 12, 1 << 15])),
        floor=float(rng.choice([1e-4, 0.02, 0.3])),
        max_tokens=int(rng.choice([1, 2, 32, 128])),
        weigh_cost=bool(rng.random() < 0.5),
    )
    histories, threads = Histories(rng, vocabulary), int(rng.integers(1, 4))
    slots = int(rng.choice([1, 2, 8, 32]))
    drafter = AdaptiveDrafter(config, histories.get, slots, allowed, threads, histories.release)
    rows = int(rng.choice([1, 3, 16, 70]))
    tokens, lengths = np.zeros((rows, WIDTH), np.int32), np.zeros(rows, int)
    texts = [np.resize(rng.integers(0, vocabulary, 9), WIDTH).astype(np.int32) for _ in KEYS]
    names, prompts, drafts = [""] * rows, [0] * rows, [[] for _ in range(rows)]
    for number in range(int(rng.integers(5, 120))):
        if rng.random() < 0.4:
            drafter.add_history(KEYS[rng.integers(4)], histories.make())
        for row in range(rows):
            if names[row] and (lengths[row] > WIDTH - 140 or rng.random() < 0.03):
                drafter.finish(names[row])
                names[row] = ""
            if not names[row] and rng.random() < 0.5:
                names[row], prompts[row], drafts[row] = f"{number} {row}", int(rng.integers(4)), []
                lengths[row] = rng.choice([1, 2, 5, 140, 300])
                tokens[row] = texts[prompts[row]]
                previous = tokens[row, : rng.integers(lengths[row] + 1)].copy() if rng.random() < 0.3 else None
                for _ in range(1 + (rng.random() < 0.1)):
                    drafter.start(names[row], KEYS[prompts[row]], previous)
        batch = rng.permutation([row for row in range(rows) if names[row] and rng.random() < 0.85]).astype(int)
        if not len(batch):
            continue
        drafted, accepted = [len(drafts[row]) for row in batch], []
        for row in batch:
            kept = 0
            while kept < len(drafts[row]) and rng.random() < 0.7:
                kept += 1
            last = texts[prompts[row]][lengths[row]] if rng.random() < 0.6 else rng.integers(vocabulary)
            tokens[row, lengths[row] : lengths[row] + kept + 1] = [*drafts[row][:kept], last]
            lengths[row] += kept + 1
            accepted.append(kept)
        limits = np.minimum(rng.integers(0, config.max_tokens + 1, len(batch)), WIDTH - 1 - lengths[batch])
        budget, seconds = int(rng.choice([0, 1, 5, 40, 100_000])), 0.01 * rng.random() if rng.random() < 0.8 else None
        step = DecodeStep(
            [names[row] for row in batch], batch, tokens, lengths[batch], drafted, accepted, limits, budget, seconds
        )
        given = drafter.step(step)
        assert sum(map(len, given)) <= budget
        for row, draft, limit in zip(batch, given, limits, strict=True):
            assert len(draft) <= limit
            assert all(0 <= token < allowed for token in draft)
            drafts[row] = draft
        live = drafter._live.arrays
        assert (live.fill >= 0).all()
        for one, other in ((live.before, live.after), (live.after, live.before)):
            linked = np.flatnonzero(one >= 0)
            assert (other[one[linked]] == linked).all()
    for name in filter(None, names):
        drafter.finish(name)
    assert not len(drafter)
    assert not len(drafter._shared)
    assert not drafter._live.arrays.open.any()
    assert np.isfinite(drafter._model.weights).all()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_index_is_out_of_bounds(tmp_path):
    from tests.conftest import SLOW, examples  # not for the process, which finds the `tests` of site-packages

    seconds, seed = examples(8, slow=300), os.getpid() << 20 if SLOW else 0
    ran = subprocess.run(
        [sys.executable, __file__, str(seconds), str(seed)],
        env={**os.environ, "NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]


if __name__ == "__main__":
    adaptive.ROWS_A_THREAD = 1
    end, seed = time.monotonic() + float(sys.argv[1]), int(sys.argv[2])
    while time.monotonic() < end:
        try:
            one_engine(np.random.default_rng(seed))
        except BaseException:
            print("seed", seed, file=sys.stderr)
            raise
        seed += 1
