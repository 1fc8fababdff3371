"""Confidence that the target accepts a draft token, learnt online from accepted and rejected drafts.

The occurrences of the latest tokens vote for the next one. The inputs are vote shares, by source and match length, and
the probabilities that earlier policies gave the token. They are mixed as logits with weights that follow the gradient
of the log loss (logistic mixing: Mattern, DCC 2012), by longest match and first or later draft token. A table of
observed acceptance per class of logit corrects the mix; the mean of both is the confidence. The product of a draft's
confidences is the probability that its last token is reached and accepted. The prior only states that longer matches
are more reliable; some hundred verified tokens replace it.
"""

from __future__ import annotations

import numpy as np

from verl_rhyme.drafting.arrays import Model
from verl_rhyme.drafting.kernels import MODEL, N_BINS, N_INPUTS, N_SETS, N_SOURCES, N_TIERS

#: Weights of a vote share's logit by match tier, and of a recorded probability's logit.
_SHARE_PRIOR = (0.15, 0.25, 0.35, 0.45, 0.5)
_RECORDED_PRIOR = 0.2
#: Weights of the vote of the model's drafter by its position.
_MODEL_PRIOR = (0.5, 0.4, 0.4, 0.3, 0.3)
#: Offset if the longest match has one or two tokens, which agree by chance.
_SHORT_PRIOR = -4.0
#: Weight of a calibration class's prior, in observations.
_CALIBRATION_PRIOR = 20.0


def prior() -> Model:
    weights = np.zeros((N_SETS, N_INPUTS))
    votes = N_SOURCES * N_TIERS
    weights[:, :votes] = np.tile(_SHARE_PRIOR, N_SOURCES)
    weights[:, MODEL * N_TIERS : (MODEL + 1) * N_TIERS] = _MODEL_PRIOR
    weights[:, votes : votes + N_TIERS] = _RECORDED_PRIOR
    weights[: N_SETS // 2 : N_TIERS, votes + N_TIERS] = _SHORT_PRIOR
    centres = np.tile(1 / (1 + np.exp(-(np.arange(N_BINS // 2) / 2 - 6 + 0.25))), 2)  # probability amid each class
    calibration = _CALIBRATION_PRIOR * np.stack([centres, np.ones(N_BINS)], axis=1)  # accepted and tried, both decayed
    return Model(weights=weights, calibration=calibration)
