"""Texts of the clock device, for the engine's process and its worker's."""

import numpy as np

#: Tokens that occur. vLLM and the drafter know the model's whole vocabulary.
TOKENS = 64
#: Key in a request's ``extra_args``: arguments of :func:`text`.
TEXT = "text"
#: Parts of a step with drafts that the device may wait for, by name.
PARTS = ("take in", "plan", "add drafts", "inputs", "attention")


def text(length: int, common: int, own: int, follow: float) -> np.ndarray:
    """Return a text, int64[length], each of whose tokens is that of the text ``common`` with probability ``follow``."""
    shared = np.random.default_rng(common).integers(0, TOKENS, length)
    rng = np.random.default_rng((common, own))
    return np.where(rng.random(length) < follow, shared, rng.integers(0, TOKENS, length))
