"""An engine with a virtual clock: the real drafter, made-up texts, and a machine of which only the prices are known."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from tests.unit.drafting.engine import agreement
from verl_rhyme.config import DraftingConfig
from verl_rhyme.drafting.adaptive import AdaptiveDrafter
from verl_rhyme.drafting.policy import DecodeStep, RequestCounts
from verl_rhyme.history.record import PromptHistory, Trajectory
from verl_rhyme.planning.experts import Experts

VOCABULARY, PROMPT, SAMPLES = 30_000, 8, 4


@dataclass
class Machine:
    """Seconds of a step: a number of rows, of draft tokens, of prompt tokens, and of tokens in the rows.

    Attributes:
        plan: Seconds of the drafter in a planned step, and of each row of it (``row_plan``).
        wait: Seconds of the host in a step that waits for tokens, None for a synchronous engine, where all do.
        noise: Standard deviation of the logarithm.
        model: Seconds of the model's own drafter, None without; and the share of its tokens that are right.
        experts: Those of the policy's layers, None if it is dense.
    """

    seconds: Callable[[int, int, int, int], float]
    plan: float = 0.0
    row_plan: float = 0.0
    wait: float | None = None
    noise: float = 0.02
    model: float | None = None
    right: float = 0.0
    experts: Experts | None = None


def linear(base, row, token, **more):
    """Return a machine whose steps take time by tokens."""
    return Machine(lambda rows, drafted, prompt, text: base + row * rows + token * (drafted + prompt), **more)


def knee(flat, at, **more):
    """Return a machine whose steps take the same time up to so many tokens, then a time in proportion."""
    return Machine(lambda rows, drafted, prompt, text: flat * max(1.0, (rows + drafted + prompt) / at), **more)


class Texts:
    """Prompts of which each sample follows a template with probability ``follow`` a token."""

    def __init__(self, follow, longest, seed=0):
        self.follow, self._longest, self._rng = follow, longest, np.random.default_rng(seed)
        self._templates, self._histories = {}, {}

    def sample(self, prompt, length):
        if prompt not in self._templates:
            self._templates[prompt] = self._rng.integers(0, VOCABULARY, self._longest).astype(np.int32)
        own = self._rng.integers(0, VOCABULARY, length).astype(np.int32)
        follows = self._rng.random(length) < self.follow
        return np.where(follows, self._templates[prompt][:length], own).astype(np.int32)

    def history(self, key):
        if key not in self._histories:
            texts = [self.sample(int.from_bytes(key, "big"), self._longest) for _ in range(SAMPLES)]
            self._histories[key] = PromptHistory.build([Trajectory(key, t, 0.0, 0, 0, s) for s, t in enumerate(texts)])
        return self._histories[key]


@dataclass
class Log:
    """One entry a step."""

    rows: list[int] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    stock: list[float] = field(default_factory=list)  # seconds of the step without drafts
    planned: list[bool] = field(default_factory=list)

    def gain(self, begin=0, end=None, wider=0):
        """Return tokens per second over those of the same steps without drafts; ``wider``: of steps with more rows."""
        columns = self.rows, self.emitted, self.seconds, self.stock
        rows, emitted, seconds, stock = (np.array(column[begin:end]) for column in columns)
        wide = rows > wider
        return float(emitted[wide].sum() / seconds[wide].sum() / (rows[wide].sum() / stock[wide].sum()))


class ModelAlone:
    """A draft policy that drafts all tokens of the model's own drafter in each step, as verl with MTP does."""

    planned, waits = False, True

    def start(self, *_):
        pass

    def proposes(self, _):
        return True

    def step(self, done):
        longest = np.minimum(done.limits, min(done.budget, done.chains.shape[1]))
        return [chain[:size].tolist() for chain, size in zip(done.chains, longest, strict=True)]

    def finish(self, _):
        return RequestCounts()


