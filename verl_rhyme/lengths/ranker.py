"""A length ranker: a small language model that reads a prompt and predicts the length of its responses.

It serves prompts without a history (StreamRL, arXiv:2504.15930, section 5), and is fine-tuned offline on recorded
responses, as published by regression; here of the mean log length. No other module of the length predictor imports
torch.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from verl_rhyme.lengths.pairs import Ints, Pairs, identity
from verl_rhyme.lengths.quality import rank_correlation

Floats = npt.NDArray[np.float64]

#: Share of the prompts held out for early stopping.
_HELD_OUT = 0.15
#: Files of a saved ranker, in addition to those of its language model.
ABOUT, HEAD = "ranker.json", "head.safetensors"
_FORMAT = 2
#: A randomly initialized ranker for small vocabularies and tasks: maximum number of distinct token ids (others are
#: folded into them), and its shape.
_VOCABULARY = 1 << 15
_TINY = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
_SCORED_AT_ONCE = 64
#: Maximum number of prompt tokens that are read: of a longer prompt the first half and the last half.
_MOST_TOKENS = 2048
#: Tokens of a typical prompt; initial weight of the number of tokens.
_TYPICAL, _SIZE = 128.0, 8.0
#: Prompts of a training step; epochs without a better held-out rank correlation, after which training ends.
_BATCH, _PATIENCE = 32, 4
#: Minimum learning rate of the head: it starts at zero, also on a large model that should change little.
_HEAD_RATE = 3e-3


class LengthRanker(nn.Module):
    """A length ranker on a transformers model without a head (``AutoModel``): token ids to hidden states."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body = body
        self.vocabulary = int(body.get_input_embeddings().num_embeddings)
        self.head = nn.Linear(2 * int(body.config.hidden_size) + 1, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        #: Prompts it was trained on (:func:`~.pairs.identity`).
        self.trained: frozenset[int] = frozenset()

    def forward(self, prompts: Sequence[Ints]) -> torch.Tensor:
        """Return float32[B], log lengths by the last hidden state, the mean of all, and the number of tokens."""
        cut = [self._cut(prompt) for prompt in prompts]
        device = self.head.weight.device
        sizes = torch.tensor([len(prompt) for prompt in cut], device=device)
        ids = nn.utils.rnn.pad_sequence(cut, batch_first=True).to(device)
        mask = torch.arange(ids.shape[1], device=device) < sizes[:, None]
        hidden = self.body(input_ids=ids, attention_mask=mask.long()).last_hidden_state.float()
        mean = (hidden * mask[..., None]).sum(1) / sizes[:, None]
        last = hidden[torch.arange(len(cut), device=device), sizes - 1]
        size = _SIZE * torch.log2(sizes.float() / _TYPICAL)[:, None]
        return self.head(torch.cat([last, mean, size], -1)).squeeze(-1)

    @torch.no_grad()
    def expected(self, prompts: Sequence[Ints]) -> Floats:
        """Return float64[B], expected log lengths, which the length predictor uses for prompts without a history."""
        self.eval()
        order = np.argsort([len(prompt) for prompt in prompts], kind="stable")  # for little padding
        found = np.zeros(len(prompts))
        for at in range(0, len(order), _SCORED_AT_ONCE):
            rows = order[at : at + _SCORED_AT_ONCE]
            found[rows] = self([prompts[row] for row in rows]).double().cpu().numpy()
        return found

    def _cut(self, prompt: Ints) -> torch.Tensor:
        ids = np.asarray(prompt, dtype=np.int64)
        if len(ids) > _MOST_TOKENS:
            ids = np.concatenate([ids[: _MOST_TOKENS // 2], ids[-_MOST_TOKENS // 2 :]])
        return torch.from_numpy(ids % self.vocabulary)

    def save(self, folder: Path) -> None:
        """Write language model (safetensors, JSON), head and format; no tokenizer, since it reads token ids."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        self.body.save_pretrained(folder)
        head = {name: tensor.detach().cpu().contiguous() for name, tensor in self.head.state_dict().items()}
        save_file({**head, "trained": torch.tensor(sorted(self.trained), dtype=torch.int64)}, folder / HEAD)
        (folder / ABOUT).write_text(json.dumps({"format": _FORMAT}))


def tiny(vocabulary: int, seed: int = 0, **shape: int) -> LengthRanker:
    """Return a small, randomly initialized ranker of a shape (``LlamaConfig``); ids above the vocabulary are folded."""
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(seed)
    return LengthRanker(LlamaModel(LlamaConfig(vocab_size=vocabulary, **{**_TINY, **shape})))


def tiny_for(pairs: Pairs, seed: int = 0) -> LengthRanker:
    return tiny(min(1 + max(int(prompt.max()) for prompt in pairs.prompts), _VOCABULARY), seed)


def from_folder(folder: Path) -> LengthRanker:
    """Return an untrained ranker on a transformers folder with safetensors, of the policy's vocabulary.

    Raises ValueError if the model is missing or unreadable.
    """
    from transformers import AutoModel

    try:
        body = AutoModel.from_pretrained(folder, local_files_only=True, use_safetensors=True, dtype=torch.float32)
    except Exception as error:
        raise ValueError(f"{folder}: transformers cannot load it: {error}") from error
    return LengthRanker(body)


def load(folder: Path) -> LengthRanker:
    """Load a saved ranker (:meth:`LengthRanker.save`). Raises ValueError if it is missing, incomplete or invalid."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        about = json.loads((folder / ABOUT).read_text())
        if about["format"] != _FORMAT:
            raise ValueError(f"it has format {about['format']}, this version reads format {_FORMAT}: train it again")
        ranker = from_folder(folder)
        head = load_file(folder / HEAD)
        ranker.trained = frozenset(head.pop("trained").tolist())
        ranker.head.load_state_dict(head)
    except FileNotFoundError as error:
        raise ValueError(f"{folder}: no length ranker in it ({error.filename} is missing)") from error
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"{folder}: the length ranker in it cannot be read: {error}") from error
    return ranker.eval()


def fit(
    ranker: LengthRanker,
    pairs: Pairs,
    *,
    rate: float = 1e-3,
    epochs: int = 12,
    seed: int = 0,
    report: Callable[[float], object] | None = None,
) -> LengthRanker:
    """Train a ranker in place and keep the weights of the best epoch, by rank correlation on 15% held-out prompts.

    It starts from a line over the log of a prompt's number of tokens, which on many tasks is as good as what follows.
    ``rate`` is the peak learning rate (AdamW; it rises over a tenth of the steps and falls to zero). ``report`` is
    called with each epoch's rank correlation. Raises ValueError on fewer than eight prompts, or a number out of range.
    """
    if epochs < 1 or not rate > 0:
        raise ValueError("training needs at least one epoch and a positive rate")
    if len(pairs) < 8:
        raise ValueError(f"a ranker needs at least eight prompts with known lengths, and {len(pairs)} are known")
    train, aside = pairs.split(_HELD_OUT)
    rng, targets = np.random.default_rng(seed), train.locations
    parts = (
        {"params": ranker.body.parameters(), "lr": rate},
        {"params": ranker.head.parameters(), "lr": max(rate, _HEAD_RATE)},
    )
    optimizer = torch.optim.AdamW(parts, weight_decay=0.01)
    steps = epochs * -(-len(train) // _BATCH)
    rising = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: max(0.0, min((done + 1) / rising, (steps - done) / max(1, steps - rising)))
    )
    sizes = _SIZE * np.log2([min(len(prompt), _MOST_TOKENS) / _TYPICAL for prompt in train.prompts])
    slope, offset = np.polyfit(sizes, targets, 1) if np.ptp(sizes) else (0.0, targets.mean())
    with torch.no_grad():
        ranker.head.weight[0, -1], ranker.head.bias[0] = float(slope), float(offset)
    best, best_at, kept = -np.inf, -1, {}
    for epoch in range(-1, epochs):  # the first one only measures the line
        ranker.train()
        order = rng.permutation(len(train)) if epoch >= 0 else ()
        for at in range(0, len(order), _BATCH):
            rows = order[at : at + _BATCH]
            wanted = torch.tensor(targets[rows], dtype=torch.float32, device=ranker.head.weight.device)
            error = (ranker([train.prompts[row] for row in rows]) - wanted).square().mean()
            optimizer.zero_grad(set_to_none=True)
            error.backward()
            nn.utils.clip_grad_norm_(ranker.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        found = rank_correlation(ranker.expected(aside.prompts), aside.means)
        if found > best:
            best, best_at, kept = found, epoch, copy.deepcopy(ranker.state_dict())
        if report is not None and epoch >= 0:
            report(found)
        if epoch - best_at >= _PATIENCE:
            break
    ranker.load_state_dict(kept)
    ranker.trained = frozenset(map(identity, pairs.prompts))
    return ranker.eval()
