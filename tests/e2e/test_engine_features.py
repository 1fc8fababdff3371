"""Drafting beside what else vLLM does: greedy output stays the undrafted one, and drafts are still accepted."""

import numpy as np
import pytest

from verl_rhyme.history.keys import prompt_key

pytestmark = pytest.mark.xdist_group("features")

VOCABULARY = 12
LENGTH = 60
SEQUENCE = 160  # positions, of blocks of 32


def prompts(count, longest=80):
    rng = np.random.default_rng(3)
    return [rng.integers(0, VOCABULARY, int(rng.integers(8, longest))).tolist() for _ in range(count)]


def greedy(**more):
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, detokenize=False, **more)


def generate(engine, requests, **more):
    inputs = [{"prompt_token_ids": request} for request in requests]
    return [list(o.outputs[0].token_ids) for o in engine.generate(inputs, greedy(**more), use_tqdm=False)]


def half_true(responses):
    """Every other response broken off and continued wrongly."""
    return [r if i % 2 else r[:20] + [0, 1, 2] * 8 for i, r in enumerate(responses)]


class Drafted:
    """What an engine's drafter did within a block."""

    def __init__(self, engine):
        self._engine = engine

    def __enter__(self):
        self._before = self._engine.collective_rpc("draft_totals")[0]
        return self

    def __exit__(self, *_):
        after = self._engine.collective_rpc("draft_totals")[0]
        self.accepted, self.errors = (after[name] - self._before[name] for name in ("accepted", "errors"))
        assert self.errors == 0
        assert self.accepted > 0


@pytest.fixture(scope="module")
def stock(build_engine):
    return build_engine(max_model_len=SEQUENCE, block_size=32)


@pytest.fixture(scope="module")
def pressed(build_engine, write_history, tmp_path_factory):
    """Prefix caching, prompts prefilled in chunks beside decoding rows, and too few blocks for all requests."""
    folder = tmp_path_factory.mktemp("history")
    write_history(folder, [])
    built = build_engine(
        folder,
        drafting={"floor": 0.01, "weigh_cost": False},
        max_model_len=SEQUENCE,
        block_size=32,
        num_gpu_blocks_override=24,
        max_num_batched_tokens=176,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        disable_log_stats=False,
    )
    built.history_folder = folder
    return built


def metric(engine, name):
    return sum(m.value for m in engine.get_metrics() if m.name == f"vllm:{name}")


def test_prefix_caching_chunked_prefill_and_preemption(pressed, stock, write_history):
    requests = prompts(24)
    expected = generate(stock, requests)
    write_history(pressed.history_folder, list(zip(requests, half_true(expected), strict=True)))
    before = metric(pressed, "num_preemptions")
    with Drafted(pressed):
        assert generate(pressed, requests) == expected
    assert metric(pressed, "num_preemptions") > before, "the test must see preemptions"
    long = [request for request in requests if len(request) > 40][:2]
    for _ in range(2):  # the second time from the prefix cache
        with Drafted(pressed):
            assert generate(pressed, long) == [expected[requests.index(request)] for request in long]
    assert metric(pressed, "prefix_cache_hits") > 0, "the test must see cached prefixes"


def test_aborted_and_resumed_requests_keep_their_budget(pressed, stock, write_history):
    """As verl resumes: the tokens so far become part of the prompt, the budget shrinks by them, the key stays."""
    requests = prompts(12)
    expected = generate(stock, requests)
    write_history(pressed.history_folder, list(zip(requests, half_true(expected), strict=True)))
    engine = pressed.llm_engine
    partial = {f"{i}": [] for i in range(len(requests))}
    with Drafted(pressed) as drafted:
        for i, request in enumerate(requests):
            engine.add_request(f"{i}", {"prompt_token_ids": request}, greedy())
        for _ in range(6):
            for output in engine.step():
                partial[output.request_id] = list(output.outputs[0].token_ids)
        engine.abort_request([name for name, tokens in partial.items() if len(tokens) < LENGTH])
        assert any(0 < len(tokens) < LENGTH for tokens in partial.values())
        for i, request in enumerate(requests):
            tokens = partial[f"{i}"]
            if len(tokens) == LENGTH:
                continue
            params = greedy(extra_args={"rhyme": {"key": prompt_key(request).hex(), "attempt": 1}})
            params.max_tokens = LENGTH - len(tokens)
            engine.add_request(f"{i}-resumed", {"prompt_token_ids": request + tokens}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    name = output.request_id.removesuffix("-resumed")
                    partial[name] = partial[name] + list(output.outputs[0].token_ids)
    assert drafted.accepted > 20
    assert [partial[f"{i}"] for i in range(len(requests))] == expected


def test_later_turns_draft_from_the_first_prompts_history(pressed, stock, write_history):
    """A second turn goes on from prompt, response and what a tool said; its key is the first turn's prompt."""
    first = prompts(8, longest=20)
    answers = [tokens[:20] for tokens in generate(stock, first)]
    second = [p + a + [1, 2, 3] for p, a in zip(first, answers, strict=True)]
    expected = generate(stock, second)
    whole = [[*a, 1, 2, 3, *e] for a, e in zip(answers, expected, strict=True)]
    write_history(pressed.history_folder, list(zip(first, whole, strict=True)))
    engine = pressed.llm_engine
    found = {}
    with Drafted(pressed) as drafted:
        for i, request in enumerate(second):
            params = greedy(extra_args={"rhyme": {"key": prompt_key(first[i]).hex(), "attempt": 1}})
            engine.add_request(f"turn-{i}", {"prompt_token_ids": request}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    found[output.request_id] = list(output.outputs[0].token_ids)
    assert [found[f"turn-{i}"] for i in range(len(second))] == expected
    assert drafted.accepted > len(second) * LENGTH // 2


def test_lora(build_engine, write_history, small_model, tmp_path):
    """Drafts are verified by the adapted model."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM
    from vllm.lora.request import LoRARequest

    torch.manual_seed(0)
    config = LoraConfig(r=8, lora_alpha=64, target_modules=["q_proj", "v_proj", "o_proj"], init_lora_weights=False)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.float32), config)
    adapted.save_pretrained(tmp_path / "adapter")
    adapter = LoRARequest("adapter", 1, str(tmp_path / "adapter"))
    requests = [{"prompt_token_ids": prompt} for prompt in prompts(8, longest=20)]

    def answers(engine, lora):
        outputs = engine.generate(requests, greedy(), use_tqdm=False, lora_request=lora)
        return [list(o.outputs[0].token_ids) for o in outputs]

    options = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
    plain = build_engine(**options)
    expected = answers(plain, adapter)
    assert expected != answers(plain, None), "the adapter must change the output"
    folder = tmp_path / "history"
    pairs = [(r["prompt_token_ids"], e) for r, e in zip(requests, half_true(expected), strict=True)]
    write_history(folder, pairs)
    engine = build_engine(folder, drafting={"floor": 0.01}, **options)
    with Drafted(engine):
        assert answers(engine, adapter) == expected
