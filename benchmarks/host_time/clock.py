"""A device that is a clock: a model's forward pass takes a given time, and nothing else on the device takes any.

The worker extension replaces the forward pass of vLLM's model runner on a CPU by an entry in the clock, and its events
by times. The host's work is vLLM's and ours as on a GPU: it launches, goes on, and waits where vLLM waits. What a GPU
would compute is nearly free here: logits of a small vocabulary, whose next tokens are given, and draws of the maximum.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.host_time import TEXT, TOKENS, text
from verl_rhyme.engine import draw
from verl_rhyme.engine.extension import RhymeWorkerMethods

#: Logit of the next token, far above the others'.
_CERTAIN = 60.0
#: Linux: ends of sleeps are not delayed by more than a nanosecond.
_PR_SET_TIMERSLACK = 29


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0  # of a forward pass
        self.free = 0.0  # when the device has done all that was launched
        #: Of each step: when it was launched and will be done, its rows, draft tokens and prompt tokens.
        self.steps: list[tuple[float, float, int, int, int]] = []
        #: Of each part: its name, begin and end.
        self.parts: list[tuple[str, float, float]] = []
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)

    def launch(self, rows: int, drafted: int, prompt: int) -> None:
        now = time.perf_counter()
        self.free = max(now, self.free) + self.seconds
        self.steps.append((now, self.free, rows, drafted, prompt))

    def wait(self, until: float) -> None:
        while (left := until - time.perf_counter()) > 0:
            time.sleep(left)

    def timed(self, owner: Any, name: str, part: str) -> None:
        """Record when a method or function runs."""
        call = getattr(owner, name)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.parts.append((part, begun, time.perf_counter()))

        setattr(owner, name, recorded)


class Event:
    """In the place of ``torch.Event``."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._at = clock, 0.0

    def record(self, *_: Any) -> None:
        self._at = self._clock.free

    def synchronize(self) -> None:
        self._clock.wait(self._at)


class ClockWorker(RhymeWorkerMethods):
    """The ``worker_extension_cls`` of every arm."""

    def start_clock(self, ours: bool, length: int, parts: bool) -> None:
        """Use the clock from now on.

        ``ours``: with our sampler, and our proposer if the engine has one. ``length``: most tokens of a request.
        ``parts``: record those of steps with drafts, which takes time.
        """
        from vllm.v1.worker import gpu_model_runner

        from verl_rhyme.engine import steps

        runner, clock = self.model_runner, Clock()
        if ours:
            assert runner.speculative_config is None or self.attach_proposer()
            assert not (refusal := self.install_sampler()), refusal
        runner.clock, runner.prepare_inputs_event = clock, Event(clock)
        runner._model_forward = _Forward(runner, clock, length)
        runner.model.compute_logits = _logits
        draw.draw_on_cpu, draw.ranks = _drawn, _rank_one
        output = gpu_model_runner.AsyncGPUModelRunnerOutput
        output.__init__ = _with_event(output.__init__, clock)
        verifier = gpu_model_runner.RejectionSampler
        verifier.parse_output = staticmethod(_waiting(verifier.parse_output, clock))
        runner._to_list = _waiting(runner._to_list, clock)
        if parts and hasattr(runner, "rhyme_steps"):
            clock.timed(runner.rhyme_steps, "_take_in", "take in")
            clock.timed(runner.drafter, "take_in", "plan")
            clock.timed(steps, "add_drafts", "add drafts")
            clock.timed(runner, "_prepare_inputs", "inputs")
            clock.timed(runner, "_build_attention_metadata", "attention")

    def set_clock(self, seconds: float) -> None:
        """Set the time of a forward pass; the drafter forgets the prices of another device."""
        clock, drafter = self.model_runner.clock, getattr(self.model_runner, "drafter", None)
        if drafter is not None and clock.seconds != seconds:
            drafter._start()
        clock.seconds = seconds
        clock.steps.clear()
        clock.parts.clear()

    def clock_steps(self) -> tuple[list[tuple[float, float, int, int, int]], list[tuple[str, float, float]]]:
        """Return the steps and parts since :meth:`set_clock`."""
        clock = self.model_runner.clock
        return list(clock.steps), list(clock.parts)


class _Forward:
    """In the place of a forward pass: launches it, and gives each token the next one of its request's text."""

    def __init__(self, runner: Any, clock: Clock, length: int) -> None:
        self._runner, self._clock, self._length = runner, clock, length
        self._texts: dict[str, np.ndarray] = {}
        self._requests: list[str] = []  # of the rows of the table
        self._table = np.zeros((runner.max_num_reqs, length), dtype=np.int64)

    def __call__(self, *_: Any, positions: torch.Tensor, **__: Any) -> torch.Tensor:
        runner, batch = self._runner, self._runner.input_batch
        if batch.req_ids != self._requests:
            self._requests = list(batch.req_ids)
            for row, name in enumerate(self._requests):
                self._table[row] = self._text(name)
        rows, ends = batch.num_reqs, runner.query_start_loc.np[: batch.num_reqs + 1]
        tokens, drafted = int(ends[-1]), sum(map(len, batch.spec_token_ids))
        following = np.minimum(positions[:tokens].numpy() + 1, self._length - 1)
        hidden = torch.zeros(tokens, runner.model_config.get_hidden_size())
        hidden[:, 0] = torch.from_numpy(self._table[np.repeat(np.arange(rows), np.diff(ends)), following])
        self._clock.launch(rows, drafted, tokens - rows - drafted)
        return hidden

    def _text(self, name: str) -> np.ndarray:
        if name not in self._texts:
            request = self._runner.requests[name]
            prompt = request.prompt_token_ids
            response = text(self._length - len(prompt), *request.sampling_params.extra_args[TEXT])
            self._texts[name] = np.concatenate([prompt, response])
        return self._texts[name]


def _logits(hidden: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(hidden), TOKENS).scatter_(1, hidden[:, :1].long(), _CERTAIN)


def _drawn(logits: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return logits.argmax(dim=-1), torch.zeros(len(logits))


def _rank_one(_: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(tokens)


def _with_event(init: Callable[..., None], clock: Clock) -> Callable[..., None]:
    def initialise(made: Any, *args: Any, **kwargs: Any) -> None:
        init(made, *args, **kwargs)
        made.async_copy_ready_event = Event(clock)
        made.async_copy_ready_event.record()

    return initialise


def _waiting(read: Callable[..., Any], clock: Clock) -> Callable[..., Any]:
    """Let a synchronous step wait for its tokens; another thread reads those of an asynchronous step."""

    def reads(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            clock.wait(clock.free)
        return read(*args, **kwargs)

    return reads
