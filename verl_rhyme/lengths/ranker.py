"""A length ranker: a small language model that reads a prompt and scores how long its responses will be.

For prompts never seen, of which no history tells (StreamRL, arXiv:2504.15930, section 5). Two ways of training it:

- ``regression``, as published: supervised on every (prompt, length), here squared error of the length as a share of its
  typical spread;
- by rank: prompts of a batch are compared with each other, and only their order and distances matter. ``listwise``:
  cross-entropy of the softmax over scores against each prompt's share of the batch's tokens (ListNet's top-one loss,
  Cao and others, ICML 2007, with lengths as relevance; its optimum is the log of the expected length). ``margin``: of
  every two prompts the longer one is to score higher by the difference of their log lengths (a hinge).

What a score means in tokens is the calibration's (:mod:`.calibration`), fitted on known prompts held out of training.
The one file of the policies that has torch; nothing else in them imports it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from verl_rhyme.lengths.calibration import Calibration
from verl_rhyme.lengths.pairs import Ints, Pairs, identity
from verl_rhyme.lengths.quality import rank_correlation

Floats = npt.NDArray[np.float64]

LOSSES = ("listwise", "margin", "regression")
#: Share of the prompts that are held out: to stop by, and to calibrate on.
HELD_OUT = 0.15
#: Files of a saved ranker, beside those of its language model.
ABOUT, HEAD = "ranker.json", "head.safetensors"
_FORMAT = 1
#: Of a ranker that is made from nothing, for vocabularies and tasks of a test's size: its shape, and the token ids that
#: it tells apart at most; others are folded into them.
_VOCABULARY = 1 << 15
_TINY = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
_SCORED_AT_ONCE = 64
#: Tokens of a prompt that is neither short nor long; how much the number of tokens counts at first.
_TYPICAL, _SIZE = 128.0, 8.0
#: Learning rate of the head, at least: it begins at nothing, also on a large model that is to change little.
_HEAD_RATE = 3e-3


@dataclass(frozen=True)
class Training:
    """How a ranker is trained.

    Attributes:
        loss: Of :data:`LOSSES`.
        epochs: Passes over the pairs, at most.
        batch: Prompts that are compared with each other in a step.
        rate: Learning rate at its height (AdamW; it rises over a tenth of the steps and falls to nothing).
        patience: Epochs without a better rank correlation on what is held out, after which it ends.
        seed: Of order and weights.

    Raises:
        ValueError: An unknown loss, or a number out of range.
    """

    loss: str = "listwise"
    epochs: int = 12
    batch: int = 32
    rate: float = 1e-3
    patience: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise ValueError(f"loss={self.loss!r}: one of {', '.join(LOSSES)}")
        if self.epochs < 1 or self.batch < 2 or not self.rate > 0 or self.patience < 1:
            raise ValueError("a ranker needs an epoch, batches of two prompts, a positive rate and patience")


class LengthRanker(nn.Module):
    """See the module; :func:`tiny` and :func:`from_folder` make one, :func:`load` reads a saved one.

    Args:
        body: A transformers model without a head (``AutoModel``): token ids to hidden states.
        most: Tokens of a prompt that are read; of a longer one the first and the last half of so many.
    """

    def __init__(self, body: Any, most: int = 2048) -> None:
        super().__init__()
        self.body, self.most = body, most
        self.vocabulary = int(body.get_input_embeddings().num_embeddings)
        self.head = nn.Linear(2 * int(body.config.hidden_size) + 1, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        #: How it was trained, and its rank correlation on what was held out then.
        self.about: dict[str, Any] = {}
        self.calibration: Calibration | None = None
        #: Prompts it was trained or calibrated on (:func:`~.pairs.identity`).
        self.trained: frozenset[int] = frozenset()

    def forward(self, prompts: Sequence[Ints]) -> torch.Tensor:
        """float32[B], scores: of the last hidden state, the mean of all, and their number, which a mean hides."""
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
    def scores(self, prompts: Sequence[Ints]) -> Floats:
        """float64[B], scores: the higher, the longer."""
        self.eval()
        order = np.argsort([len(prompt) for prompt in prompts], kind="stable")  # little padding
        found = np.zeros(len(prompts))
        for at in range(0, len(order), _SCORED_AT_ONCE):
            rows = order[at : at + _SCORED_AT_ONCE]
            found[rows] = self([prompts[row] for row in rows]).double().cpu().numpy()
        return found

    def expected(self, prompts: Sequence[Ints]) -> Floats:
        """float64[B], log lengths to expect: what the length predictor takes for a prompt never seen.

        Raises:
            ValueError: It was not trained.
        """
        if self.calibration is None:
            raise ValueError("this ranker was not trained: it has no calibration")
        return self.calibration.location(self.scores(prompts))

    def _cut(self, prompt: Ints) -> torch.Tensor:
        ids = np.asarray(prompt, dtype=np.int64)
        if len(ids) > self.most:
            ids = np.concatenate([ids[: self.most // 2], ids[len(ids) - self.most // 2 :]])
        return torch.from_numpy(ids % self.vocabulary)

    # ---- files ----

    def save(self, folder: Path) -> None:
        """Write language model (safetensors, JSON), head and what is known of it; no tokenizer: it reads ids."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        self.body.save_pretrained(folder)
        head = {name: tensor.detach().cpu().contiguous() for name, tensor in self.head.state_dict().items()}
        save_file({**head, "trained": torch.tensor(sorted(self.trained), dtype=torch.int64)}, folder / HEAD)
        calibration = None if self.calibration is None else self.calibration.state_dict()
        about = {"format": _FORMAT, "most": self.most, "about": self.about, "calibration": calibration}
        (folder / ABOUT).write_text(json.dumps(about))


