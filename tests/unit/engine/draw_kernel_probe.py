"""Compares the Triton kernel with the CPU path. Run with TRITON_INTERPRET=1. Prints a JSON line for each case."""

import json

import numpy as np
import torch

from verl_rhyme.engine import draw_kernel
from verl_rhyme.sampling import inversion, noise

#: Few rows at large vocabularies, because the interpreter is slow.
CASES = [(1, 8), (3, 8), (97, 16), (2048, 16), (4099, 16), (151_936, 2)]


def case(vocabulary, rows, dtype, raw):
    rng = np.random.default_rng(vocabulary)
    logits = rng.normal(0, 3, (rows, vocabulary)).astype(np.float32)
    logits[rng.random(logits.shape) < 0.2] = -np.inf
    logits[:, -1] = np.where(np.isinf(logits).all(1), 0, logits[:, -1])
    given = torch.from_numpy(logits).to(dtype)
    logits = given.float().numpy()
    keys = np.array([noise.key_of("probe", i) for i in range(rows)], dtype=np.uint64)
    positions = rng.integers(0, 1 << 40, rows)
    temperatures = rng.choice(np.array([0, 0.6, 1, 1.5], dtype=np.float32), rows)
    greedy = temperatures == 0
    scaled = logits / np.where(greedy, 1, temperatures)[:, None].astype(np.float32)

    arrays = (torch.from_numpy(a) for a in (keys.view(np.int64), positions, temperatures))
    tokens, logprobs = draw_kernel.draw(given, *arrays, raw=raw)
    expected = np.where(greedy, scaled.argmax(1), noise.draw(scaled, keys, positions))
    base = torch.from_numpy(logits if raw else scaled).double()
    error = logprobs.double() - base.log_softmax(-1).gather(1, tokens[:, None])[:, 0]

    # float32 noise may choose another token if the two best are nearly equal.
    score = scaled.astype(np.float64) + np.where(
        greedy[:, None], 0, noise.gumbel(noise.words(keys, positions, vocabulary))
    )
    at = np.arange(rows)
    behind = score[at, expected] - score[at, tokens.numpy()]
    return {
        "vocabulary": vocabulary,
        "dtype": str(dtype),
        "raw": raw,
        "same": int((tokens.numpy() == expected).sum()),
        "rows": rows,
        "behind": float(behind.max()),
        "logprob_error": float(error.abs().max()),
        "ranks": bool((draw_kernel.ranks(given, tokens).numpy() == inversion.ranks(logits, tokens.numpy())).all()),
    }


def masked():
    """Return rows with one or no possible token."""
    logits = torch.full((3, 5000), -torch.inf)
    logits[0, 4321] = logits[1, 17] = -80.0
    zeros, one = torch.zeros(3, dtype=torch.int64), torch.ones(3)
    tokens, logprobs = draw_kernel.draw(logits, zeros, zeros, one)
    return {"tokens": tokens.tolist(), "logprobs": logprobs[:2].tolist()}


if __name__ == "__main__":
    for vocabulary, rows in CASES:
        for dtype, raw in ((torch.float32, False), (torch.bfloat16, vocabulary % 2 == 0)):
            print(json.dumps(case(vocabulary, rows, dtype, raw)), flush=True)
    print(json.dumps(masked()), flush=True)
