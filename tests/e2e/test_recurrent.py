"""A tiny dense Qwen3.5 (gated delta nets and attention) in the real engine: with drafts, it generates the model's text.

The layers run on the CPU op of :mod:`verl_rhyme.testing.vllm_cpu_delta_net`, with the slots and counts of vLLM's
kernels; ``tests/contract/test_delta_net.py`` compares these.
"""

import random
from types import SimpleNamespace

import pytest
from conftest import loaded

from benchmarks.gpu_check import models
from verl_rhyme.config import ConfigError
from verl_rhyme.engine.server import RhymeHttpServer

pytestmark = pytest.mark.xdist_group("recurrent")

TOKENS, LENGTH = 12, 30
OPTIONS = {
    "mamba_ssm_cache_dtype": "float32",
    "num_gpu_blocks_override": 400,
    "limit_mm_per_prompt": {"image": 0, "video": 0},
}
#: As many slots and tokens a step that running requests sit out steps, and prompts come in chunks.
TIGHT = {"max_num_seqs": 8, "max_num_batched_tokens": 24}


@pytest.fixture(scope="module")
def delta_net(tmp_path_factory):
    return models.delta_net(tmp_path_factory.mktemp("delta_net"), entries=TOKENS)


@pytest.fixture(scope="module")
def engine(build_engine, delta_net, tmp_path_factory):
    folder = tmp_path_factory.mktemp("recurrent") / "node"
    made = build_engine(
        folder, model=delta_net, drafting={"floor": 1e-4, "weigh_cost": False, "max_tokens": 4}, **OPTIONS, **TIGHT
    )
    made.history_folder = folder
    return made


def generate(engine, prompts, **sampling):
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=LENGTH, logprobs=0, ignore_eos=True, detokenize=False, **sampling)
    answers = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [
        (
            list(a.outputs[0].token_ids),
            [at[t].logprob for t, at in zip(a.outputs[0].token_ids, a.outputs[0].logprobs, strict=True)],
        )
        for a in answers
    ]


def adversarial(prompts, texts, rng):
    """Each prompt's text with every ninth token wrong, and another prompt's text."""
    for prompt, text in zip(prompts, texts, strict=True):
        yield prompt, [(token + 1) % TOKENS if at % 9 == 5 else token for at, token in enumerate(text)]
        yield prompt, rng.choice(texts)


def differences(engine, delta_net, write_history, temperature):
    """Draft from an adversarial history. Yield each text's largest difference of log-probabilities from the model's, at
    temperature 0 of logits: how far its tokens are behind the most probable ones."""
    import torch

    rng = random.Random(0)
    prompts = [[rng.randrange(TOKENS) for _ in range(rng.choice([1, 1, 5, 20, 39]))] for _ in range(16)]
    write_history(engine.history_folder, [])
    texts = [text for text, _ in generate(engine, prompts, temperature=temperature)]
    write_history(engine.history_folder, list(adversarial(prompts, texts, rng)))
    drafter = engine.llm_engine.model_executor.driver_worker.worker.model_runner.drafter
    before = drafter._drafted, drafter._accepted
    answers = generate(engine, prompts, temperature=temperature)
    drafted, accepted = drafter._drafted - before[0], drafter._accepted - before[1]
    assert drafted > 100
    assert 0 < accepted < drafted
    model = loaded(delta_net, torch.float32)
    for prompt, (text, logprobs) in zip(prompts, answers, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1]
        wanted = logits.log_softmax(-1).gather(-1, torch.tensor(text)[:, None])[:, 0]
        best = logits.log_softmax(-1).max(-1).values
        yield ((torch.tensor(logprobs) if temperature else best) - wanted).abs().max().item()


@pytest.mark.parametrize("temperature", [0, 1])
def test_text_and_log_probabilities_are_the_models(engine, delta_net, write_history, temperature):
    assert max(differences(engine, delta_net, write_history, temperature)) <= (2e-3 if temperature else 0)


@pytest.fixture
def sitting_out(engine, monkeypatch):
    """Each running request sits out a third of the steps, as where others take a step's tokens."""
    scheduler, rng = engine.llm_engine.engine_core.engine_core.scheduler, random.Random(0)
    schedule = scheduler.schedule

    def with_fewer(*arguments):
        out = [request for request in scheduler.running[1:] if rng.random() < 1 / 3]
        scheduler.running = [request for request in scheduler.running if request not in out]
        scheduler.max_num_running_reqs -= len(out)
        try:
            return schedule(*arguments)
        finally:
            scheduler.running += out
            scheduler.max_num_running_reqs += len(out)

    monkeypatch.setattr(scheduler, "schedule", with_fewer)


@pytest.mark.usefixtures("sitting_out")
def test_requests_that_sat_out_go_on_rightly(engine, delta_net, write_history):
    assert max(differences(engine, delta_net, write_history, temperature=0)) == 0


class Forgetful(dict):
    """Counts of which none is kept."""

    def __setitem__(self, name, count):
        pass


@pytest.mark.usefixtures("sitting_out")
def test_without_their_counts_they_go_on_wrongly(engine, delta_net, write_history, monkeypatch):
    runner = engine.llm_engine.model_executor.driver_worker.worker.model_runner
    monkeypatch.setattr(runner.rhyme_steps, "_kept", Forgetful())
    assert max(differences(engine, delta_net, write_history, temperature=0)) > 0.1


def test_samples_have_the_models_distribution(engine, delta_net, write_history, p_value):
    import numpy as np
    from conftest import distribution_of_model
    from vllm import SamplingParams

    prompt, length, top_p = [1, 2, 3, 4, 5, 1, 2], 3, 0.8
    distribution = distribution_of_model(delta_net, "float32")(prompt, length, top_p=top_p)
    likely = np.unravel_index(np.argsort(-distribution.ravel())[:3], distribution.shape)
    write_history(engine.history_folder, [(prompt, [int(t) for t in text] + [0] * 4) for text in np.transpose(likely)])
    params = SamplingParams(temperature=1, top_p=top_p, max_tokens=length, ignore_eos=True, detokenize=False)
    answers = engine.generate([{"prompt_token_ids": prompt}] * 2000, params, use_tqdm=False)
    tokens = np.array([answer.outputs[0].token_ids for answer in answers])
    assert p_value(tokens, distribution) > 1e-4


def test_synchronous_engines_are_refused(build_engine, delta_net, tmp_path):
    with pytest.raises(ConfigError, match=r"linear_attn .*async_scheduling=false"):
        build_engine(tmp_path / "history", model=delta_net, async_scheduling=False, **OPTIONS)


def test_prefix_caching_is_refused(build_engine, delta_net, tmp_path):
    with pytest.raises(ConfigError, match=r"linear_attn .*enable_prefix_caching=false"):
        build_engine(tmp_path / "history", model=delta_net, enable_prefix_caching=True, **OPTIONS)


@pytest.mark.asyncio
async def test_the_cache_is_not_counted_as_if_states_took_no_room(engine):
    cache = engine.llm_engine.vllm_config.cache_config
    server = SimpleNamespace(engine=engine.llm_engine)
    # Of the blocks of a request of the longest kind, each of three groups of layers takes five for its states.
    assert await RhymeHttpServer.cache_tokens(server) < cache.num_gpu_blocks * cache.block_size // 4
