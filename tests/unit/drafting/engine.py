"""Rows of tokens as in vLLM, given to drafters."""

import numpy as np

from verl_rhyme.drafting.policy import DecodeStep
from verl_rhyme.history.record import PromptHistory, Trajectory

KEY, OTHER_KEY = b"k" * 16, b"o" * 16


def history(*responses, step=0):
    trajectories = [Trajectory(KEY, np.array(r, np.int32), 1.0, 0, 0, i) for i, r in enumerate(responses)]
    return PromptHistory.build(trajectories, step)


class Engine:
    """Requests of an engine, for one drafter or for several that must draft the same."""

    def __init__(self, *drafters, rows=8, width=2048):
        self.drafters, self.drafter = drafters, drafters[0]
        self.tokens = np.zeros((rows, width), np.int32)
        self.lengths, self.rows = {}, {}

    def start(self, request, prompt, key=KEY, previous=None):
        if request not in self.rows:
            self.rows[request] = min(set(range(len(self.tokens))) - set(self.rows.values()))
        self.tokens[self.rows[request], : len(prompt)] = prompt
        self.lengths[request] = len(prompt)
        for drafter in self.drafters:
            drafter.start(request, key, previous)

    def finish(self, request):
        del self.rows[request], self.lengths[request]
        counts, *others = [drafter.finish(request) for drafter in self.drafters]
        assert all(other == counts for other in others)
        return counts

    def step(
        self, sampled, limit=32, budget=1 << 20, drafted=None, accepted=None, seconds=None, planning=0.0, chains=None
    ):
        """Give the drafters ``sampled`` (request to its tokens of this step). Returns request to draft."""
        for request, tokens in sampled.items():
            end = self.lengths[request]
            self.tokens[self.rows[request], end : end + len(tokens)] = tokens
            self.lengths[request] += len(tokens)
        done = DecodeStep(
            list(sampled),
            np.array([self.rows[r] for r in sampled]),
            self.tokens,
            np.array([self.lengths[r] for r in sampled]),
            drafted or [0] * len(sampled),
            accepted or [0] * len(sampled),
            np.full(len(sampled), limit),
            budget,
            seconds,
            planning,
            chains=chains,
        )
        drafts, *others = [drafter.step(done) for drafter in self.drafters]
        assert all(other == drafts for other in others)
        return dict(zip(sampled, drafts, strict=True))

    def verify(self, request, path, **kwargs):
        """Verify drafts against the target text. Yields the drafted, the accepted and all tokens after each step."""
        done, drafted, accepted, tokens = 0, 0, 0, path[:1]
        while len(tokens):
            draft = self.step({request: tokens}, drafted=[drafted], accepted=[accepted], **kwargs)[request]
            done += len(tokens)
            tokens = path[done : done + agreement(draft, path[done:]) + 1]
            drafted, accepted = len(draft), max(0, len(tokens) - 1)
            yield drafted, accepted, done

    def follow(self, request, path, **kwargs):
        """Return the drafted and accepted tokens of each step, verified against the target text."""
        return [(drafted, accepted) for drafted, accepted, _ in self.verify(request, path, **kwargs)]


def agreement(draft, path):
    """Return the number of draft tokens that agree with the path."""
    return next((i for i, (a, b) in enumerate(zip(draft, path, strict=False)) if a != b), min(len(draft), len(path)))
