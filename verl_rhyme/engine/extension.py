"""The worker extension: what the server can ask of each vLLM worker."""

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
    """For any vLLM worker, also without verl: ``worker_extension_cls`` of a plain engine.

    Only methods: vLLM puts the extension last in the worker's inheritance and refuses names the worker has.
    """

    model_runner: Any

    def attach_proposer(self) -> bool:
        """Show the proposer its model runner; ``propose()`` alone sees token rows only.

        Returns:
            Whether this worker has a proposer of ours, or needs none: of a pipeline's stages only the last one samples.
        """
        from vllm.distributed.parallel_state import get_pp_group

        if not get_pp_group().is_last_rank:
            return True
        proposer = getattr(self.model_runner, "drafter", None)
        if not isinstance(proposer, HistoryProposer):
            return False
        proposer.attach(self.model_runner)
        return True

    def install_sampler(self) -> str:
        """Let this worker draw all its tokens, and verify drafts, with :mod:`verl_rhyme.engine.sampler`.

        Returns:
            Why it does not; empty when it does.
        """
        from verl_rhyme.engine import sampler  # here: it imports vLLM's samplers

        return sampler.install(self.model_runner)

    def refused_patches(self) -> list[str]:
        """Patches this worker needs and did not get, with the reason."""
        from verl_rhyme import patches

        return [str(status) for status in patches.refused(patches.VLLM)]

    def take_request_counts(self, ids: list[str]) -> dict[str, dict[str, Any]]:
        """Speculation counts of finished requests (``RequestMeta.id``), and forget them."""
        proposer = getattr(self.model_runner, "drafter", None)
        return proposer.take_counts(ids) if isinstance(proposer, HistoryProposer) else {}

    def draft_totals(self) -> dict[str, Any]:
        """See :meth:`HistoryProposer.totals`."""
        proposer = getattr(self.model_runner, "drafter", None)
        return proposer.totals() if isinstance(proposer, HistoryProposer) else {}


def _or_end(load: Callable[..., None], whole: bool = True) -> Callable[..., None]:
    """A worker that could not load its weights ends, and its engine with it: who sends them waits for its word without
    end (``BucketedWeightSender``), but an engine that died is noticed (:mod:`verl_rhyme.processes.deaths`)."""

    @functools.wraps(load)
    def loaded(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            load(self, *args, **kwargs)
            proposer = getattr(getattr(self, "model_runner", None), "drafter", None)
            if whole and isinstance(proposer, HistoryProposer):
                proposer.weights_loaded()
        except BaseException:
            logger.exception("this worker could not load its weights, and ends")
            logging.shutdown()
            os._exit(1)

    return loaded


class RhymeWorkerExtension(RhymeWorkerMethods, vLLMColocateWorkerExtension):
    """verl's extension and ours."""

    update_weights_from_ipc = _or_end(vLLMColocateWorkerExtension.update_weights_from_ipc)
    update_verl_delta_weights = _or_end(vLLMColocateWorkerExtension.update_verl_delta_weights, whole=False)
