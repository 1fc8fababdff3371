"""A draft head: a small recurrent network that guesses the next tokens from the policy's last hidden state.

Like Apple's Recurrent Drafter (arXiv:2403.09919) and Hydra (2402.05109) it has no attention and no cache. Its state
begins as the hidden state that gave the latest token. It takes in the embedding of that token and of each drafted one::

    s0 = h                                     h: the normalised hidden state, input of the output layer
    s' = s + C silu(B [norm(s), e(token)])     e: the policy's embedding
    logits = scale * W s'                      W: the policy's output rows

``e`` and ``W`` are the policy's rows of the most frequent tokens of the run (FR-Spec, 2502.14856), copied at each
version. The head has 3 D^2 parameters for a hidden size of D: one percent of a policy or less.

The engine trains the head (:class:`HeadTrainer`), because it has the hidden states of all sampled tokens and with them
the policy's distributions. Stale parameters only lower the acceptance, because every draft is verified.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from verl_rhyme.drafting.head_interface import HEAD_POSITIONS

#: Optimizer steps before a new head drafts.
MIN_UPDATES = 64
#: Rows from which the standard deviation of embeddings is estimated.
_SPREAD_OF = 1024
_COUNTS, _UPDATES = "counts", "updates"


class DraftHead(nn.Module):
    """The network of the draft head.

    Args:
        hidden: Hidden size D of the policy.
    """

    def __init__(self, hidden: int):
        super().__init__()
        self.hidden = hidden
        self.half = False  # matrix products in bfloat16, for devices with hardware support
        self.norm = nn.LayerNorm(hidden)
        self.inner = nn.Linear(2 * hidden, hidden)
        self.outer = nn.Linear(hidden, hidden)
        self.scale = nn.Parameter(torch.ones(()))
        self.other = nn.Parameter(torch.zeros(hidden))  # embedding of tokens without a row
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)

    def precision(self) -> torch.autocast:
        """Return the autocast context of the head's matrix products."""
        return torch.autocast(self.scale.device.type, torch.bfloat16, enabled=self.half)

    def step(self, state: Tensor, embedded: Tensor) -> Tensor:
        """Take in a token: float[..., D], float[..., D] -> float[..., D]."""
        return state + self.outer(functional.silu(self.inner(torch.cat([self.norm(state), embedded], -1))))

    def logits(self, state: Tensor, rows: PolicyRows) -> Tensor:
        """Return logits of the tokens of ``rows``: float[..., D] -> float[..., M]."""
        return self.scale * functional.linear(state, rows.output)

    def embed(self, tokens: Tensor, rows: PolicyRows) -> Tensor:
        """Embed entries of ``rows``, -1 for other tokens: int64[...] -> float[..., D]."""
        known = rows.embedding[tokens.clamp(min=0)]
        return torch.where((tokens >= 0)[..., None], known, self.other)


@dataclass(frozen=True)
class PolicyRows:
    """The policy's rows of the head's tokens.

    Attributes:
        tokens: int64[M], token ids.
        entry: int64[V], entry of each token id, or -1.
        output: float[M, D], output rows in the head's precision.
        embedding: float[M, D], embeddings in the head's precision, scaled to a standard deviation of 0.5.
    """

    tokens: Tensor
    entry: Tensor
    output: Tensor
    embedding: Tensor

    @classmethod
    def of(cls, tokens: Tensor, output: Tensor, embedding: Tensor, vocabulary: int) -> PolicyRows:
        """Build from the policy's ``output`` and ``embedding`` rows of exactly these tokens."""
        entry = torch.full((vocabulary,), -1, dtype=torch.int64, device=tokens.device)
        entry[tokens] = torch.arange(len(tokens), device=tokens.device)
        spread = embedding[:_SPREAD_OF].float().std(correction=0).clamp(min=1e-6)
        return cls(tokens, entry, output, (embedding * (0.5 / spread)).to(embedding.dtype))


