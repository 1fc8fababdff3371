"""Drafting changes neither the output distribution nor the returned log-probabilities (promises 1 and 2).

The check is a chi-square test against the exact distribution of a 12-token model. One test breaks the sampler on
purpose and expects the check to fail.
"""

from dataclasses import replace

import numpy as np
import pytest
from exact_distribution import LENGTH, PROMPT, SETTINGS, VOCABULARY, history_of

from tests.conftest import ONLY_SLOW
from verl_rhyme.drafting import head
from verl_rhyme.engine import draft_head

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
    "head": {"head": "new"},  # trained while it drafts; it is off by default
}
RARE = {"head": ONLY_SLOW}
#: One drafter is enough for tests of the sampler, which is independent of it.
ADAPTIVE = pytest.mark.parametrize("engine", ["adaptive"], indirect=True)


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[RARE[name]] if name in RARE else []) for name in DRAFTERS]
)
def engine(request, build_engine, write_history, tmp_path_factory):
    before = draft_head.SHARE, head.MIN_UPDATES
    draft_head.SHARE, head.MIN_UPDATES = 1.0, 0  # the runs are short
    if request.param == "adaptive":
        built = request.getfixturevalue("drafting")
    else:
        folder = tmp_path_factory.mktemp("history") / "node"
        write_history(folder, [])
        every = {} if request.param == "paper" else {"floor": 1e-4, "weigh_cost": False}
        built = build_engine(folder, drafting={**every, **DRAFTERS[request.param]})
        built.history_folder = folder
    built.drafter = request.param
    yield built
    draft_head.SHARE, head.MIN_UPDATES = before


#: All settings with one drafter, and all drafters at one setting. The product is in test_coupled and
#: test_sampling_options, which check that drafts change no token.
CASES = [
    pytest.param(drafter, kind, setting, marks=[RARE[drafter]] if drafter in RARE else [])
    for drafter in DRAFTERS
    for kind in ("empty", "true", "adversarial")
    for setting in SETTINGS
    if setting == "T=1" or (drafter == "adaptive" and kind != "empty")
]


@pytest.mark.parametrize(("engine", "kind", "setting"), CASES, indirect=["engine"])
def test_output_distribution_is_the_targets(engine, write_history, distribution_of, p_value, kind, setting):
    write_history(engine.history_folder, history_of(kind, distribution_of))
    before = engine.collective_rpc("draft_totals")[0]
    tokens = sample(engine, SETTINGS[setting], SAMPLES)
    after = engine.collective_rpc("draft_totals")[0]
    drafted, accepted = (after[name] - before[name] for name in ("drafted", "accepted"))
    # Without a history the adaptive drafter still drafts from the group's live texts.
    assert (drafted > 0) == (kind != "empty" or engine.drafter != "paper")
    if kind == "true":
        assert 0 < accepted < drafted, "the test must see acceptances and rejections"
    if kind == "adversarial":
        assert drafted - accepted > SAMPLES / 2
    assert p_value(tokens, distribution_of(PROMPT, LENGTH, **SETTINGS[setting])) > 1e-4
    if engine.drafter == "head":
        assert after["head_updates"] > 0, "the head was trained"
        assert after["head_guess_seconds"] > before["head_guess_seconds"], "the head was used"


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


@ADAPTIVE
def test_vllms_rejection_sampler_has_the_same_distribution(engine, write_history, distribution_of, p_value):
    """Benchmarks compare with vLLM's sampler, which needs our patches on a CPU."""
    runner = engine.llm_engine.model_executor.driver_worker.worker.model_runner
    ours = runner.sampler, runner.rejection_sampler
    write_history(engine.history_folder, history_of("true", distribution_of))
    runner.sampler = type(ours[0]).__mro__[1](ours[0].logprobs_mode)
    runner.rejection_sampler = type(ours[1]).__mro__[1](runner.sampler)
    try:
        tokens = sample(engine, SETTINGS["T=0.7"], SAMPLES)
    finally:
        runner.sampler, runner.rejection_sampler = ours
    assert p_value(tokens, distribution_of(PROMPT, LENGTH, **SETTINGS["T=0.7"])) > 1e-4


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


@ADAPTIVE
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_the_targets(engine, write_history, small_model, distribution_of, temperature):
    """``rollout_log_probs``, which verl trains on, equal a recomputation by the actor's code path."""
    import torch
    from transformers import AutoModelForCausalLM
    from vllm import SamplingParams

    write_history(engine.history_folder, history_of("true", distribution_of))
    settings = SamplingParams(
        temperature=temperature, max_tokens=24, ignore_eos=True, detokenize=False, logprobs=0, n=32
    )
    output = engine.generate([{"prompt_token_ids": PROMPT}], settings, use_tqdm=False)[0]
    tokens = torch.tensor([o.token_ids for o in output.outputs])
    returned = torch.tensor(
        [[p[t].logprob for t, p in zip(o.token_ids, o.logprobs, strict=True)] for o in output.outputs]
    )
    model = AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.float32)
    with torch.no_grad():
        sequence = torch.cat([torch.tensor(PROMPT).expand(len(tokens), -1), tokens], dim=1)
        logits = model(sequence).logits[:, len(PROMPT) - 1 : -1] / temperature
    expected = logits.log_softmax(-1).gather(2, tokens[..., None])[..., 0]
    torch.testing.assert_close(returned, expected, atol=2e-4, rtol=2e-4)
