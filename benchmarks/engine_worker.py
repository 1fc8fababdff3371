"""Worker extension of ``benchmarks.rollout``: a sampler that follows recorded responses, and the drafters.

Just before sampling, the worker raises the logit of the recorded token far above all others. Every arm then emits the
same tokens through the engine's sampler and rejection sampler. A draft token is accepted if and only if the policy of
the trace sampled it, an unbiased estimate of one-hot rejection sampling (see :mod:`benchmarks.replay`). The arms differ
only in time.
"""

from __future__ import annotations

import time
from typing import Any, ClassVar

import numpy as np

from verl_rhyme.engine.extension import RhymeWorkerMethods
from verl_rhyme.engine.history_loader import HistoryLoader
from verl_rhyme.engine.proposer import HistoryProposer
from verl_rhyme.history.reader import HistoryReader

#: Key in a request's ``extra_args``: number of the response to follow.
PATH = "path"
#: Far above any logit, and finite at every temperature.
_CERTAIN = 1e4


class ReplayProposer(HistoryProposer):
    """Our proposer, reset between measurements."""

    _loaders: ClassVar[dict[str, HistoryLoader]] = {}

    def begin(self, history_dir: str, namespace: str) -> None:
        """Reset the proposer and read another history."""
        loaders = self._loaders
        if history_dir not in loaders:
            loaders[history_dir] = HistoryLoader(HistoryReader(history_dir, namespace), self._config.wait_for_history)
        self._history = loaders[history_dir]
        self._start()
        self._requests.clear()
        self._finished.clear()


class OracleProposer:
    """Proposer that knows the responses: drafts all that fit, or another arm's accepted tokens (``schedule``).

    With another arm's schedule it takes the same steps without rejected drafts and without drafting time: the upper
    bound for that acceptance.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._longest = vllm_config.speculative_config.num_speculative_tokens
        self._runner: Any = None
        self.schedule: dict[int, list[int]] | None = None

    def load_model(self, *_: Any, **__: Any) -> None:
        pass

    def attach(self, model_runner: Any) -> None:
        self._runner = model_runner
        max_len = model_runner.vllm_config.model_config.max_model_len
        model_runner.effective_drafter_max_model_len = max_len + self._longest + 1

    def propose(self, sampled_token_ids: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
        follower: Follower = self._runner.follower
        drafts = []
        for row, sampled in enumerate(sampled_token_ids):
            number, position = follower.where(self._runner.input_batch.req_ids[row])
            path = follower.paths[number]
            # The step itself samples the last token.
            limit = min(self._longest, len(path) - position - 1) if sampled else 0
            if self.schedule is not None:
                limit = min(limit, self._scheduled(number, position))
            drafts.append(path[position : position + max(0, limit)])
        return drafts

    def _scheduled(self, number: int, position: int) -> int:
        """Return the accepted tokens of the other arm's step that starts at or before ``position``."""
        assert self.schedule is not None
        begins = 0
        for emitted in self.schedule.get(number, ()):
            if begins >= position:
                return emitted - 1 if begins == position else 0
            begins += emitted
        return 0


class Follower:
    """Makes a model runner sample recorded responses, and counts tokens."""

    def __init__(self, runner: Any) -> None:
        self.paths: list[list[int]] = []
        self._runner = runner
        self._numbers: dict[str, int] = {}  # by vLLM's request id
        self._positions: dict[str, int] = {}  # tokens emitted
        self._sample = runner._sample
        runner._sample, runner.follower = self._follow, self
        self.clear()

    def clear(self) -> None:
        self.steps = self.rows = self.emitted = self.drafted = self.passes = 0
        self.emissions: dict[int, list[int]] = {}
        self._numbers.clear()
        self._positions.clear()

    def where(self, request: str) -> tuple[int, int]:
        """Return the number of the response that a request follows, and its emitted tokens."""
        number = self._numbers.get(request)
        if number is None:
            number = self._numbers[request] = self._runner.requests[request].sampling_params.extra_args[PATH]
            self._positions[request] = 0
        return number, self._positions[request]

    def _follow(self, logits: Any, spec_decode_metadata: Any) -> Any:
        import torch

        batch = self._runner.input_batch
        rows = batch.num_reqs
        drafts = [0] * rows if spec_decode_metadata is None else spec_decode_metadata.num_draft_tokens
        wanted = []
        for request, drafted in zip(batch.req_ids, drafts, strict=True):
            number, position = self.where(request)
            path = self.paths[number]
            following = path[position : position + drafted + 1]
            # Beyond the end (asynchronous scheduling runs one step too far) any token will do.
            wanted.extend(following + path[-1:] * (drafted + 1 - len(following)))
        index = torch.tensor(wanted, device=logits.device)[:, None]
        logits.scatter_(1, index, _CERTAIN)
        output = self._sample(logits, spec_decode_metadata)
        if spec_decode_metadata is None:
            emitted = np.ones(rows, dtype=np.int64)
        else:
            emitted = (output.sampled_token_ids >= 0).sum(dim=1).tolist()
        for request, count in zip(batch.req_ids, emitted, strict=True):
            number, position = self.where(request)
            self._positions[request] = position + int(count)
            self.emissions.setdefault(number, []).append(int(count))
        self.steps += 1
        self.rows += rows
        self.emitted += int(sum(emitted))
        self.drafted += sum(drafts)
        return output