def tiny(vocabulary: int, seed: int = 0, **shape: int) -> LengthRanker:
    """A small model from nothing.

    Args:
        vocabulary: Token ids it tells apart; ids beyond are folded into them.
        seed: Of its weights.
        shape: Over :data:`_TINY`, options of transformers' ``LlamaConfig``.
    """
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(seed)
    return LengthRanker(LlamaModel(LlamaConfig(vocab_size=vocabulary, **{**_TINY, **shape})))


def tiny_for(pairs: Pairs, seed: int = 0) -> LengthRanker:
    """:func:`tiny`, of a vocabulary that fits these prompts."""
    return tiny(min(1 + max(int(prompt.max()) for prompt in pairs.prompts), _VOCABULARY), seed)


def from_folder(folder: Path, most: int = 2048) -> LengthRanker:
    """A ranker around a language model's weights, yet to be trained.

    Args:
        folder: A transformers model with ``config.json`` and safetensors, whose tokenizer is the policy's: prompts come
            as the policy's token ids.
        most: See :class:`LengthRanker`.

    Raises:
        ValueError: There is none; the message says what is missing.
    """
    from transformers import AutoModel

    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder}: no model in it (config.json): give a folder of transformers weights")
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"{folder}: no *.safetensors in it; other formats of weights are not read")
    try:
        body = AutoModel.from_pretrained(folder, local_files_only=True, use_safetensors=True, dtype=torch.float32)
    except Exception as error:
        raise ValueError(f"{folder}: transformers cannot load it: {error}") from error
    return LengthRanker(body, most)


