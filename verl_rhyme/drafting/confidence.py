"""How sure is it that the target accepts a draft token? Learnt on line from what it accepted.

At every draft position the occurrences of the latest tokens vote for what comes next. Their vote shares, by source and
length of match, and the probabilities that earlier policies gave the same token there are mixed as logits with weights
that follow the gradient of the log loss (logistic mixing: Mattern, DCC 2012); which weights apply depends on the
longest match and on whether it is the first draft token. A table of observed acceptance per class of logit then
corrects the mix; the mean of both is the confidence. The product of a draft's confidences is the probability that its
last token is reached and accepted.

The prior below says no more than "a longer match is a better witness"; some hundred verified tokens replace it.
"""

from __future__ import annotations

import numpy as np

from verl_rhyme.drafting.arrays import Model
from verl_rhyme.drafting.kernels import HEAD, N_BINS, N_INPUTS, N_SETS, N_TIERS, SOURCES

#: Weight of a vote share's logit by tier of its match, and of a recorded probability's.
_SHARE_PRIOR = (0.15, 0.25, 0.35, 0.45, 0.5)
_RECORDED_PRIOR = 0.2
#: What is added where the longest match has one or two tokens: it agrees by chance.
_SHORT_PRIOR = -4.0
#: Weight of the draft head's logit, and of all others where there is a head.
_HEAD_PRIOR, _BESIDE_HEAD = 0.6, 0.5
#: What is added to a token that the head does not name.
_NOT_NAMED_PRIOR = -1.5
#: Observations that the prior of a calibration class counts for.
_CALIBRATION_PRIOR = 20.0


def prior() -> Model:
    """A model that has seen nothing."""
    weights = np.zeros((N_SETS, N_INPUTS))
    weights[:, : SOURCES * N_TIERS] = np.tile(_SHARE_PRIOR, SOURCES)
    weights[:, SOURCES * N_TIERS : SOURCES * N_TIERS + N_TIERS] = _RECORDED_PRIOR
    weights[::N_TIERS, HEAD - 2] = _SHORT_PRIOR
    with_head = weights[N_SETS // 2 :]
    with_head *= _BESIDE_HEAD
    with_head[:, HEAD - 2] = 0  # that only a short match agrees says nothing against what the head names
    with_head[:, HEAD], with_head[:, HEAD + 1] = _HEAD_PRIOR, _NOT_NAMED_PRIOR
    return Model(
        weights=weights,
        calibration=np.stack([_CALIBRATION_PRIOR * bin_centres(), np.full(N_BINS, _CALIBRATION_PRIOR)], 1),
    )


def bin_centres() -> np.ndarray:
    """float64[N_BINS]: the probability in the middle of each calibration class."""
    logits = np.arange(N_BINS // 2) / 2 - 6 + 0.25
    return np.tile(1 / (1 + np.exp(-logits)), 2)
