"""A device that is a clock: a model's forward pass takes a given time, and nothing else on the device takes any.

The worker extension replaces the forward pass of vLLM's model runner on a CPU by an entry in the clock, and its events
by times. The host's work is vLLM's and ours as on a GPU: it launches, goes on, and waits where vLLM waits. The sampled
text is given: logits of a small vocabulary, so that the host draws as fast as it launches kernels on a GPU.
"""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

import numpy as np
import torch

from verl_rhyme.engine import draw
from verl_rhyme.engine.extension import RhymeWorkerMethods

#: Tokens that occur. vLLM and the drafter know the model's whole vocabulary.
TOKENS = 64
#: Key in a request's ``extra_args``: seeds of its text, and share of tokens that follow the first one's text.
TEXT = "text"
#: Logit of the next token, far above the others'.
_CERTAIN = 60.0


def text(length: int, common: int, own: int, follow: float) -> np.ndarray:
    """Return a text, int64[length], each of whose tokens is that of the text ``common`` with probability ``follow``."""
    shared = np.random.default_rng(common).integers(0, TOKENS, length)
    rng = np.random.default_rng((common, own))
    return np.where(rng.random(length) < follow, shared, rng.integers(0, TOKENS, length))


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0  # of a forward pass
        self.free = 0.0  # when the device has done all that was launched
        #: Of each step: when it was launched and will be done, its rows, draft tokens and prompt tokens.
        self.steps: list[tuple[float, float, int, int, int]] = []
        ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)  # PR_SET_TIMERSLACK: sleeps end when they should

    def launch(self, rows: int, drafted: int, prompt: int) -> None:
        now = time.perf_counter()
        self.free = max(now, self.free) + self.seconds
        self.steps.append((now, self.free, rows, drafted, prompt))

    def wait(self, until: float | None = None) -> None:
        while (left := (self.free if until is None else until) - time.perf_counter()) > 0:
            time.sleep(left)