class ReplayWorker(RhymeWorkerMethods):
    """The ``worker_extension_cls`` of every arm."""

    def follow(self, our_sampler: bool = False) -> bool:
        """Install the follower once after the start; ``our_sampler`` installs our sampler also for other drafters."""
        runner = self.model_runner
        Follower(runner)
        drafter = getattr(runner, "drafter", None)
        runner.draft_seconds = 0.0
        if "rhyme" in (runner.vllm_config.additional_config or {}) and not isinstance(drafter, ReplayProposer):
            proposes = drafter.propose

            def counted(*args: Any, **kwargs: Any) -> Any:
                runner.follower.passes += 1
                return proposes(*args, **kwargs)

            drafter.propose = counted
            drafter = runner.rhyme_proposer = ReplayProposer(runner.vllm_config)  # next to the model's drafter
        if our_sampler or hasattr(drafter, "attach"):
            refused = self.install_sampler()
            assert not refused, refused
        if drafter is not None:
            if isinstance(drafter, ReplayProposer):
                self.attach_proposer()
            elif hasattr(drafter, "attach"):
                drafter.attach(runner)
            method = "take_in" if isinstance(drafter, ReplayProposer) else "propose"
            draft = getattr(drafter, method)

            def timed(*args: Any, **kwargs: Any) -> Any:
                started = time.perf_counter()
                try:
                    return draft(*args, **kwargs)
                finally:
                    runner.draft_seconds += time.perf_counter() - started

            setattr(drafter, method, timed)
        return drafter is not None

    def begin(self, paths: list[list[int]], history_dir: str, namespace: str, texts: list[list[list[int]]]) -> None:
        """Start a cell with its responses and the earlier responses that the drafter may know."""
        self.model_runner.follower.clear()
        self.model_runner.follower.paths = paths
        drafter = self._proposer or getattr(self.model_runner, "drafter", None)
        if isinstance(drafter, ReplayProposer):
            drafter.begin(history_dir, namespace)
        elif hasattr(drafter, "suffix_cache"):
            old = drafter.suffix_cache
            cache = type(old)(max_tree_depth=old.max_tree_depth, max_cached_requests=old.max_cached_requests)
            for i, (prompt, response) in enumerate(texts):
                cache.start_request(f"history-{i}", np.array(prompt, dtype=np.int32))
                cache.add_active_response(f"history-{i}", response)
                cache.stop_request(f"history-{i}")
            drafter.suffix_cache = cache

    def schedule(self, emissions: list[list[int]] | None) -> None:
        """Set the oracle's schedule: another arm's emitted tokens per step, a list ``[number, counts...]`` each."""
        drafter = self.model_runner.drafter
        drafter.schedule = None if emissions is None else {row[0]: row[1:] for row in emissions}

    def count(self) -> dict[str, Any]:
        """Return the counts since the last call, and reset them."""
        runner = self.model_runner
        follower = runner.follower
        counts = {
            "steps": follower.steps,
            "rows": follower.rows,
            "emitted": follower.emitted,
            "drafted": follower.drafted,
            "passes": follower.passes,  # of the model's drafter next to ours
            "draft_seconds": runner.draft_seconds,
            "emissions": [[number, *counts] for number, counts in follower.emissions.items()],
        }
        drafter = self._proposer
        if isinstance(drafter, ReplayProposer):
            counts["errors"] = drafter.totals()["errors"]
            cost = getattr(getattr(drafter._drafter, "weighing", None), "cost", None)
            rows = max(1, round(follower.rows / max(1, follower.steps)))
            counts["cost"] = None if cost is None else cost.prices(rows, 4 * rows)[[0, rows, 4 * rows]].tolist()
        runner.draft_seconds = 0.0
        follower.steps = follower.rows = follower.emitted = follower.drafted = follower.passes = 0
        follower.emissions = {}
        return counts
