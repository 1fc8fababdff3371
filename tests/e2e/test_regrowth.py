"""A response generated anew in the real engine: drafted from what it said before, distributed as the target says."""

import numpy as np
import pytest
from exact_distribution import LENGTH, PROMPT, VOCABULARY

from verl_rhyme.drafting.adaptive import AdaptiveDrafter
from verl_rhyme.processes.request import RequestMeta

pytestmark = pytest.mark.xdist_group("exactness")

SAMPLES = 6400


@pytest.fixture(scope="module")
def engine(drafting, write_history):
    write_history(drafting.history_folder, [])
    return drafting


def encoded(text):
    return np.array(text, "<i4").tobytes()


def generate(engine, prompts, previous, name, **settings):
    """Tokens of each prompt's response; requests are called ``name 0``, ``name 1``, and so on."""
    from vllm import SamplingParams

    settings = {"ignore_eos": True, "detokenize": False, **settings}
    metas = [RequestMeta(id=f"{name} {i}", earlier_text=encoded(text)) for i, text in enumerate(previous)]
    params = [SamplingParams(**meta.put(settings)) for meta in metas]
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def take_counts(engine, name, n):
    counts = engine.collective_rpc("take_request_counts", args=([f"{name} {i}" for i in range(n)],))[0]
    return [counts[f"{name} {i}"] for i in range(n)]


def test_output_distribution_is_the_targets_whatever_was_said_before(engine, distribution_of, p_value, monkeypatch):
    """The previous text is, for each first token, what is least likely to follow, or most likely."""
    # What is counted of all responses promises more, and would be drafted in its place.
    monkeypatch.setattr(AdaptiveDrafter, "_plan", lambda *_: None)
    distribution = distribution_of(PROMPT, LENGTH)
    rng = np.random.default_rng(1)
    previous = []
    for i in range(SAMPLES):
        first = int(rng.choice(VOCABULARY, p=distribution.sum((1, 2))))
        following = distribution[first].argmax() if i % 2 else distribution[first].argmin()
        previous.append([first, *map(int, np.unravel_index(following, distribution.shape[1:])), 0])
    tokens = np.array(generate(engine, [PROMPT] * SAMPLES, previous, "anew", temperature=1.0, max_tokens=LENGTH + 1))
    counts = take_counts(engine, "anew", SAMPLES)
    drafted, reverified = (sum(count[name] for count in counts) for name in ("drafted_tokens", "reverified_tokens"))
    assert SAMPLES / 4 < reverified < drafted - SAMPLES, "the test must see acceptances and rejections of it"
    assert p_value(tokens[:, :LENGTH], distribution) > 1e-4
