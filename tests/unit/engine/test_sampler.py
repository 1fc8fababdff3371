"""Draft verification by the sampler, and unsupported runners. The distribution is tested in tests/e2e."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

from verl_rhyme.engine import draw
from verl_rhyme.processes.request import RequestMeta
from verl_rhyme.sampling import inversion, noise

# The modules import vLLM's samplers.
drawer = pytest.importorskip("verl_rhyme.engine.drawer")
sampler = pytest.importorskip("verl_rhyme.engine.sampler")
SamplingParams = pytest.importorskip("vllm").SamplingParams


def test_output_ends_with_the_first_difference():
    drafted = np.array([2, 0, 3, 1, 3])
    drafts = torch.tensor([5, 6, 1, 2, 3, 9, 1, 2, 3])
    tokens = torch.tensor([5, 6, 10, 11, 1, 7, 3, 12, 8, 13, 1, 2, 4, 14])
    found, at = sampler.accepted_tokens(drafts, tokens, drafted)
    assert found.dtype == torch.int32
    assert found.tolist() == [[5, 6, 10, -1], [11, -1, -1, -1], [1, 7, -1, -1], [8, -1, -1, -1], [1, 2, 4, -1]]
    assert at.tolist() == [0, 1, 2, 4, 8, 9, 10, 11, 12, 13, 16, 17, 18, 19]


def test_output_is_a_prefix_of_the_drawn_tokens_for_any_draft():
    rng = np.random.default_rng(0)
    for _ in range(200):
        drafted = rng.integers(0, 5, rng.integers(1, 8))
        drafted[rng.integers(len(drafted))] = rng.integers(1, 5)
        tokens = [rng.integers(0, 2, n + 1) for n in drafted]
        drafts = [rng.integers(0, 2, n) for n in drafted]
        found, _ = sampler.accepted_tokens(
            torch.from_numpy(np.concatenate(drafts)), torch.from_numpy(np.concatenate(tokens)), drafted
        )
        for line, drawn, draft in zip(found.tolist(), tokens, drafts, strict=True):
            kept = next((i for i, (a, b) in enumerate(zip(drawn, draft, strict=False)) if a != b), len(draft)) + 1
            assert line == [*drawn[:kept].tolist(), *[-1] * (len(line) - kept)]


@pytest.mark.parametrize("n", [1, 4])
def test_texts_of_one_request_draw_independently(n):
    """vLLM gives the n requests of ``SamplingParams(n=n)`` one object of options."""
    parallel = pytest.importorskip("vllm.v1.engine.parallel_sampling")
    texts, tokens = 2000, 3
    children = []
    for text in range(texts):
        params = SamplingParams(**RequestMeta(noise=f"{noise.key_of('n', text):016x}").put({"n": n}))
        parent = SimpleNamespace(request_id=f"{text}f-abcd1234", external_req_id=f"{text}f", params=params)
        children += (
            [parallel.ParentRequest(parent).get_child_info(i) for i in range(n)]
            if n > 1
            else [(parent.request_id, params)]
        )
    batch = SimpleNamespace(
        req_ids=[id for id, _ in children],
        num_tokens_no_spec=np.full(len(children), 7),
        temperature_cpu=np.ones(len(children), np.float32),
    )
    requests = {id: SimpleNamespace(sampling_params=params) for id, params in children}
    runner = SimpleNamespace(input_batch=batch, requests=requests)
    rows = drawer.BatchNoise(runner).rows(np.ones(len(children), np.int64))
    assert rows.keyed.all()
    logits = np.tile(np.log(np.array([0.5, 0.3, 0.2], np.float32)), (len(children), 1))
    drawn = noise.draw(logits, rows.keys, rows.positions).reshape(texts, n)
    assert drawn[:, 0].tolist() == alone(texts, logits), "a request with n=1 draws as the first of several"
    cells = np.bincount(np.ravel_multi_index(drawn.T, [tokens] * n), minlength=tokens**n)
    expected = functools.reduce(np.multiply.outer, [np.array([0.5, 0.3, 0.2])] * n).ravel() * texts
    rare = expected < 8
    observed, expected = (np.append(of[~rare], of[rare].sum()) for of in (cells, expected))
    assert stats.chisquare(observed[expected > 0], expected[expected > 0]).pvalue > 1e-4


def alone(texts, logits):
    keys = np.array([noise.key_of("n", text) for text in range(texts)], dtype=np.uint64)
    return noise.draw(logits[:texts], keys, np.full(texts, 7)).tolist()


@pytest.mark.parametrize("kinds", [["fresh"] * 4, ["greedy", "keyed", "fresh", "keyed"], ["greedy"] * 4])
@pytest.mark.parametrize("want_logprobs", [False, True])
def test_each_row_is_drawn_on_a_cpu_by_its_kind(kinds, want_logprobs):
    logits = torch.randn(4, 3000, generator=torch.Generator().manual_seed(0))
    keys, at = np.arange(4, dtype=np.uint64), np.arange(4)
    temperatures = np.array([kind != "greedy" for kind in kinds], dtype=np.float32)
    rows = draw.Rows(at, keys, at, temperatures, np.array([kind == "keyed" for kind in kinds]))
    weights = logits.softmax(-1)
    expected = {
        "greedy": logits.argmax(-1).numpy(),
        "keyed": noise.draw(logits.numpy(), keys, at),
        "fresh": inversion.invert(weights.numpy(), noise.uniforms(keys, at)),
    }
    tokens, logprobs = draw.draw_on_cpu(logits, rows, torch.empty(logits.numel()), want_logprobs)
    assert tokens.tolist() == [expected[kind][row] for row, kind in enumerate(kinds)]
    if want_logprobs:
        torch.testing.assert_close(logprobs, weights.gather(1, tokens[:, None])[:, 0].log())
    else:
        assert logprobs is None


def test_gpu_chunks_have_enough_rows():
    """vLLM masks top-k and top-p of fewer than 8 rows by sorting, and each chunk costs dozens of launches."""

    class Logits:
        shape, device = (1280, 151_936), torch.device("cuda")

    plain = SimpleNamespace(
        no_penalties=True,
        bad_words_token_ids={},
        allowed_token_ids_mask=None,
        logitsprocs=SimpleNamespace(non_argmax_invariant=[]),
    )
    counts = np.full(256, 5)
    for metadata in (plain, SimpleNamespace(**{**vars(plain), "no_penalties": False})):
        parts = list(drawer._chunks(Logits, counts, metadata))
        assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
        assert parts[-1].stop == 1280
        assert len(parts) <= 16
        assert all(8 <= part.stop - part.start <= 128 for part in parts)


def test_unsupported_runner_stays_unchanged():
    class Runner:
        pass

    runner = Runner()
    assert "V1 model runner" in sampler.install(runner)
    assert not vars(runner)


@pytest.mark.parametrize("from_package", [False, True])
def test_custom_logits_processors_are_refused(from_package, tmp_path, monkeypatch):
    """Where it drafts, vLLM leaves out those of installed packages without a word."""
    vllm = pytest.importorskip("vllm.v1.sample.sampler")

    class Custom:
        pass

    if from_package:
        metadata = tmp_path / "fancy_logits-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: fancy-logits\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text("[vllm.logits_processors]\nfancy = fancy.module:Processor\n")
        monkeypatch.syspath_prepend(tmp_path)
    processors = SimpleNamespace(all=[] if from_package else [Custom()])
    batch = SimpleNamespace(num_tokens_no_spec=np.zeros(1), logitsprocs=processors)
    runner = SimpleNamespace(sampler=vllm.Sampler(), input_batch=batch)
    before = dict(vars(runner))
    named = "fancy.module:Processor (package fancy-logits)" if from_package else f"{__name__}:"
    assert named in sampler.install(runner)
    assert vars(runner) == before
