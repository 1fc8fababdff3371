"""Maximum number of started samples, by what is scarce: request slots, and KV caches.

Slots alone are not enough: with long responses a cache fills before its slots do, and vLLM preempts running requests.
A sample that calls tools is at an engine for a share of its life only, so more of them may start; of samples with
several conversations at once, fewer. But contexts wait in the cache meanwhile. If it is full, they are evicted and
prefilled again, and fewer samples are faster.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from verl_rhyme.planning.cost import TYPICAL, ReplicaCost
from verl_rhyme.scheduling.attempts import Record

#: Attempts after which an observation counts half: of lengths, and of shares of a life.
_HALF_LIFE, _SHARES_HALF_LIFE = 4096, 128
_DECAY, _SHARES_DECAY = 0.5 ** (1 / _HALF_LIFE), 0.5 ** (1 / _SHARES_HALF_LIFE)
#: Time of prefilling evicted contexts again, as a share of that of reading the weights in decoding steps, at which a
#: limit is best. The latter falls with the number of samples, the former rises with a higher power.
_AGAIN = 0.25
#: Samples that may start in addition for each ended one, while nothing is evicted.
_GAIN = 0.25
#: Tokens of a context that no prefix cache keeps: those of a block that is not full.
_BLOCK = 64


class Capacity:
    """Limit of started samples, measured from the records of ended attempts.

    At a random moment a response of ``L`` tokens is met in proportion to ``L``, with half of its tokens. A running
    request thus holds ``(sum p L + sum L**2 / 2) / sum L`` tokens, with ``p`` the tokens of its prompt. At most
    ``slots`` requests are at the engines, queued ones included, and ``room`` tokens of them (``None`` where unknown).
    Samples outside the engines count for neither, until contexts that waited for a tool turn out to be evicted. Then
    fewer samples start, until prefilling contexts again (``cost`` has its seconds) takes little time, but not fewer
    than keep as many requests at the engines as fit (and at most ``room`` in contexts of all).
    """

    def __init__(
        self, slots: int, room: int | None = None, state: Sequence[float] = (), cost: ReplicaCost = TYPICAL
    ) -> None:
        self._slots, self._room, self._cost = slots, room, cost
        self._lengths, self._held, self._engine_s, self._life_s, self._spared = [*state, *[0.0] * (5 - len(state))]
        self._caches = False  # whether a request has found its prompt: without prefix caching nothing is evicted
        self.share = 1.0  # of the replicas that serve

    @property
    def state(self) -> tuple[float, ...]:
        """For JSON."""
        return self._lengths, self._held, self._engine_s, self._life_s, self._spared

    def observe(self, records: Sequence[Record]) -> None:
        """Record the requests of an ended attempt, in their order."""
        steps = away = 0.0
        evicted = calls = 0
        for record in records:
            prompt, response = record["prompt_tokens"], record["response_tokens"]
            self._lengths = self._lengths * _DECAY + response
            self._held = self._held * _DECAY + response * (prompt + response / 2)
            # The engine may accept drafts beyond the end of a text: of short turns, more tokens than they have.
            steps += max(response - record.get("accepted_tokens", 0), record.get("verify_steps", 0))
            self._caches |= record.get("cached_tokens", 0) > 0
        for before, record in itertools.pairwise(records):
            context = before["prompt_tokens"] + before["response_tokens"]
            if record["prompt_tokens"] == context:  # the same turn goes on
                continue
            calls += 1
            away += max(0.0, record["queued_at"] - before["finished_at"])
            if not record.get("request", 1):  # of another conversation of the sample, whose prompt is new
                continue
            same = before["policy_version_end"] == record["policy_version_start"]  # new weights empty the caches
            if self._caches and same and record["prompt_tokens"] > context and record["response_tokens"]:
                evicted += max(0, context - _BLOCK - record.get("cached_tokens", context))
        if records and (life := records[-1]["finished_at"] - min(record["queued_at"] for record in records)) > 0:
            at_once = sum(record["finished_at"] - record["queued_at"] for record in records)
            self._engine_s = self._engine_s * _SHARES_DECAY + max(0.0, life - away, at_once)
            self._life_s = self._life_s * _SHARES_DECAY + life
        if calls:
            self._spare(steps, evicted)

    def _spare(self, steps: float, evicted: int) -> None:
        """Limit started samples by a sample with so many steps and evicted tokens."""
        most = self._most
        if self._room is None or not self.held:
            return
        replicas = max(1.0, self._slots / (2 * self._cost.slots))
        running = min(self._slots / 2, self._room / 2 / self.held, self.limit * self._present)
        rows = max(1.0, running) / replicas
        weights = _AGAIN * self._cost.step.weights(rows) * steps / rows
        again = self._cost.prefill * evicted
        spared = max(0.0, self._spared + _GAIN * (again / max(weights, 1e-9) - 1))
        fits = self._room / 2 / self.held
        self._spared = min(spared, max(0.0, most - min(2 * fits, fits / self._present)))

    @property
    def held(self) -> float:
        """Mean tokens that a running request holds; 0 before any ended."""
        return self._held / self._lengths if self._lengths else 0.0

    @property
    def away(self) -> float:
        """Share of a sample's life outside the engines, in tools."""
        return max(0.0, 1 - self._engine_s / self._life_s) if self._life_s else 0.0

    @property
    def _present(self) -> float:
        """Mean requests of a sample at the engines; several conversations have several."""
        return max(1e-2, self._engine_s / self._life_s) if self._life_s else 1.0

    @property
    def _most(self) -> float:
        """Most started samples, by slots and caches for their requests at the engines."""
        most = float(self._slots)
        if self._room is not None and self.held:
            most = min(most, self._room / self.held)
        return most / self._present

    @property
    def limit(self) -> int:
        return max(1, int(self.share * (self._most - self._spared)))
