"""The draft head inside vLLM: hidden states of what was sampled, rows of the policy, training between two steps.

vLLM hands hidden states to drafters of its own only; the model runner's ``propose_draft_token_ids`` is wrapped, so that
they are seen on their way there. Of a tensor-parallel engine the first rank drafts; the rows that the head needs of the
sharded embedding and output layers are gathered when weights were loaded, by all ranks together.

A head can fail, drafting and generation can't: an error turns it off, with one warning.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl_rhyme.drafting import head
from verl_rhyme.drafting.guesses import HEAD_BUFFER, MOST_TOKENS, Guesses
from verl_rhyme.drafting.head import DraftHead, HeadTrainer, Rows
from verl_rhyme.drafting.head_guesser import HeadGuesser

#: Value of ``drafting.head``: no file to begin with.
NEW = "new"

logger = logging.getLogger("vllm.verl_rhyme")

#: The rows are chosen anew where more than one of so many sampled tokens was not among them. After each time twice as
#: many are looked at, so many at most.
_UNKNOWN, _LOOKED_AT_MOST = 50, 1 << 16
#: Draft positions that a head guesses; other sources go on from there.
STEPS = 4
#: Of the engine's time, what training may take.
SHARE = 0.05
#: Tokens in the buffer before training begins.
_FEWEST = 256
#: Seconds of a step, at most: longer ones had a pause in them.
_LONGEST_STEP = 1.0


class EngineHead:
    """The head of one engine; of its ranks only the one that drafts asks it, all hold one for :meth:`gather`.

    Args:
        begin: ``drafting.head``: ``new``, or the file of a head to begin with.
        runner: vLLM's model runner, its model loaded.
        folder: Of this node's history; the head is kept next to it.
        drafts: Whether this rank drafts.
    """

    def __init__(self, begin: str, runner: Any, folder: str, drafts: bool):
        self._runner, self._drafts = runner, drafts
        self._vocabulary = runner.model_config.get_vocab_size()
        self._output, self._embedding, self._scale = _layers(runner.get_model())
        self._alone = self._output.tp_size == 1
        self._counts = np.zeros(self._vocabulary, dtype=np.int64)  # of each token, what was sampled
        self._listed = np.zeros(self._vocabulary, dtype=bool)
        self._unknown, self._seen, self._look_after = 0, 0, _FEWEST
        self._hidden: torch.Tensor | None = None
        self._drafted: list[int] | None = None
        self._number: dict[str, int] = {}  # of the latest token of each request, in the trainer's buffer
        self.failures = 0
        self._knows = 0  # steps of the optimizer before this run's
        self._earned = 0.0  # seconds that training may still take
        self.updates, self.seconds, self.training_seconds = 0, 0.0, 0.0
        self._losses: torch.Tensor | None = None  # their sum, where it was computed
        if not drafts:
            return
        # Next to the nodes' histories, which are emptied when a run begins.
        self._file = Path(folder).parent / f"head-{_digest(runner.model_config)}.safetensors"
        self.begin(begin)
        self._watch()

    def begin(self, begin: str) -> None:
        """Begin with a file, or anew (``drafting.head``); what was learnt since is forgotten."""
        hidden = self._runner.model_config.get_hidden_size()
        self._counts[:], self._listed[:], self._knows = 0, False, 0
        self._unknown, self._seen, self._look_after = 0, 0, _FEWEST
        self.updates, self.seconds, self.training_seconds, self._earned, self._losses = 0, 0.0, 0.0, 0.0, None
        self._number.clear()
        with _training():
            self._head = DraftHead(hidden).to(self._runner.device)
            self._head.half = self._runner.device.type != "cpu"
            self._load(begin)
            self._trainer = HeadTrainer(self._head, HEAD_BUFFER // (2 * hidden), STEPS)
        self._guesser = HeadGuesser(self._head, STEPS)
        if self._alone:
            self.gather()

    # ---- what the drafter asks ----

    @property
    def steps(self) -> int:
        """See :class:`verl_rhyme.drafting.guesses.Guesser`; a head that knows nothing yet is not asked."""
        return self._guesser.steps if self._drafts and self._knows + self.updates >= head.APPRENTICESHIP else 0

    def guess(self, position: int, going: np.ndarray, latest: np.ndarray) -> Guesses:
        """See :meth:`verl_rhyme.drafting.guesses.Guesser.guess`."""
        began = time.perf_counter()
        try:
            return self._guesser.guess(position, going, latest)
        except Exception:
            self._off("guessing")
            return np.full((len(latest), 1), -1, dtype=np.int32), np.zeros((len(latest), 1), dtype=np.float32)
        finally:
            self.seconds += time.perf_counter() - began

    @property
    def captured(self) -> int:
        """CUDA graphs that were captured, ever: a plan that had to is not what plans take."""
        return self._guesser.captured if self._drafts else 0

    # ---- what the proposer reports ----

    def admit(self, prompt: Any, temperature: float | None) -> None:
        """A request begins."""
        if not self._drafts:
            return
        tokens = np.asarray(prompt if prompt is not None else (), dtype=np.int64)
        np.add.at(self._counts, tokens[(tokens >= 0) & (tokens < self._vocabulary)], 1)
        if temperature and temperature > 0.05:
            self._guesser.temperature = float(temperature)

    def forget(self, req_id: str) -> None:
        """A request has ended."""
        self._number.pop(req_id, None)

    def sampled(self, req_ids: list[str], tokens: list[list[int]], rows: np.ndarray) -> None:
        """What a step sampled, before its rows are drafted for.

        Args:
            req_ids: Of every row of the batch.
            tokens: Of every row; none while its prompt is being prefilled.
            rows: int64[B], the rows that are drafted for: those with tokens.
        """
        if not self._drafts:
            return
        try:
            self._take_in(req_ids, tokens, rows)
        except Exception:
            self._off("taking in hidden states")

    def _take_in(self, req_ids: list[str], tokens: list[list[int]], rows: np.ndarray) -> None:
        hidden, drafted = self._hidden, self._drafted
        self._hidden = self._drafted = None
        spans = np.ones(len(tokens), dtype=np.int64) if drafted is None else np.asarray(drafted, dtype=np.int64) + 1
        if hidden is None or len(hidden) != spans.sum():
            self._guesser.begin(None)
            return
        starts = spans.cumsum() - spans
        said = np.fromiter((token for row in rows for token in tokens[row]), dtype=np.int64)
        each = np.fromiter((len(tokens[row]) for row in rows), dtype=np.int64)
        first = each.cumsum() - each
        at = np.repeat(starts[rows], each) + np.arange(len(said)) - np.repeat(first, each)
        states = hidden[torch.from_numpy(at).to(hidden.device)]
        np.add.at(self._counts, said, 1)
        self._unknown += int((~self._listed[said]).sum())
        self._seen += len(said)
        previous = -1 - np.arange(len(said))  # the entry before
        previous[first] = [self._number.get(req_ids[row], -1) for row in rows]
        numbers = self._trainer.add(states, said, previous)
        self._number.update(zip((req_ids[row] for row in rows), numbers[first + each - 1].tolist(), strict=True))
        if self._alone and self._seen >= self._look_after:
            if self._unknown * _UNKNOWN > self._seen:
                self.gather()
                full = int(self._listed.sum()) >= MOST_TOKENS  # then others would be unknown in their place
                self._look_after = 2 * self._look_after if full else min(2 * self._look_after, _LOOKED_AT_MOST)
            self._seen = self._unknown = 0
        self._guesser.begin(states[torch.from_numpy(first + each - 1).to(states.device)])

    def learn(self, seconds: float) -> None:
        """Train, as long as it may.

        Args:
            seconds: What the engine's last step took.
        """
        if not self._drafts or len(self._trainer) < _FEWEST or self._guesser.rows is None:
            return
        self._earned += SHARE * min(seconds, _LONGEST_STEP)
        if self._earned <= 0:
            return
        try:
            while self._earned > 0:
                began = time.perf_counter()
                with _training():
                    loss = self._trainer.update(self._guesser.rows, self._guesser.temperature)
                    loss = loss.nan_to_num(0, 0, 0)
                    self._losses = loss if self._losses is None else self._losses + loss
                    if self._runner.device.type != "cpu":
                        torch.accelerator.synchronize()  # what it took is what the next step waits
                took = time.perf_counter() - began
                self._earned -= took
                self.training_seconds += took
                self.updates += 1
            self._guesser.refresh()
        except Exception:
            self._off("training")

    # ---- rows and files ----

    def gather(self) -> None:
        """The policy's rows of the tokens that were said most; all ranks of an engine together, weights loaded.

        Raises:
            Exception: Any, on an engine of several ranks: one that left the others alone would hang them.
        """
        try:
            # Outside inference mode, so that they can be differentiated through.
            with torch.inference_mode(False), torch.no_grad():
                self._gather()
        except Exception:
            if not self._alone:
                raise
            self._off("copying the policy's rows")

    def _gather(self) -> None:
        tokens = self._said_most()
        if not len(tokens):
            return
        if self._drafts:
            self._guesser.rows = None  # its memory is that of the new ones
        kind = torch.float32 if self._runner.device.type == "cpu" else torch.bfloat16
        output = (_rows(self._output, tokens) * self._scale).to(kind)
        embedding = output if self._embedding is self._output else _rows(self._embedding, tokens).to(kind)
        if self._drafts:
            self._guesser.rows = Rows.of(tokens, output, embedding, self._vocabulary)
        del output, embedding
        if tokens.is_cuda:
            torch.cuda.empty_cache()  # vLLM's own pool does not see what is cached here
        if not self._drafts:
            return
        self._listed[:] = False
        self._listed[tokens.cpu().numpy()] = True

    def _said_most(self) -> torch.Tensor:
        """int64[M], at most :data:`MOST_TOKENS`; the drafting rank's on every rank."""
        order = np.argsort(-self._counts, kind="stable")[:MOST_TOKENS]
        tokens = torch.from_numpy(order[self._counts[order] > 0]).to(self._runner.device)
        if self._alone:
            return tokens
        from vllm.distributed.parallel_state import get_tp_group

        size = torch.tensor([len(tokens)], device=tokens.device)
        get_tp_group().broadcast(size, src=0)
        if not self._drafts:
            tokens = torch.zeros(int(size), dtype=torch.int64, device=tokens.device)
        return get_tp_group().broadcast(tokens, src=0) if int(size) else tokens

    def save(self) -> None:
        """Write the head next to the history."""
        if not (self._drafts and self.updates and self._file.parent.is_dir()):
            return
        try:
            head.save(self._file, self._head, self._counts, self._knows + self.updates)
        except Exception:
            logger.warning("the draft head could not be saved as %s", self._file, exc_info=True)

    def _load(self, begin: str) -> None:
        """Begin with a head of before, if there is one that fits."""
        if begin == NEW and not self._file.exists():
            return
        path = self._file if self._file.exists() else Path(begin)
        try:
            counts, self._knows = head.load(path, self._head, self._vocabulary)
            self._counts += counts
        except ValueError as error:
            logger.warning("the draft head begins anew: %s", error)

    # ---- seams ----

    def _watch(self) -> None:
        propose = self._runner.propose_draft_token_ids

        def watched(
            scheduler_output: Any,
            sampled_token_ids: Any,
            sampling_metadata: Any,
            hidden_states: torch.Tensor,
            sample_hidden_states: torch.Tensor,
            aux_hidden_states: Any,
            spec_decode_metadata: Any,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            if self._drafts:
                self._hidden = sample_hidden_states
                self._drafted = None if spec_decode_metadata is None else spec_decode_metadata.num_draft_tokens
            return propose(
                scheduler_output,
                sampled_token_ids,
                sampling_metadata,
                hidden_states,
                sample_hidden_states,
                aux_hidden_states,
                spec_decode_metadata,
                *args,
                **kwargs,
            )

        self._runner.propose_draft_token_ids = watched

    def _off(self, doing: str) -> None:
        if self._drafts:
            self.failures += 1
            logger.warning("no draft head from now on: %s failed; drafts come from text alone", doing, exc_info=True)
            self._guesser.rows = None
            self._counts[:] = 0  # other ranks then gather nothing
            self._hidden = None
            del self._trainer  # its memory is the engine's again
        self._drafts = False

    def training(self) -> dict[str, float]:
        """Since the start: updates, the sum of their losses (nats a draft position), seconds they took."""
        losses = 0.0 if self._losses is None else float(self._losses)
        return {"head_updates": self.updates, "head_loss": losses, "head_seconds": self.training_seconds}


def all_ranks(ok: bool) -> bool:
    """Whether it is so on every tensor-parallel rank of the engine; all call it."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return ok
    said = torch.tensor([int(ok)])
    torch.distributed.all_reduce(said, op=torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return bool(said)


@contextmanager
def _training() -> Iterator[None]:
    """vLLM's worker runs its steps in inference mode, where nothing is differentiated."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def _layers(model: torch.nn.Module) -> tuple[Any, Any, float]:
    """A model's output layer and embedding, the same where they are tied, and what logits are multiplied by.

    Raises:
        ValueError: It has none of vLLM's.
    """
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    layers = list(model.modules())
    embeddings = [layer for layer in layers if type(layer) is VocabParallelEmbedding]
    outputs = [layer for layer in layers if isinstance(layer, ParallelLMHead)] or embeddings
    if not embeddings:
        raise ValueError("its embedding is not vLLM's VocabParallelEmbedding")
    output, embedding = outputs[-1], embeddings[0]
    if output.weight is embedding.weight:
        embedding = output
    if output.weight.shape[1:] != embedding.weight.shape[1:]:
        raise ValueError(f"its embedding has {embedding.weight.shape[1]} columns, its output {output.weight.shape[1]}")
    scale = next((float(layer.scale) for layer in layers if isinstance(layer, LogitsProcessor)), 1.0)
    return output, embedding, scale


def _rows(layer: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Rows of a layer whose vocabulary may be sharded: [M, D] on every rank."""
    first, end = layer.shard_indices.org_vocab_start_index, layer.shard_indices.org_vocab_end_index
    here = (tokens >= first) & (tokens < end)
    rows = layer.weight[(tokens - first).clamp(0, max(end - first - 1, 0))]
    rows[~here] = 0
    if layer.tp_size == 1:
        return rows
    from vllm.distributed import tensor_model_parallel_all_reduce

    return tensor_model_parallel_all_reduce(rows)


def _digest(model_config: Any) -> str:
    """Which head is whose: by architecture, sizes and vocabulary, not by weights, which change."""
    kind = model_config.hf_config.model_type, model_config.get_hidden_size(), model_config.get_vocab_size()
    layers = getattr(model_config.hf_config, "num_hidden_layers", 0)
    return hashlib.sha256(repr((*kind, layers)).encode()).hexdigest()[:12]
