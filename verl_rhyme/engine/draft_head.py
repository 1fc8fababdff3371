"""The draft head inside vLLM: hidden states of sampled tokens, the policy's rows, training between steps.

vLLM passes hidden states to its own drafters only, so the model runner's ``propose_draft_token_ids`` is wrapped to
capture them. In a tensor-parallel engine the first rank drafts. All ranks together gather the head's rows of the
sharded embedding and output layers after weights were loaded.

An error turns the head off, with one warning; drafting and generation continue without it.
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
from verl_rhyme.drafting.head import DraftHead, HeadTrainer, PolicyRows
from verl_rhyme.drafting.head_inference import HeadInference
from verl_rhyme.drafting.head_interface import HEAD_BUFFER, MOST_TOKENS, Proposals

#: Value of ``drafting.head`` for a new head.
NEW = "new"

logger = logging.getLogger("vllm.verl_rhyme")

#: The rows are chosen again if more than one in ``_UNKNOWN`` sampled tokens has no row. The number of tokens between
#: checks doubles each time, up to ``_CHECK_AT_MOST``.
_UNKNOWN, _CHECK_AT_MOST = 50, 1 << 16
#: Draft positions that a head proposes tokens for; other sources draft the later ones.
STEPS = 4
#: Share of the engine's time for training.
SHARE = 0.05
#: Tokens in the buffer before training begins.
_FEWEST = 256
#: Keys of :meth:`EngineHead.training`.
TRAINING_TOTALS = ("head_updates", "head_loss", "head_seconds")
#: Upper bound in seconds for the time of a step: longer steps contain a pause.
_LONGEST_STEP = 1.0


class EngineHead:
    """The draft head of one engine. Only the drafting rank uses it; every rank holds one for :meth:`gather`.

    Args:
        begin: Value of ``drafting.head``: ``new``, or the file of the initial head.
        runner: vLLM's model runner with a loaded model.
        folder: Folder of this node's history; the head is saved next to it.
        drafts: Whether this rank drafts.
    """

    def __init__(self, begin: str, runner: Any, folder: str, drafts: bool):
        self._runner, self._drafts = runner, drafts
        self._vocabulary = runner.model_config.get_vocab_size()
        self._output, self._embedding, self._scale = _layers(runner.get_model())
        self._alone = self._output.tp_size == 1
        self._hidden: torch.Tensor | None = None
        self._drafted: list[int] | None = None
        self.failures = 0
        self._reset()
        if not drafts:
            return
        # Next to the nodes' histories, because these are emptied when a run begins.
        self._file = Path(folder).parent / f"head-{_digest(runner.model_config)}.safetensors"
        self.begin(begin)
        self._capture_hidden_states()

    def _reset(self) -> None:
        self._counts = np.zeros(self._vocabulary, dtype=np.int64)  # how often each token was sampled
        self._listed = np.zeros(self._vocabulary, dtype=bool)  # tokens with a row
        self._unknown, self._seen, self._check_after = 0, 0, _FEWEST  # sampled tokens without a row, and all of them
        self._number: dict[str, int] = {}  # number of each request's latest token in the trainer's buffer
        self._loaded_updates = 0  # optimizer steps of the loaded head
        self._training_left = 0.0  # seconds
        self.updates, self.seconds, self.training_seconds = 0, 0.0, 0.0
        self._losses: torch.Tensor | None = None  # sum of the losses, on the device

    def begin(self, begin: str) -> None:
        """Load a head from a file, or create a new one (``drafting.head``); drops the present parameters."""
        self._reset()
        hidden = self._runner.model_config.get_hidden_size()
        with _training():
            self._head = DraftHead(hidden).to(self._runner.device)
            self._head.half = self._runner.device.type != "cpu"
            self._load(begin)
            self._trainer = HeadTrainer(self._head, HEAD_BUFFER // (2 * hidden), STEPS)
        self._inference = HeadInference(self._head, STEPS)
        if self._alone:
            self.gather()

    # ---- Head, used by the drafter ----

    @property
    def steps(self) -> int:
        """See :class:`verl_rhyme.drafting.head_interface.Head`; 0 for an untrained head."""
        return self._inference.steps if self._drafts and self._loaded_updates + self.updates >= head.MIN_UPDATES else 0

    def propose(self, position: int, active: np.ndarray, latest: np.ndarray) -> Proposals:
        """See :meth:`verl_rhyme.drafting.head_interface.Head.propose`."""
        began = time.perf_counter()
        try:
            return self._inference.propose(position, active, latest)
        except Exception:
            self._turn_off("proposing tokens")
            return np.full((len(latest), 1), -1, dtype=np.int32), np.zeros((len(latest), 1), dtype=np.float32)
        finally:
            self.seconds += time.perf_counter() - began

    @property
    def captured(self) -> int:
        """CUDA graphs captured so far; the time of a plan that captured one is not typical."""
        return self._inference.captured if self._drafts else 0

    # ---- calls of the proposer ----

    def admit(self, prompt: Any, temperature: float | None) -> None:
        """Learn the prompt and temperature of a new request."""
        if not self._drafts:
            return
        tokens = np.asarray(prompt if prompt is not None else (), dtype=np.int64)
        np.add.at(self._counts, tokens[(tokens >= 0) & (tokens < self._vocabulary)], 1)
        if temperature and temperature > 0.05:
            self._inference.temperature = float(temperature)

    def forget(self, req_id: str) -> None:
        """Forget a finished request."""
        self._number.pop(req_id, None)

    def observe(self, req_ids: list[str], tokens: list[list[int]], rows: np.ndarray) -> None:
        """Learn from the sampled tokens of a step, before its rows are drafted for.

        Args:
            req_ids: vLLM's request id of every row of the batch.
            tokens: Sampled tokens of every row; none while its prompt is prefilled.
            rows: int64[B], the rows with tokens, which are drafted for.
        """
        if not self._drafts:
            return
        try:
            self._observe(req_ids, tokens, rows)
        except Exception:
            self._turn_off("reading hidden states")

    def _observe(self, req_ids: list[str], tokens: list[list[int]], rows: np.ndarray) -> None:
        hidden, drafted = self._hidden, self._drafted
        self._hidden = self._drafted = None
        spans = np.ones(len(tokens), dtype=np.int64) if drafted is None else np.asarray(drafted, dtype=np.int64) + 1
        if hidden is None or len(hidden) != spans.sum():
            self._inference.begin(None)
            return
        starts = spans.cumsum() - spans
        sampled = np.fromiter((token for row in rows for token in tokens[row]), dtype=np.int64)
        each = np.fromiter((len(tokens[row]) for row in rows), dtype=np.int64)
        first = each.cumsum() - each
        at = np.repeat(starts[rows], each) + np.arange(len(sampled)) - np.repeat(first, each)
        states = hidden[torch.from_numpy(at).to(hidden.device)]
        np.add.at(self._counts, sampled, 1)
        self._unknown += int((~self._listed[sampled]).sum())
        self._seen += len(sampled)
        previous = -1 - np.arange(len(sampled))  # the entry before
        previous[first] = [self._number.get(req_ids[row], -1) for row in rows]
        numbers = self._trainer.add(states, sampled, previous)
        self._number.update(zip((req_ids[row] for row in rows), numbers[first + each - 1].tolist(), strict=True))
        if self._alone and self._seen >= self._check_after:
            if self._unknown * _UNKNOWN > self._seen:
                self.gather()
                full = int(self._listed.sum()) >= MOST_TOKENS  # a new row then costs another token its row
                self._check_after = 2 * self._check_after if full else min(2 * self._check_after, _CHECK_AT_MOST)
            self._seen = self._unknown = 0
        self._inference.begin(states[torch.from_numpy(first + each - 1).to(states.device)])

    def train(self, seconds: float) -> None:
        """Train for the time share :data:`SHARE` of the engine's last step, which took ``seconds``."""
        if not self._drafts or len(self._trainer) < _FEWEST or self._inference.rows is None:
            return
        self._training_left += SHARE * min(seconds, _LONGEST_STEP)
        if self._training_left <= 0:
            return
        try:
            while self._training_left > 0:
                began = time.perf_counter()
                with _training():
                    loss = self._trainer.update(self._inference.rows, self._inference.temperature)
                    loss = loss.nan_to_num(0, 0, 0)
                    self._losses = loss if self._losses is None else self._losses + loss
                    if self._runner.device.type != "cpu":
                        torch.accelerator.synchronize()  # the next step waits for training, so this time counts
                took = time.perf_counter() - began
                self._training_left -= took
                self.training_seconds += took
                self.updates += 1
            self._inference.refresh()
        except Exception:
            self._turn_off("training")

    # ---- rows and files ----

    def gather(self) -> None:
        """Copy the policy's rows of the most frequent tokens; all ranks of an engine call it after loading weights.

        Raises:
            Exception: Any error on an engine of several ranks, because the other ranks would hang without this one.
        """
        try:
            # Outside inference mode, so that gradients can flow through the rows.
            with torch.inference_mode(False), torch.no_grad():
                self._gather()
        except Exception:
            if not self._alone:
                raise
            self._turn_off("copying the policy's rows")

    def _gather(self) -> None:
        tokens = self._most_frequent()
        if not len(tokens):
            return
        if self._drafts:
            self._inference.rows = None  # frees their memory for the new rows
        kind = torch.float32 if self._runner.device.type == "cpu" else torch.bfloat16
        output = (_rows(self._output, tokens) * self._scale).to(kind)
        embedding = output if self._embedding is self._output else _rows(self._embedding, tokens).to(kind)
        if self._drafts:
            self._inference.rows = PolicyRows.of(tokens, output, embedding, self._vocabulary)
        del output, embedding
        if tokens.is_cuda:
            torch.cuda.empty_cache()  # vLLM's memory pool cannot use torch's cache
        if not self._drafts:
            return
        self._listed[:] = False
        self._listed[tokens.cpu().numpy()] = True

    def _most_frequent(self) -> torch.Tensor:
        """Return the most frequent tokens of the drafting rank, int64[M], at most :data:`MOST_TOKENS`."""
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
            head.save(self._file, self._head, self._counts, self._loaded_updates + self.updates)
        except Exception:
            logger.warning("cannot save the draft head as %s", self._file, exc_info=True)

    def _load(self, begin: str) -> None:
        """Load the saved head or the file ``begin``, if one is present and fits."""
        if begin == NEW and not self._file.exists():
            return
        path = self._file if self._file.exists() else Path(begin)
        try:
            counts, self._loaded_updates = head.load(path, self._head, self._vocabulary)
            self._counts += counts
        except ValueError as error:
            logger.warning("cannot load the draft head: %s; a new one is trained", error)

    # ---- hooks in vLLM ----

    def _capture_hidden_states(self) -> None:
        propose = self._runner.propose_draft_token_ids

        def capturing(
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

        self._runner.propose_draft_token_ids = capturing

    def _turn_off(self, doing: str) -> None:
        if self._drafts:
            self.failures += 1
            logger.warning("the draft head is off: %s failed; drafts come from text alone", doing, exc_info=True)
            self._inference.rows = None
            self._counts[:] = 0  # other ranks then gather nothing
            self._hidden = None
            del self._trainer  # frees its memory
        self._drafts = False

    def training(self) -> dict[str, float]:
        """Return the updates since the start, the sum of their losses (nats a draft position), and their seconds."""
        losses = 0.0 if self._losses is None else float(self._losses)
        return dict(zip(TRAINING_TOTALS, (self.updates, losses, self.training_seconds), strict=True))


def all_ranks(ok: bool) -> bool:
    """Return whether ``ok`` is true on every tensor-parallel rank of the engine; all ranks call it."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return ok
    lowest = torch.tensor([int(ok)])
    torch.distributed.all_reduce(lowest, op=torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return bool(lowest)


@contextmanager
def _training() -> Iterator[None]:
    """Leave the inference mode in which vLLM's worker runs its steps, to compute gradients."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def _layers(model: torch.nn.Module) -> tuple[Any, Any, float]:
    """Return a model's output layer, its embedding (the same layer if tied) and the scale of its logits.

    Raises:
        ValueError: The model does not use vLLM's embedding, or the sizes of the two layers differ.
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
    """Return rows of a layer whose vocabulary may be sharded: [M, D] on every rank."""
    first, end = layer.shard_indices.org_vocab_start_index, layer.shard_indices.org_vocab_end_index
    here = (tokens >= first) & (tokens < end)
    rows = layer.weight[(tokens - first).clamp(0, max(end - first - 1, 0))]
    rows[~here] = 0
    if layer.tp_size == 1:
        return rows
    from vllm.distributed import tensor_model_parallel_all_reduce

    return tensor_model_parallel_all_reduce(rows)


def _digest(model_config: Any) -> str:
    """Return an id of the models that may share a head: by architecture, sizes and vocabulary, not by weights."""
    kind = model_config.hf_config.model_type, model_config.get_hidden_size(), model_config.get_vocab_size()
    layers = getattr(model_config.hf_config, "num_hidden_layers", 0)
    return hashlib.sha256(repr((*kind, layers)).encode()).hexdigest()[:12]