class VirtualEngine:
    """An engine of ``slots`` rows. Each response has its length from ``lengths``; four in a row have one prompt."""

    def __init__(self, machine, texts, slots, seed=0, verifies=True, drafter=None, **config):
        self.machine, self.texts, self._verifies = machine, texts, verifies
        config = DraftingConfig(**config, model="mtp" if machine.model is not None else None)
        if drafter is None:
            drafter = AdaptiveDrafter(config, texts.history, slots, VOCABULARY, experts=machine.experts)
        self.drafter = drafter
        self._rng, self._slots, self._names = np.random.default_rng(seed), slots, count()
        self._luck = [np.random.default_rng([seed, row]) for row in range(slots)]
        self._ended = False
        #: Whether steps were to wait, after the last steps. An asynchronous engine asks three steps before the step.
        self._waits = deque([False] * 3, maxlen=3)
        self.log = Log()

    def run(self, lengths, steps=10**9):
        """Generate responses of these lengths, at most ``steps`` steps."""
        lengths, longest = iter(lengths), PROMPT + self.texts._longest + 64
        tokens, length = np.zeros((self._slots, longest), np.int32), np.zeros(self._slots, np.int64)
        drafted, accepted = np.zeros(self._slots, np.int64), np.zeros(self._slots, np.int64)
        ends, names, wholes, luck = np.zeros(self._slots, np.int64), {}, {}, {}
        planning, started, ahead = 0.0, len(self.log.rows), False
        while len(self.log.rows) - started < steps:
            admitted = []
            for row in sorted(set(range(self._slots)) - set(names)):
                size = next(lengths, None)
                if size is None:
                    break
                number = next(self._names)
                names[row], prompt = f"{number}", number // SAMPLES
                text = self.texts.sample(prompt, size)
                whole = wholes[row] = np.concatenate([PROMPT * number + np.arange(PROMPT), text])
                luck[row] = self._luck[row].random(len(whole))
                tokens[row, :PROMPT], length[row], ends[row] = whole[:PROMPT], PROMPT, len(whole)
                drafted[row] = accepted[row] = 0
                admitted.append(row)
                self.drafter.start(names[row], prompt.to_bytes(16, "big"))
            if not names:
                break
            live = np.array(sorted(names))
            new = np.zeros(len(live), np.int64)
            for i, row in enumerate(live.tolist()):
                whole, at = wholes[row], int(length[row])
                accepted[row] = agreement(self._drafts[row], whole[at:]) if drafted[row] and self._verifies else 0
                new[i] = min(accepted[row] + 1, ends[row] - at)
                tokens[row, at : at + new[i]] = whole[at : at + new[i]]
                length[row] = at + new[i]
            size, prompt = int(drafted[live].sum()), (PROMPT - 1) * len(admitted)
            text = int(length[live].sum())
            noise = np.exp(self.machine.noise * self._rng.standard_normal())
            seconds = self.machine.seconds(len(live), size, prompt, text) * noise
            drafting = self.machine.wait is None or self._waits[0]
            next_ahead = not drafting and not size
            chains = None
            if self.machine.model is not None and not next_ahead:
                proposes = drafting and self.drafter.proposes(len(live))
                seconds += self.machine.model * proposes
                chains = np.full((len(live), 3 * proposes), VOCABULARY - 1, np.int32)
                for chain, row in zip(chains, live.tolist(), strict=True):
                    at = slice(length[row], length[row] + len(chain))  # a token is right wherever its chain began
                    chain[: len(wholes[row][at])] = np.where(
                        luck[row][at] < self.machine.right, wholes[row][at], VOCABULARY - 1
                    )
            self.log.rows.append(len(live))
            self.log.emitted.append(int(new.sum()))
            exposed = 0.0 if self.machine.wait is None or ahead else self.machine.wait
            self.log.seconds.append(seconds + exposed + planning)
            self.log.stock.append(self.machine.seconds(len(live), 0, prompt, text) * noise)
            done = DecodeStep(
                requests=[names[row] for row in live.tolist()],
                rows=live,
                tokens=tokens,
                lengths=length[live],
                drafted=drafted[live],
                accepted=accepted[live],
                limits=np.minimum(32, ends[live] - length[live] - 1).clip(0),
                budget=4096 if self._ended else 0,
                seconds=seconds + exposed if self._ended and len(admitted) < len(live) else None,
                planning=planning,
                prefilled=prompt,
                waited=self.machine.wait is not None and not ahead and not size,
                next_launched=next_ahead,
                chains=chains,
            )
            drafts = self.drafter.step(done)
            self._ended, ahead = True, next_ahead
            self._waits.append(self.drafter.waits)
            planning = (self.machine.plan + self.machine.row_plan * len(live)) * self.drafter.planned * (not ahead)
            self.log.planned.append(self.drafter.planned)
            self._drafts = dict(zip(live.tolist(), drafts, strict=True))
            drafted[:] = 0
            if drafting:
                drafted[live] = [len(draft) for draft in drafts]
            for row in live[length[live] >= ends[live]].tolist():
                self.drafter.finish(names.pop(row))
        return self.log
