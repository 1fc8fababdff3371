"""Drafting beside what else vLLM does: greedy output stays the undrafted one, and drafts are still accepted."""

import re
from contextlib import contextmanager

import numpy as np
import pytest

pytestmark = pytest.mark.xdist_group("features")

VOCABULARY = 12
LENGTH = 60
SEQUENCE = 160  # positions, of blocks of 32


def prompts(count):
    rng = np.random.default_rng(3)
    return [rng.integers(0, VOCABULARY, int(rng.integers(8, 80))).tolist() for _ in range(count)]


def greedy(**more):
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, detokenize=False, **more)


def generate(engine, requests):
    inputs = [{"prompt_token_ids": request} for request in requests]
    return [list(o.outputs[0].token_ids) for o in engine.generate(inputs, greedy(), use_tqdm=False)]


def half_true(responses):
    """Every other response broken off and continued wrongly."""
    return [r if i % 2 else r[:20] + [0, 1, 2] * 8 for i, r in enumerate(responses)]


@contextmanager
def drafted(engine):
    """Within a block the engine accepts drafts, without errors."""
    before = engine.collective_rpc("draft_totals")[0]
    yield
    after = engine.collective_rpc("draft_totals")[0]
    assert after["errors"] == before["errors"]
    assert after["accepted"] > before["accepted"]


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
    with drafted(pressed):
        assert generate(pressed, requests) == expected
    assert metric(pressed, "num_preemptions") > before, "the test must see preemptions"
    long = [request for request in requests if len(request) > 40][:2]
    for _ in range(2):  # the second time from the prefix cache
        with drafted(pressed):
            assert generate(pressed, long) == [expected[requests.index(request)] for request in long]
    # A later turn finds all full blocks of the turn before, those of drafted and accepted tokens too.
    turns, params = [[*request, *expected[requests.index(request)]] for request in long], greedy()
    params.max_tokens = 1
    outputs = pressed.generate([{"prompt_token_ids": turn} for turn in turns], params, use_tqdm=False)
    assert [o.num_cached_tokens for o in outputs] == [(len(turn) - 1) // 32 * 32 for turn in turns]


#: Of letters a token each: what the tests' model says of itself never is of this form.
PATTERN = "((ab|cd|e[fg]h)(i|jk)?)+l"


def constrained(engine, requests, form=PATTERN, **more):
    """Two of three requests have a grammar. What each said, and why it ended."""
    from vllm.sampling_params import StructuredOutputsParams

    each = []
    for i in range(len(requests)):
        wanted = {"structured_outputs": StructuredOutputsParams(regex=form), **more} if i % 3 else {}
        each.append(greedy(stop_token_ids=[VOCABULARY - 1], **wanted))
    outputs = engine.generate([{"prompt_token_ids": request} for request in requests], each, use_tqdm=False)
    return [(list(o.outputs[0].token_ids), o.outputs[0].finish_reason) for o in outputs]


def test_grammars_under_pressure(pressed, stock, allow_grammars, write_history):
    """Drafts that are not of the grammar's form, or in step with it after a preemption (vllm 30916, 52620). Nor does
    the engine end where a request leaves no token at all that may come (vllm 53665): in either engine it is an error of
    that request."""
    allow_grammars(pressed, stock)
    requests = prompts(24)
    expected = constrained(stock, requests)
    write_history(pressed.history_folder, list(zip(requests, half_true([said for said, _ in expected]), strict=True)))
    before = metric(pressed, "num_preemptions")
    with drafted(pressed):
        assert constrained(pressed, requests) == expected
    assert metric(pressed, "num_preemptions") > before, "the test must see preemptions"
    said = ["".join(chr(ord("a") + token) for token in tokens) for tokens, _ in expected]
    forms = [(text, why) for i, (text, (_, why)) in enumerate(zip(said, expected, strict=True)) if i % 3]
    assert all(re.fullmatch(PATTERN, text) for text, why in forms if why == "stop")
    impossible = {"form": "(ab|cd)l", "min_tokens": 20}
    found = constrained(pressed, requests[:6], **impossible)
    assert [why for i, (_, why) in enumerate(found) if i % 3] == ["error"] * 4
    assert found == constrained(stock, requests[:6], **impossible)


def test_a_reset_preempts_all_with_their_drafts(pressed, stock, write_history):
    """Drafts that were granted and not yet verified are of no use then (vllm 41190, 49620)."""
    requests = prompts(12)
    expected = generate(stock, requests)
    write_history(pressed.history_folder, list(zip(requests, half_true(expected), strict=True)))
    engine = pressed.llm_engine
    found, steps = {}, 0
    with drafted(pressed):
        for i, request in enumerate(requests):
            engine.add_request(f"r-{i}", {"prompt_token_ids": request}, greedy())
        while engine.has_unfinished_requests():
            steps += 1
            if steps % 4 == 0:
                assert pressed.reset_prefix_cache(reset_running_requests=True)
            for output in engine.step():
                if output.finished:
                    found[output.request_id] = list(output.outputs[0].token_ids)
    assert [found[f"r-{i}"] for i in range(len(requests))] == expected


def test_the_end_of_the_context(pressed, stock, write_history):
    """Drafts go up to it, and not beyond, whoever else is in the batch (vllm 41758)."""
    rng = np.random.default_rng(4)
    requests = [rng.integers(0, VOCABULARY, SEQUENCE - left).tolist() for left in (1, 2, 3, 4, 7, 9, 12)]
    requests += prompts(3)

    def all_that_fits(engine):
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=SEQUENCE, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": request} for request in requests]
        return [list(o.outputs[0].token_ids) for o in engine.generate(inputs, params, use_tqdm=False)]

    expected = all_that_fits(stock)
    write_history(pressed.history_folder, [(r, e + [0, 1, 2] * 8) for r, e in zip(requests, expected, strict=True)])
    with drafted(pressed):
        assert all_that_fits(pressed) == expected
