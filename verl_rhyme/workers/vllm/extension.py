"""The worker extension: what the server can ask of each vLLM worker."""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from verl_rhyme.workers.vllm.proposer import HistoryProposer


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
        """Let this worker draw all its tokens, and verify drafts, with :mod:`verl_rhyme.workers.vllm.sampler`.

        Returns:
            Why it does not; empty when it does.
        """
        from verl_rhyme.workers.vllm import sampler  # here: it imports vLLM's samplers

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


class RhymeWorkerExtension(RhymeWorkerMethods, vLLMColocateWorkerExtension):
    """verl's extension and ours."""