class Event:
    """In the place of ``torch.Event``."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._at = clock, 0.0

    def record(self, *_: Any) -> None:
        self._at = self._clock.free

    def synchronize(self) -> None:
        self._clock.wait(self._at)

    def query(self) -> bool:
        return self._at <= time.perf_counter()


def _drawn(logits: torch.Tensor, rows: Any, scratch: Any, want_logprobs: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """In the place of a kernel that the host would launch: the texts are certain."""
    tokens = logits.argmax(dim=-1)
    return tokens, torch.zeros(len(tokens))


class ClockWorker(RhymeWorkerMethods):
    """The ``worker_extension_cls`` of every arm."""

    def start_clock(self, ours: bool, length: int) -> bool:
        """``ours``: our sampler, and our proposer if the engine has it. ``length``: most tokens of a request."""
        from vllm.v1.worker import gpu_model_runner

        runner, clock = self.model_runner, Clock()
        if ours:
            assert self.attach_proposer() or runner.speculative_config is None
            assert not (refusal := self.install_sampler()), refusal
        runner.clock, runner.prepare_inputs_event = clock, Event(clock)
        texts: dict[str, np.ndarray] = {}
        table, batch_of_table = np.zeros((runner.max_num_reqs, length), dtype=np.int64), []

        def forward(input_ids: Any = None, positions: Any = None, **_: Any) -> Any:
            batch = runner.input_batch
            ids, rows = batch.req_ids, batch.num_reqs
            if ids != batch_of_table:
                for row, name in enumerate(ids):
                    if name not in texts:
                        extra = runner.requests[name].sampling_params.extra_args[TEXT]
                        prompt = runner.requests[name].prompt_token_ids
                        texts[name] = np.concatenate([prompt, text(length - len(prompt), *extra)])
                    table[row] = texts[name]
                batch_of_table[:] = ids
            ends = runner.query_start_loc.np[: rows + 1]
            drafted = sum(map(len, batch.spec_token_ids))
            tokens = int(ends[-1])
            at = np.minimum(positions[:tokens].numpy() + 1, length - 1)
            hidden = torch.zeros(tokens, runner.model_config.get_hidden_size())
            hidden[:, 0] = torch.from_numpy(table[np.repeat(np.arange(rows), np.diff(ends)), at])
            clock.launch(rows, drafted, tokens - rows - drafted)
            return hidden

        def compute_logits(hidden: Any) -> Any:
            logits = torch.zeros(len(hidden), TOKENS)
            return logits.scatter_(1, hidden[:, :1].long(), _CERTAIN)

        runner._model_forward, runner.model.compute_logits = forward, compute_logits
        draw.draw_on_cpu, draw.ranks = _drawn, lambda logits, tokens: torch.ones_like(tokens)
        to_list, parse = runner._to_list, gpu_model_runner.RejectionSampler.parse_output

        def waiting(read: Any) -> Any:
            def reads(*args: Any, **kwargs: Any) -> Any:
                if threading.current_thread() is threading.main_thread():  # else a copy that was waited for
                    clock.wait()
                return read(*args, **kwargs)

            return reads

        runner._to_list = waiting(to_list)
        gpu_model_runner.RejectionSampler.parse_output = staticmethod(waiting(parse))
        _give_events(gpu_model_runner.AsyncGPUModelRunnerOutput, clock)
        return True

    def stamp_parts(self) -> None:
        """Record when each part of a step begins and ends."""
        runner = self.model_runner
        runner.parts = parts = []

        def wrap(owner: Any, name: str) -> None:
            method = getattr(owner, name)

            def timed(*args: Any, **kwargs: Any) -> Any:
                begun = time.perf_counter()
                try:
                    return method(*args, **kwargs)
                finally:
                    parts.append((name, begun, time.perf_counter()))

            setattr(owner, name, timed)

        for name in (
            "execute_model", "sample_tokens", "_update_states", "_prepare_inputs", "_build_attention_metadata", "_preprocess",
            "_determine_batch_execution_and_padding", "_model_forward", "_sample", "_bookkeeping_sync", "propose_draft_token_ids", "_get_slot_mappings",
        ):
            wrap(runner, name)
        wrap(runner.clock, "wait")
        if hasattr(runner, "drafter"):
            wrap(runner.drafter, "take_in")
            if runner.drafter._drafter: wrap(runner.drafter._drafter, "step")
        from verl_rhyme.engine import steps
        wrap(steps, "add_drafts"); wrap(steps, "_fill")
        if hasattr(runner, "rhyme_steps"): wrap(runner.rhyme_steps, "_update"); wrap(runner.rhyme_steps, "_take_in"); wrap(runner.rhyme_steps, "_settle")
        import verl_rhyme.drafting.kernels as k
        import verl_rhyme.drafting.regrowth as rg
        for n in ("observe", "plan"): wrap(k, n)
        wrap(rg, "plan")
        d = runner.drafter._drafter if hasattr(runner, "drafter") else None
        if d:
            for n in ("observe", "terms", "grant", "plans", "least"): wrap(d.weighing, n)
        for n in ("get_output",): wrap(steps._Output, n)

    def line_profile(self, names: list[str]) -> None:
        import sys; sys.path.append("/tmp/lp")
        from line_profiler import LineProfiler
        runner = self.model_runner
        runner.lp = lp = LineProfiler()
        import importlib
        for each in names:
            module, _, q = each.partition(":")
            o = runner if module == "runner" else importlib.import_module(module)
            for part in q.split("."): o = getattr(o, part)
            lp.add_function(getattr(o, "__func__", o))
        lp.enable_by_count()

    def lines(self) -> str:
        import io
        out = io.StringIO(); self.model_runner.lp.print_stats(out, output_unit=1e-6, stripzeros=True); return out.getvalue()

    def take_parts(self) -> list[tuple[str, float, float]]:
        parts = list(self.model_runner.parts)
        self.model_runner.parts.clear()
        return parts

    def set_clock(self, seconds: float) -> None:
        self.model_runner.clock.seconds = seconds
        self.model_runner.clock.steps.clear()

    def clock_steps(self) -> list[tuple[float, float, int, int, int]]:
        return list(self.model_runner.clock.steps)


def _give_events(output: Any, clock: Clock) -> None:
    """Give vLLM's outputs of asynchronous steps an event of the clock."""
    init = output.__init__

    def initialise(made: Any, *args: Any, **kwargs: Any) -> None:
        init(made, *args, **kwargs)
        made.async_copy_ready_event = Event(clock)
        made.async_copy_ready_event.record()

    output.__init__ = initialise
