"""The worker extension: methods that the server calls on each vLLM worker."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from verl_rhyme.engine.proposer import HistoryProposer
from verl_rhyme.processes.request import FIELD
from verl_rhyme.weights.samples import Held, is_compared
from verl_rhyme.weights.tracing import Trace

logger = logging.getLogger(__name__)


class RhymeWorkerMethods:
    """Methods for any vLLM worker, also without verl: ``worker_extension_cls`` of a plain engine.

    It has methods only: vLLM puts the extension last in the worker's bases and refuses names that the worker has.
    """

    model_runner: Any

    def attach_proposer(self) -> bool:
        """Give the proposer its model runner, as ``propose()`` sees token rows only.

        Return whether this worker has our proposer.
        """
        from vllm.distributed.parallel_state import get_tp_group

        from verl_rhyme.engine.steps import Steps

        runner = self.model_runner
        if getattr(runner, "drafter", None) is not None and self._proposer is None:
            settings = (runner.vllm_config.additional_config or {}).get(FIELD, {})
            runner.rhyme_proposer = HistoryProposer(runner.vllm_config) if "drafting" in settings else None
        if self._proposer is None:
            return False
        self._proposer.attach(runner)
        if runner.scheduler_config.async_scheduling:
            Steps(runner, self._proposer, get_tp_group())
        return True

    @property
    def _proposer(self) -> HistoryProposer | None:
        drafter = getattr(self.model_runner, "drafter", None)
        found = drafter if isinstance(drafter, HistoryProposer) else getattr(self.model_runner, "rhyme_proposer", None)
        return found

    def install_sampler(self, logprobs_mode: str | None = None) -> str:
        """Draw tokens and verify drafts with :mod:`verl_rhyme.engine.sampler`; return the reason for a refusal."""
        from verl_rhyme.engine import sampler  # imports vLLM's samplers

        return sampler.install(self.model_runner, logprobs_mode)

    def refused_patches(self) -> list[str]:
        from verl_rhyme import patches

        return [str(status) for status in patches.refused(patches.VLLM)]

    def take_request_counts(self, ids: list[str]) -> dict[str, dict[str, Any]]:
        return self._proposer.take_counts(ids) if self._proposer else {}

    def draft_totals(self) -> dict[str, Any]:
        return self._proposer.totals() if self._proposer else {}


def _exit_on_error(load: Callable[..., None]) -> Callable[..., None]:
    """Make the worker, and its engine with it, exit if loading weights fails.

    The sender (``BucketedWeightSender``) would wait forever for the worker's reply. A dead engine is detected
    (:mod:`verl_rhyme.processes.deaths`).
    """

    @functools.wraps(load)
    def loaded(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            load(self, *args, **kwargs)
        except BaseException:
            logger.exception("this vLLM worker could not load its weights and exits")
            logging.shutdown()
            os._exit(1)

    return loaded


class RhymeWorkerExtension(RhymeWorkerMethods, vLLMColocateWorkerExtension):
    """verl's worker extension with our methods; it samples the weights that it loads."""

    _held: Held
    _missing: dict[int, _Missing]  # by storage
    _trace_all: bool

    def held_weights(self) -> dict[str, Any]:
        return asdict(getattr(self, "_held", None) or Held())

    @_exit_on_error
    def update_weights_from_ipc(
        self, peft_config: dict | None = None, base_sync_done: bool = False, version: int | None = None, **kwargs: Any
    ) -> None:
        before = getattr(self, "_held", None)
        if peft_config and base_sync_done and before and before.version == version:  # adapters follow their base
            before.values = {name: each for name, each in before.values.items() if "lora_" not in name}
        else:
            config = self.model_runner.vllm_config
            self._held = Held(version, obstacle="the engines quantise" if config.quant_config else "")
        self._missing = {}
        for place, model in zip(("", "drafter."), self._iter_all_models(), strict=False):
            for name, each in model.named_parameters():
                self._missing.setdefault(each.untyped_storage().data_ptr(), _Missing(place + name, each.numel()))
        self._trace_all = before is None
        super().update_weights_from_ipc(peft_config=peft_config, base_sync_done=base_sync_done, **kwargs)
        if self._held.obstacle or (peft_config and base_sync_done):
            return
        language = _language_parameters(self.model_runner.model)
        left = {storage: each for storage, each in self._missing.items() if each.left > 0}
        none = {each.name: storage in language for storage, each in left.items() if each.left == each.size}
        if self._trace_all and self.model_runner.vllm_config.load_config.load_format == "dummy":
            self._held.blank = [name for name, needed in none.items() if needed]
        for name in [each.name for each in left.values() if is_compared(each.name, version)]:
            if not none.get(name, True):
                self._held.aside.append(name)
            elif self._trace_all or "expert" not in name:  # experts are traced in turn
                self._held.incomplete.append(name)

    update_verl_delta_weights = _exit_on_error(vLLMColocateWorkerExtension.update_verl_delta_weights)

    def _update_weights(
        self, weights: list[tuple[str, torch.Tensor]], peft_config: dict | None, base_sync_done: bool
    ) -> None:
        held = self._held
        compared = [each for each in weights if not held.obstacle and is_compared(each[0], held.version)]
        # adapters are loaded all at once; at first, all parameters must get something
        every = not held.obstacle and (self._trace_all or bool(peft_config and base_sync_done))
        traced = weights if every else compared
        names = {name for name, _ in traced}
        if others := [each for each in weights if each[0] not in names]:
            super()._update_weights(others, peft_config, base_sync_done)
        if not traced:
            return
        with Trace(compared, held.version) as trace:
            super()._update_weights(traced, peft_config, base_sync_done)
        held.obstacle = trace.error
        held.values |= trace.values
        held.altered += sorted(trace.altered)
        for storage, count in trace.written.items():
            if storage in self._missing:
                self._missing[storage].left -= count


class _Missing:
    """Elements of a parameter that have got no value in this sync."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size, self.left = name, size, size


def _language_parameters(model: Any) -> set[int]:
    """Storages of the parameters that text needs: no vision towers, which a run may never load."""
    with suppress(AttributeError, NotImplementedError):  # text only
        model = model.get_language_model()
    return {each.untyped_storage().data_ptr() for each in model.parameters()}