def save(path: Path, head: DraftHead, counts: np.ndarray, updates: int) -> None:
    """Save a head to a safetensors file atomically, with how often the run generated each token (int64[V])."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    tensors = {name: parameter.detach().cpu().contiguous() for name, parameter in head.state_dict().items()}
    save_file({**tensors, _COUNTS: torch.from_numpy(counts), _UPDATES: torch.tensor(updates)}, part)
    part.replace(path)


def load(path: Path, head: DraftHead, vocabulary: int) -> tuple[np.ndarray, int]:
    """Load a head from a file of :func:`save`. Returns token counts, int64[V], and optimizer steps.

    Raises:
        ValueError: The file has no head or one of another model; ``head`` is unchanged.
    """
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} is not a draft head ({error})") from None
    counts, updates = tensors.pop(_COUNTS, torch.zeros(0)), int(tensors.pop(_UPDATES, torch.zeros(())))
    wanted = head.state_dict()
    if {n: t.shape for n, t in tensors.items()} != {n: t.shape for n, t in wanted.items()}:
        size = len(tensors["other"]) if tensors.get("other", torch.zeros(())).ndim else "no"
        raise ValueError(f"{path} has a draft head for hidden size {size}, but this model has {head.hidden}")
    if len(counts) != vocabulary:
        raise ValueError(f"{path} has a draft head for {len(counts)} tokens, but this model has {vocabulary} tokens")
    if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
        raise ValueError(f"{path} has a diverged draft head: not all of its parameters are finite")
    head.load_state_dict(tensors)
    return counts.numpy().astype(np.int64), updates


class HeadTrainer:
    """Trains a head on the policy's text, from a buffer of the latest tokens and their hidden states.

    Args:
        head: Head to train in place.
        capacity: Tokens of the buffer, 2 D bytes each.
        steps: Draft positions to train.
        rate: Learning rate.
        seed: Seed of the draws from the buffer.
    """

    #: Adjacent tokens of a draw; they share the policy's distributions.
    SEGMENT = 16

    def __init__(self, head: DraftHead, capacity: int, steps: int = 4, rate: float = 1e-3, seed: int = 0):
        self.head, self.steps = head, steps
        gpu = head.scale.is_cuda
        #: Draws of an optimizer step; more of them take little longer on a GPU.
        self.segments = HEAD_POSITIONS // (self.SEGMENT * steps) if gpu else 8
        self._hidden = torch.zeros(capacity, head.hidden, dtype=torch.bfloat16, device=head.scale.device)
        self._token = np.zeros(capacity, dtype=np.int64)
        self._following = np.full(capacity, -1, dtype=np.int64)
        self._random = np.random.default_rng(seed)
        self._end = 0  # tokens added so far; a token's number is its position in that order
        self.optimizer = torch.optim.AdamW(head.parameters(), lr=rate, weight_decay=0.05, fused=gpu)

    def __len__(self) -> int:
        """Return the number of tokens in the buffer."""
        return min(self._end, len(self._token))

    def add(self, hidden: Tensor, tokens: np.ndarray, previous: np.ndarray) -> np.ndarray:
        """Add tokens of any number of texts. Returns their numbers, int64[n].

        Args:
            hidden: float[n, D], hidden states that gave the tokens.
            tokens: int64[n].
            previous: int64[n], number of the token before each in its text, or -1; ``-2 - entry`` for an entry of this
                call.
        """
        capacity = len(self._token)
        numbers = self._end + np.arange(len(tokens))
        previous = np.where(previous < -1, self._end - 2 - previous, previous)
        at = numbers % capacity
        # A state that is not finite would break every update that draws it.
        self._hidden[torch.from_numpy(at).to(self._hidden.device)] = hidden.nan_to_num(0, 0, 0).to(self._hidden.dtype)
        self._token[at], self._following[at] = tokens, -1
        self._end += len(tokens)
        linked = previous >= max(0, self._end - capacity)
        self._following[previous[linked] % capacity] = numbers[linked]
        return numbers

    def update(self, rows: PolicyRows, temperature: float) -> Tensor:
        """Make one optimizer step towards the policy's distributions at a temperature; skipped if not finite.

        Returns:
            Loss in nats per draft position above the policy's entropy, over the tokens of ``rows``.
        """
        token, at, inside = (torch.from_numpy(part).to(self._hidden.device) for part in self._drawn())
        token, hidden = rows.entry[token], self._hidden[at].float()
        with self.head.precision():
            loss = self._loss(rows, token, hidden, inside, temperature)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        if bool(norm.isfinite()):
            self.optimizer.step()
        return loss.detach()

    def _loss(self, rows: PolicyRows, token: Tensor, hidden: Tensor, inside: Tensor, temperature: float) -> Tensor:
        with torch.no_grad():
            target = (functional.linear(hidden[:, 1:], rows.output).float() / temperature).log_softmax(-1)
        state = hidden[:, : self.SEGMENT]
        loss, weight = state.new_zeros(()), state.new_zeros(())
        for j in range(1, self.steps + 1):
            state = self.head.step(state, self.head.embed(token[:, j - 1 : j - 1 + self.SEGMENT], rows))
            log_q = (self.head.logits(state, rows).float() / temperature).log_softmax(-1)
            wanted, valid = target[:, j - 1 : j - 1 + self.SEGMENT], inside[:, j : j + self.SEGMENT].to(state.dtype)
            loss = loss + (valid * (wanted.exp() * (wanted - log_q)).sum(-1)).sum()
            weight = weight + valid.sum()
        return loss / weight.clamp(min=1)

    def _drawn(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draw segments. Returns tokens, buffer indices and whether each continues its segment's text.

        Each is of shape [segments, SEGMENT + steps].
        """
        capacity, oldest = len(self._token), self._end - len(self)
        number = self._random.integers(oldest, self._end, self.segments)
        numbers = []
        for _ in range(self.SEGMENT + self.steps):
            numbers.append(number)
            following = self._following[number % capacity]
            number = np.where((number >= oldest) & (following >= oldest), following, -1)
        drawn = np.stack(numbers, axis=1)
        at = np.where(drawn >= 0, drawn, 0) % capacity
        return self._token[at], at, drawn >= 0
