"""The worker extension: methods that the server calls on each vLLM worker."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from verl_rhyme.engine.proposer import HistoryProposer

logger = logging.getLogger(__name__)


class RhymeWorkerMethods:
    """Methods for any vLLM worker, also without verl: ``worker_extension_cls`` of a plain engine.

    It has methods only: vLLM puts the extension last in the worker's bases and refuses names that the worker has.
    """

    model_runner: Any

    def attach_proposer(self) -> bool:
        """Give the proposer its model runner, as ``propose()`` sees token rows only.

        Returns:
            Whether this worker has our proposer or needs none: only the last pipeline stage samples.
        """
        from vllm.distributed.parallel_state import get_pp_group

        if not get_pp_group().is_last_rank:
            return True
        proposer = getattr(self.model_runner, "drafter", None)
        if not isinstance(proposer, HistoryProposer):
            return False
        proposer.attach(self.model_runner)
        return True

    def install_sampler(self, logprobs_mode: str | None = None) -> str:
        """Make this worker draw tokens and verify drafts with :mod:`verl_rhyme.engine.sampler`.

        Returns:
            Reason for a refusal; empty on success.
        """
        from verl_rhyme.engine import sampler  # imports vLLM's samplers

        return sampler.install(self.model_runner, logprobs_mode)

    def refused_patches(self) -> list[str]:
        """Return the refused patches of this worker, with reasons."""
        from verl_rhyme import patches

        return [str(status) for status in patches.refused(patches.VLLM)]

    def take_request_counts(self, ids: list[str]) -> dict[str, dict[str, Any]]:
        """Return and forget the speculation counts of finished requests (``RequestMeta.id``)."""
        proposer = getattr(self.model_runner, "drafter", None)
        return proposer.take_counts(ids) if isinstance(proposer, HistoryProposer) else {}

    def draft_totals(self) -> dict[str, Any]:
        """See :meth:`HistoryProposer.totals`."""
        proposer = getattr(self.model_runner, "drafter", None)
        return proposer.totals() if isinstance(proposer, HistoryProposer) else {}


def _exit_on_error(load: Callable[..., None], whole: bool = True) -> Callable[..., None]:
    """Wrap a weight loader so that the worker, and its engine with it, exits if loading fails.

    The sender (``BucketedWeightSender``) would wait forever for the worker's reply. A dead engine is detected
    (:mod:`verl_rhyme.processes.deaths`).
    """

    @functools.wraps(load)
    def loaded(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            load(self, *args, **kwargs)
            proposer = getattr(getattr(self, "model_runner", None), "drafter", None)
            if whole and isinstance(proposer, HistoryProposer):
                proposer.weights_loaded()
        except BaseException:
            logger.exception("this vLLM worker could not load its weights and exits")
            logging.shutdown()
            os._exit(1)

    return loaded


class RhymeWorkerExtension(RhymeWorkerMethods, vLLMColocateWorkerExtension):
    """verl's worker extension with our methods."""

    update_weights_from_ipc = _exit_on_error(vLLMColocateWorkerExtension.update_weights_from_ipc)
    update_verl_delta_weights = _exit_on_error(vLLMColocateWorkerExtension.update_verl_delta_weights, whole=False)