def load(folder: Path) -> LengthRanker:
    """A ranker that :meth:`LengthRanker.save` wrote.

    Raises:
        ValueError: There is none, or not a whole one.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        about = json.loads((folder / ABOUT).read_text())
        if about["format"] != _FORMAT:
            raise ValueError(f"of format {about['format']}, this version reads {_FORMAT}")
        ranker = from_folder(folder, int(about["most"]))
        head = load_file(folder / HEAD)
        ranker.trained = frozenset(head.pop("trained").tolist())
        ranker.head.load_state_dict(head)
        ranker.about = dict(about["about"])
        if about["calibration"] is not None:
            ranker.calibration = Calibration.from_state(about["calibration"])
    except FileNotFoundError as error:
        raise ValueError(f"{folder}: no length ranker in it ({error.filename} is missing)") from error
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"{folder}: the length ranker in it cannot be read: {error}") from error
    return ranker.eval()


def fit(
    ranker: LengthRanker,
    pairs: Pairs,
    how: Training,
    told: Callable[[dict[str, float]], bool] | None = None,
    gone: Callable[[], float] | None = None,
) -> LengthRanker:
    """Train it, keep the best epoch's weights, or those before the first, and calibrate.

    One that was never trained begins with what a prompt's number of tokens tells: a line of its logarithm.

    Args:
        ranker: Trained in place.
        pairs: Eight prompts at least; :data:`HELD_OUT` of them are only looked at.
        how: See there.
        told: Is given each epoch's ``epoch``, ``loss`` and ``rank_correlation`` on what is held out; true ends it.
        gone: Share of the time for training that is gone; at 1 it ends, in the middle of an epoch, too. ``None``: it
            has all the time it wants.

    Raises:
        ValueError: There are too few prompts.
    """
    if len(pairs) < 8:
        raise ValueError(f"a ranker is trained on eight prompts with known lengths at least; here are {len(pairs)}")
    train, aside = pairs.held_out(HELD_OUT)
    loss_of, rng = _LOSSES[how.loss], np.random.default_rng(how.seed)
    parts = ((ranker.body, how.rate), (ranker.head, max(how.rate, _HEAD_RATE)))
    optimizer = torch.optim.AdamW([{"params": p.parameters(), "lr": rate} for p, rate in parts], weight_decay=0.01)
    steps = how.epochs * -(-len(train) // how.batch)
    rising, done = max(1, steps // 10), 0.0  # steps, or time in their place
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda _: max(0.0, min((done + 1) / rising, (steps - done) / max(1, steps - rising)))
    )
    spread = float(np.concatenate(train.lengths).std()) or 1.0
    targets = {
        "listwise": train.means,
        "margin": train.locations,
        "regression": (train.means - train.means.mean()) / spread,
    }[how.loss]
    if not ranker.head.weight.any():
        _begin(ranker, train, np.log(train.means) if how.loss == "listwise" else targets)
    best, best_at = rank_correlation(ranker.scores(aside.prompts), aside.means), -1
    kept = copy.deepcopy(ranker.state_dict())
    for epoch in range(how.epochs):
        ranker.train()
        order, total, seen = rng.permutation(len(train)), 0.0, 0
        for at in range(0, len(order), how.batch):
            rows = order[at : at + how.batch]
            seen += len(rows)
            wanted = torch.tensor(targets[rows], dtype=torch.float32, device=ranker.head.weight.device)
            loss = loss_of(ranker([train.prompts[row] for row in rows]), wanted)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(ranker.parameters(), 1.0)
            optimizer.step()
            total += float(loss.detach()) * len(rows)
            done = max(done + 1, 0.0 if gone is None else steps * gone())
            schedule.step()
            if done >= steps:
                break
        found = rank_correlation(ranker.scores(aside.prompts), aside.means)
        if found > best:
            best, best_at, kept = found, epoch, copy.deepcopy(ranker.state_dict())
        ends = told is not None and told({"epoch": epoch, "loss": total / seen, "rank_correlation": found})
        if ends or epoch - best_at >= how.patience or done >= steps:
            break
    ranker.load_state_dict(kept)
    ranker.calibration = Calibration.fit(ranker.scores(aside.prompts), aside)
    ranker.trained = frozenset(map(identity, pairs.prompts))
    ranker.about = {"loss": how.loss, "epochs": best_at + 1, "prompts": len(pairs), "rank_correlation": float(best)}
    return ranker.eval()


@torch.no_grad()
def _begin(ranker: LengthRanker, train: Pairs, wanted: Floats) -> None:
    """The head's line over the number of tokens that were read, by least squares."""
    sizes = _SIZE * np.log2([min(len(prompt), ranker.most) / _TYPICAL for prompt in train.prompts])
    if np.ptp(sizes) < 1e-9:
        return
    slope, height = np.polyfit(sizes, wanted, 1)
    ranker.head.weight[0, -1], ranker.head.bias[0] = float(slope), float(height)


def listwise(scores: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the softmax over float32[B] scores against shares of float32[B] mean lengths, less the least it
    can be."""
    share = lengths / lengths.sum()
    return -(share * torch.log_softmax(scores, 0)).sum() + (share * share.log()).sum()


def margin(scores: torch.Tensor, locations: torch.Tensor) -> torch.Tensor:
    """Mean hinge over pairs: how much a longer prompt's score lacks of the other's and the difference of both
    float32[B] log lengths."""
    apart = locations[:, None] - locations[None, :]
    lacking = torch.relu(apart - (scores[:, None] - scores[None, :]))
    longer = apart > 0
    return (lacking * longer).sum() / longer.sum().clamp(min=1)


def regression(scores: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Mean squared error against float32[B] standardised mean lengths; of every single length it differs by what no
    score can change."""
    return (scores - lengths).square().mean()


_LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "listwise": listwise,
    "margin": margin,
    "regression": regression,
}
