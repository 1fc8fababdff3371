"""Drafting changes neither the output distribution nor the returned log-probabilities (promises 1 and 2).

The check is a chi-square test against the exact distribution of a 12-token model. One test breaks the sampler on
purpose and expects the check to fail.
"""

from dataclasses import replace

import numpy as np
import pytest
from exact_distribution import LENGTH, PROMPT, SETTINGS, VOCABULARY, history_of

pytestmark = pytest.mark.xdist_group("exactness")

SAMPLES = 6400


def sample(engine, params, n):
    """Return sampled tokens, int [n, LENGTH]."""
    from vllm import SamplingParams

    settings = SamplingParams(max_tokens=LENGTH + 1, ignore_eos=True, detokenize=False, n=64, **params)
    outputs = engine.generate([{"prompt_token_ids": PROMPT}] * (n // 64), settings, use_tqdm=False)
    return np.array([o.token_ids[:LENGTH] for output in outputs for o in output.outputs])


DRAFTERS = {
    "adaptive": {},
    "paper": {"policy": "paper"},
}
#: One drafter is enough for tests of the sampler, which is independent of it.
ADAPTIVE = pytest.mark.parametrize("engine", ["adaptive"], indirect=True)


@pytest.fixture(scope="module", params=DRAFTERS)
def engine(request, build_engine, write_history, tmp_path_factory):
    if request.param == "adaptive":
        built = request.getfixturevalue("drafting")
    else:
        folder = tmp_path_factory.mktemp("history") / "node"
        write_history(folder, [])
        built = build_engine(folder, drafting=DRAFTERS[request.param])
        built.history_folder = folder
    return built


#: All settings with one drafter, and all drafters at one setting. Of the product test_sampling_options checks that
#: drafts change no token.
CASES = [
    *(("adaptive", "true", setting) for setting in SETTINGS),
    *(("adaptive", kind, "T=1") for kind in ("empty", "adversarial")),
    ("adaptive", "adversarial", "top-k"),
    *(("paper", kind, "T=1") for kind in ("true", "adversarial")),
]


@pytest.mark.parametrize(("engine", "kind", "setting"), CASES, indirect=["engine"])
def test_output_distribution_is_the_targets(engine, write_history, distribution_of, p_value, kind, setting):
    write_history(engine.history_folder, history_of(kind, distribution_of))
    before = engine.collective_rpc("draft_totals")[0]
    tokens = sample(engine, SETTINGS[setting], SAMPLES)
    after = engine.collective_rpc("draft_totals")[0]
    drafted, accepted = (after[name] - before[name] for name in ("drafted", "accepted"))
    assert drafted > 0, "without a history the group's live texts are drafted"
    if kind == "true":
        assert 0 < accepted < drafted, "the test must see acceptances and rejections"
    if kind == "adversarial":
        assert drafted - accepted > SAMPLES / 2
    assert p_value(tokens, distribution_of(PROMPT, LENGTH, **SETTINGS[setting])) > 1e-4


@ADAPTIVE
@pytest.mark.parametrize("fault", ["accepts more", "uses the noise of another position"])
def test_check_fails_for_a_broken_sampler(engine, write_history, distribution_of, p_value, monkeypatch, fault):
    from verl_rhyme.engine import drawer, sampler

    write_history(engine.history_folder, history_of("true", distribution_of))
    if fault == "accepts more":
        original = sampler.accepted_tokens
        rng = np.random.default_rng(0)

        def lenient(drafts, tokens, drafted):
            tokens, at = tokens.clone(), np.flatnonzero(_drafted(drafted))
            taken = rng.random(len(at)) < 0.3
            tokens[at[taken]] = drafts[taken].to(tokens.dtype)
            return original(drafts, tokens, drafted)

        monkeypatch.setattr(sampler, "accepted_tokens", lenient)
    else:
        original_rows = drawer.BatchNoise.rows
        monkeypatch.setattr(
            drawer.BatchNoise,
            "rows",
            lambda self, counts: replace(rows := original_rows(self, counts), positions=0 * rows.positions),
        )
    assert p_value(sample(engine, SETTINGS["T=1"], SAMPLES), distribution_of(PROMPT, LENGTH)) < 1e-4


def _drafted(drafted):
    """Return which rows of logits are drafted positions, bool [sum(drafted + 1)]."""
    last = np.cumsum(drafted + 1) - 1
    return ~np.isin(np.arange(last[-1] + 1), last)


def test_greedy_output_equals_the_undrafted_one(engine, write_history, stock):
    from vllm import SamplingParams

    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, VOCABULARY, 6).tolist() for _ in range(32)]
    greedy = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, detokenize=False)
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    expected = [o.outputs[0].token_ids for o in stock.generate(requests, greedy, use_tqdm=False)]
    # Half of the responses are true, half continue wrongly after ten tokens.
    responses = [list(t) if i % 2 else list(t[:10]) + [0, 1, 2] * 4 for i, t in enumerate(expected)]
    write_history(engine.history_folder, list(zip(prompts, responses, strict=True)))
    before = engine.collective_rpc("draft_totals")[0]
    drafted = [o.outputs[0].token_ids for o in engine.generate(requests, greedy, use_tqdm=False)]
    after = engine.collective_rpc("draft_totals")[0]
    assert after["accepted"] - before["accepted"] > 200
    assert drafted == expected
