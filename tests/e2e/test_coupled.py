"""Coupled sampling in the real engine: the output distribution is the target's, the noise alone decides what is drawn.

A chi-square test against the exact distribution of a 12-token model, as in ``test_exactness.py``.
"""

from itertools import combinations

import numpy as np
import pytest
from exact_distribution import LENGTH, PROMPT, VOCABULARY, history_of
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


def drafts_of(engine):
    totals = engine.collective_rpc("draft_totals")[0]
    return np.array([totals["drafted"], totals["accepted"]])


@pytest.fixture(scope="module", params=["true", "adversarial"])
def history(request, drafting, write_history, distribution_of):
    """Kind of the history that ``drafting`` has."""
    write_history(drafting.history_folder, history_of(request.param, distribution_of))
    return request.param


def test_output_distribution_is_the_targets(drafting, plain, history, distribution_of, p_value):
    """The tokens are those that are drawn without drafts; of other settings see test_sampling_options."""
    before = drafts_of(drafting)
    tokens = sample(drafting, keys_of(history))
    drafted, accepted = drafts_of(drafting) - before
    if history == "true":
        assert SAMPLES / 4 < accepted < drafted - SAMPLES / 4, "the test must see acceptances and rejections"
    else:
        assert drafted - accepted > SAMPLES / 3  # beside what is counted of all responses, which holds more often
    assert p_value(tokens, distribution_of(PROMPT, LENGTH)) > 1e-4
    assert (tokens == sample(plain, keys_of(history))).all()


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


def test_coupling_over_changed_weights(plain, build_engine, newer_model, distribution_of, p_value):
    """Old noise under new weights: exactly the new distribution, and as much agreement as theory says."""
    folder, new_distribution = newer_model
    newer = build_engine(draws=True, model=folder)
    keys = keys_of("weights")
    old, new = (sample(engine, keys) for engine in (plain, newer))
    assert p_value(new, new_distribution(PROMPT, LENGTH)) > 1e-4
    assert p_value(new, distribution_of(PROMPT, LENGTH)) < 1e-4, "the test must see the two policies differ"
    p, q = distribution_of(PROMPT, 1), new_distribution(PROMPT, 1)
    distance = np.abs(p - q).sum() / 2
    # Both draw v where E_v max(p_w / p_v, q_w / q_v) is at most E_w for all w.
    expected = (1 / np.maximum(p[None] / p[:, None], q[None] / q[:, None]).sum(1)).sum()
    assert (1 - distance) / (1 + distance) <= expected <= 1 - distance
    agreed = (old[:, 0] == new[:, 0]).sum()
    assert stats.binomtest(int(agreed), SAMPLES, expected).pvalue > 1e-4
    assert stats.binomtest(int(agreed), SAMPLES, p @ q).pvalue < 1e-4, "independent draws agree less"
