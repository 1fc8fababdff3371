"""Whatever a request asks of its sampling, drafts change nothing, and the distribution is stock vLLM's.

With the same noise an engine that drafts must give the very tokens and log-probabilities of one that does not; and what
that one draws must be distributed as what vLLM's own sampler draws.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
from exact_distribution import LENGTH, PROMPT, history_of
from scipy import stats

from verl_rhyme.processes.request import RequestMeta
from verl_rhyme.sampling.noise import key_of

pytestmark = pytest.mark.xdist_group("exactness")

SAMPLES = 2400


@dataclass(frozen=True)
class Option:
    """``SamplingParams`` of a request; ``bad_words`` as token ids, which need no tokenizer."""

    settings: dict = field(default_factory=dict)
    bad_words: list = field(default_factory=list)


PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": -0.3}
STOP = {"min_tokens": 3, "stop_token_ids": [2, 5, 7]}
OPTIONS = {
    "allowed tokens": Option({"allowed_token_ids": [0, 1, 2, 3, 5, 7, 8]}),
    "top-k and top-p": Option({"top_k": 5, "top_p": 0.9, "temperature": 0.8}),
    "thinking budget": Option({"thinking_token_budget": 6}),
    "all others": Option(
        {**PENALTIES, **STOP, "min_p": 0.05, "logit_bias": {3: 1.0}, "top_p": 0.95, "top_k": 9, "temperature": 1.2},
        bad_words=[[4], [7, 1]],
    ),
}
PLAIN = Option()


def generate(engine, options, keys, length=LENGTH + 1, **common):
    """One request for each option and key (``None``: the request's own noise)."""
    from vllm import SamplingParams

    each = []
    for option, key in zip(options, keys, strict=True):
        settings = {"max_tokens": length, "ignore_eos": True, "detokenize": False, **common, **option.settings}
        params = SamplingParams(**(settings if key is None else RequestMeta(noise=f"{key:016x}").put(settings)))
        params._bad_words_token_ids = option.bad_words or None
        each.append(params)
    outputs = engine.generate([{"prompt_token_ids": PROMPT}] * len(each), each, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


@pytest.fixture(scope="module", autouse=True)
def reasoning(drafting, plain, stock):
    """The engines know the tokens around a thought: it begins in the prompt."""
    from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

    ends = SimpleNamespace(enabled=True, reasoning_start_token_ids=PROMPT[:1], reasoning_end_token_ids=[7, 9])
    with pytest.MonkeyPatch.context() as patch:
        for engine in (drafting, plain, stock):
            runner = engine.llm_engine.model_executor.driver_worker.worker.model_runner
            patch.setattr(engine.llm_engine.input_processor.vllm_config, "reasoning_config", ends)
            holder = ThinkingBudgetStateHolder(ends, runner.max_num_reqs, runner.num_spec_tokens, runner.device, False)
            patch.setattr(runner.input_batch, "thinking_budget_state_holder", holder)
        yield


@pytest.fixture(scope="module", autouse=True)
def history(drafting, write_history, distribution_of):
    write_history(drafting.history_folder, history_of("true", distribution_of))


@pytest.mark.parametrize("name", OPTIONS)
def test_drafts_change_nothing(drafting, plain, name):
    """In batches where every other request asks for nothing."""
    options = [OPTIONS[name], PLAIN] * 64
    keys = [key_of(name, i) for i in range(len(options))]
    before = drafting.collective_rpc("draft_totals")[0]
    drafted = generate(drafting, options, keys, length=24, logprobs=2)
    after = drafting.collective_rpc("draft_totals")[0]
    assert after["accepted"] - before["accepted"] > 50
    assert after["drafted"] - after["accepted"] - before["drafted"] + before["accepted"] > 50
    undrafted = generate(plain, options, keys, length=24, logprobs=2)
    assert [list(o.token_ids) for o in drafted] == [list(o.token_ids) for o in undrafted]
    for ours, theirs in zip(drafted, undrafted, strict=True):
        for one, other in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert one.keys() == other.keys()
            for token in one:
                assert one[token].logprob == pytest.approx(other[token].logprob, abs=1e-4)
                assert one[token].rank == other[token].rank


@pytest.fixture(scope="module")
def without_options(stock):
    return counts_of(generate(stock, [PLAIN] * SAMPLES, [None] * SAMPLES))


@pytest.mark.parametrize("name", OPTIONS)
def test_the_distribution_is_stock_vllms(plain, stock, without_options, name):
    ours, theirs = (counts_of(generate(e, [OPTIONS[name]] * SAMPLES, [None] * SAMPLES)) for e in (plain, stock))
    assert same_distribution(ours, theirs) > 1e-4
    assert same_distribution(ours, without_options) < 1e-4, "what the test would notice"


def counts_of(outputs):
    """How often each beginning of an output occurred."""
    found = {}
    for output in outputs:
        tokens = tuple(output.token_ids[:LENGTH])
        found[tokens] = found.get(tokens, 0) + 1
    return found


def same_distribution(first, second):
    """p-value of a chi-square test of homogeneity; what is rare is pooled."""
    cells = sorted(first.keys() | second.keys())
    table = np.array([[counts.get(cell, 0) for cell in cells] for counts in (first, second)])
    rare = table.sum(0) < 16
    table = np.column_stack([table[:, ~rare], table[:, rare].sum(1)])
    return stats.chi2_contingency(table[:, table.sum(0) > 0]).pvalue


def test_a_seed_repeats_its_tokens(drafting, plain):
    """As with vLLM's own; here drafted or not, and whatever else is in the batch (vllm 6038, 9441, 11123)."""
    greedy = {"temperature": 0}
    seeds = [Option({"seed": seed} | (greedy if seed % 4 == 3 else {})) for seed in range(48)]
    first = [list(o.token_ids) for o in generate(drafting, seeds, [None] * 48, length=20)]
    mixed = [option for seed in seeds[::-1] for option in (seed, PLAIN, Option(greedy))]
    for engine in (plain, drafting):
        again = [list(o.token_ids) for o in generate(engine, mixed, [None] * len(mixed), length=20)]
        assert again[::3] == first[::-1]
        assert {tuple(tokens) for tokens in again[2::3]} == {tuple(first[3])}
    assert len({tuple(tokens) for tokens in first}) == 36 + 1


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits", "processed_logits", "processed_logprobs"])
def test_log_probabilities_of_each_mode_are_vllms(plain, stock, mode, monkeypatch):
    """Of greedy tokens beside sampled ones, whose distribution is cut off."""
    options = [Option({"temperature": 0}), OPTIONS["top-k and top-p"]] * 4
    for engine in (plain, stock):
        runner = engine.llm_engine.model_executor.driver_worker.worker.model_runner
        monkeypatch.setattr(runner.sampler, "logprobs_mode", mode)
        monkeypatch.setattr(runner.sampler.topk_topp_sampler, "logprobs_mode", mode)
        if hasattr(runner.sampler, "drawer"):
            monkeypatch.setattr(runner.sampler.drawer, "mode", mode)
    for logprobs in (0, 3, 2):
        more = {"logprobs": logprobs} | ({"logprob_token_ids": [1, 4]} if logprobs == 2 else {})
        ours, theirs = (generate(e, options, [None] * 8, length=1, **more) for e in (plain, stock))
        for one, other in zip(ours, theirs, strict=True):
            (mine,), (its,) = one.logprobs, other.logprobs
            assert {1, 4} <= mine.keys() or logprobs != 2
            shared = mine.keys() & its.keys()
            assert shared or logprobs == 0  # two draws may differ, the likeliest tokens do not
            for token in shared:
                assert mine[token].logprob == pytest.approx(its[token].logprob, abs=1e-4)
                assert mine[token].rank == its[token].rank


#: Options that change the distribution, at two temperatures; the model has 12 tokens.
CHANGED = {
    f"{name}, T={temperature}": Option({**option.settings, "temperature": temperature}, option.bad_words)
    for temperature in (1.0, 0.7)
    for name, option in {
        "none": PLAIN,
        "top-p": Option({"top_p": 0.8}),
        "top-k": Option({"top_k": 3}),
        "min-p": Option({"min_p": 0.2}),
        "all others": OPTIONS["all others"],
        "thinking budget": OPTIONS["thinking budget"],
        "none, but some tokens'": Option({"logprobs": 2, "logprob_token_ids": [1, 4]}),
        "grammar": Option({"stop_token_ids": [11]}),
    }.items()
}
#: Of letters, a token each, any number of times.
PATTERN = "([a-d][c-j])+l"


@pytest.fixture
def actor(small_model):
    """``actor(tokens, temperature)``: log-probabilities as verl's actor computes them, over the whole vocabulary."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.float32)

    @torch.no_grad()
    def log_probs(tokens, temperature):
        logits = model(torch.tensor([PROMPT + tokens[:-1]])).logits[0, len(PROMPT) - 1 :] / temperature
        return logits.log_softmax(-1)[torch.arange(len(tokens)), torch.tensor(tokens)].numpy()

    return log_probs


@pytest.mark.parametrize("way", ["plain", "drafting"])
def test_importance_weights_of_an_unmoved_policy_are_one(request, allow_grammars, actor, way, monkeypatch):
    """Rollout log-probabilities have the actor's support, whatever a request asks of its sampling (trl#6789)."""
    from vllm.sampling_params import StructuredOutputsParams

    from verl_rhyme.config.presets import POLICY_LOGPROBS

    engine = request.getfixturevalue(way)
    allow_grammars(engine)
    drawer = engine.llm_engine.model_executor.driver_worker.worker.model_runner.sampler.drawer
    found = {}
    for mode in ("processed_logprobs", POLICY_LOGPROBS):
        monkeypatch.setattr(drawer, "mode", mode)
        for name, option in CHANGED.items():
            if "grammar" in name:
                option = Option(option.settings | {"structured_outputs": StructuredOutputsParams(regex=PATTERN)})
            outputs = generate(engine, [option, PLAIN] * 24, [None] * 48, length=16, logprobs=0)[::2]
            weights = []
            for output in outputs:
                rollout = [each[token].logprob for each, token in zip(output.logprobs, output.token_ids, strict=True)]
                weights.append(np.exp(actor(list(output.token_ids), option.settings["temperature"]) - rollout))
            found[mode, name] = np.concatenate(weights)
            print(mode, name, "mean weight", found[mode, name].mean().round(3))
    for name in CHANGED:
        np.testing.assert_allclose(found[POLICY_LOGPROBS, name], 1, atol=5e-3)
        if name.startswith("none"):
            np.testing.assert_allclose(found["processed_logprobs", name], 1, atol=5e-3)
        else:
            assert found["processed_logprobs", name].mean() < 0.97, "what the test would notice"
