"""What the tests of the output distribution share: a prompt of the 12-token model, samplings and histories."""

import numpy as np

VOCABULARY = 12
PROMPT = [3, 1, 4, 1, 5]
LENGTH = 3  # tokens whose joint distribution is tested: 12**3 cells
SETTINGS = {
    "T=1": {"temperature": 1.0},
    "T=0.7": {"temperature": 0.7},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
    "top-k": {"temperature": 1.0, "top_k": 4},
}


def history_of(kind, distribution):
    """Responses the drafter is given; drafts begin after the first token, where it occurs in one of them."""
    joint = distribution(PROMPT, LENGTH)
    if kind == "true":  # what the model itself would say, more of it where it is likelier
        cells = np.random.default_rng(0).choice(joint.size, p=joint.ravel(), size=16)
    elif kind == "adversarial":  # after each first token, what is least likely to follow
        cells = np.arange(VOCABULARY) * VOCABULARY**2 + joint.reshape(VOCABULARY, -1).argmin(axis=1)
    else:
        cells = []
    return [(PROMPT, [int(token) for token in np.unravel_index(cell, joint.shape)]) for cell in cells]


def letters(**special):
    """A tokenizer of this vocabulary, a letter each."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {chr(ord("a") + token): token for token in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
