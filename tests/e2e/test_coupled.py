"""Coupled sampling in the real engine: the noise alone decides what is drawn. Drafts change nothing of it
(``test_sampling_options.py``), and the output distribution is the target's (``test_exactness.py``)."""

from itertools import combinations

import numpy as np
import pytest
from exact_distribution import LENGTH, PROMPT, VOCABULARY
from scipy import stats

from verl_rhyme.agent_loop.session import Session
from verl_rhyme.processes.request import RequestMeta
from verl_rhyme.sampling.noise import key_of

pytestmark = pytest.mark.xdist_group("exactness")

SAMPLES = 3200


def generate(engine, keys, prompt=PROMPT, length=24, logprobs=None, text=0, **params):
    """One request for each key of noise (None: the request's own); of each its first text, or the ``text``-th."""
    from vllm import SamplingParams

    settings = {"max_tokens": length, "ignore_eos": True, "detokenize": False, "logprobs": logprobs, **params}
    each = [
        SamplingParams(**(settings if key is None else RequestMeta(noise=f"{key:016x}").put(settings))) for key in keys
    ]
    outputs = engine.generate([{"prompt_token_ids": list(prompt)}] * len(each), each, use_tqdm=False)
    return [output.outputs[text] for output in outputs]


def sample(engine, keys, **params):
    """int [samples, LENGTH]. The last token of each is in turn a drafted one and a bonus token.

    A request is drafted for up to the token before its last.
    """
    halves = [generate(engine, keys[i::2], length=LENGTH + i, **params) for i in (0, 1)]
    tokens = np.empty((len(keys), LENGTH), dtype=np.int64)
    for i, half in enumerate(halves):
        tokens[i::2] = [output.token_ids[:LENGTH] for output in half]
    return tokens


def keys_of(name, n=SAMPLES):
    return [key_of(name, i) for i in range(n)]


def test_the_same_keys_draw_the_same_tokens(plain):
    first = sample(plain, keys_of("same"))
    again = sample(plain, keys_of("same")[::-1])[::-1]  # in other rows, in other batches
    assert (first == again).all()
    assert independent(first, sample(plain, keys_of("other")))


def test_turns_of_a_sample_and_texts_of_a_request_are_independent(plain, distribution_of, p_value):
    """The same prompt each time, so at the same positions; each turn keeps its noise in every attempt."""
    attempts = [[Session(noise=f"{key:016x}") for key in keys_of("turns", SAMPLES // 2)] for _ in range(2)]
    (first, second), again = (
        [[int(session.noise_of(session.begin_turn("prompt")), 16) for session in attempt] for _ in range(2)]
        for attempt in attempts
    )
    assert again == [first, second]
    texts = [sample(plain, first), sample(plain, second), sample(plain, first, n=2, text=1)]
    assert all(independent(*pair, least=100) for pair in combinations(texts, 2))
    assert p_value(np.concatenate(texts[1:]), distribution_of(PROMPT, LENGTH)) > 1e-4
    assert (sample(plain, first, n=2) == texts[0]).all()


def independent(first, second, least=200):
    """Chi-square of pairs: tokens of two samplings, position by position, against independence."""
    for position in range(LENGTH):
        pairs = np.histogram2d(first[:, position], second[:, position], bins=np.arange(VOCABULARY + 1) - 0.5)[0]
        pairs = pairs[np.ix_(pairs.sum(1) >= least, pairs.sum(0) >= least)]
        if stats.chi2_contingency(pairs).pvalue < 1e-4:
            return False
    return True


def test_a_resumed_text_goes_on_as_it_would_have(plain):
    """The position is that in the whole sequence: what was drawn already may come back as part of the prompt."""
    keys = keys_of("resumed", 16)
    whole = [list(o.token_ids) for o in generate(plain, keys)]
    for key, tokens in zip(keys, whole, strict=True):
        [rest] = generate(plain, [key], prompt=PROMPT + tokens[:10], length=14)
        assert list(rest.token_ids) == tokens[10:]


def test_chunked_prefill_and_preemption_change_nothing(plain, build_engine):
    options = {"max_num_batched_tokens": 40, "max_num_seqs": 16, "enable_chunked_prefill": True}
    prompt, keys = [*range(VOCABULARY)] * 6, keys_of("scheduling", 24)
    expected = [list(o.token_ids) for o in generate(plain, keys, prompt=prompt, length=40)]
    engine = build_engine(draws=True, num_gpu_blocks_override=40, block_size=16, **options)
    preempted = watch_preemptions(engine)
    assert [list(o.token_ids) for o in generate(engine, keys, prompt=prompt, length=40)] == expected
    assert preempted, "the test must see preemptions"


def watch_preemptions(engine):
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    original, seen = scheduler._preempt_request, []
    scheduler._preempt_request = lambda request, *args: (seen.append(request.request_id), original(request, *args))[1]
    return seen
