"""Draft verification by the sampler, and unsupported runners. The distribution is tested in tests/e2e."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from verl_rhyme.engine import draw
from verl_rhyme.processes.request import RequestMeta
from verl_rhyme.sampling import inversion, noise

# The modules import vLLM's samplers.
drawer = pytest.importorskip("verl_rhyme.engine.drawer")
sampler = pytest.importorskip("verl_rhyme.engine.sampler")
SamplingParams = pytest.importorskip("vllm").SamplingParams


def test_output_ends_with_the_first_difference_from_the_draft():
    rng = np.random.default_rng(0)
    for _ in range(200):
        drafted = rng.integers(0, 5, rng.integers(1, 8))
        drafted[rng.integers(len(drafted))] = rng.integers(1, 5)
        tokens = [rng.integers(0, 2, n + 1) for n in drafted]
        drafts = [rng.integers(0, 2, n) for n in drafted]
        every = torch.from_numpy(np.concatenate(tokens))
        found, at = sampler.accepted_tokens(torch.from_numpy(np.concatenate(drafts)), every, drafted)
        assert found.dtype == torch.int32
        kept = found.flatten()[at]
        assert (kept[kept >= 0] == every[kept >= 0]).all(), "another place of a token"
        for line, drawn, draft in zip(found.tolist(), tokens, drafts, strict=True):
            kept = next((i for i, (a, b) in enumerate(zip(drawn, draft, strict=False)) if a != b), len(draft)) + 1
            assert line == [*drawn[:kept].tolist(), *[-1] * (len(line) - kept)]


def test_texts_of_one_request_have_different_noise():
    """vLLM gives the n requests of ``SamplingParams(n=n)`` one object of options."""
    parallel = pytest.importorskip("vllm.v1.engine.parallel_sampling")
    params = SamplingParams(**RequestMeta(noise=f"{7:016x}").put({"n": 12}))
    parent = parallel.ParentRequest(SimpleNamespace(request_id="f-1", external_req_id="f", params=params))
    requests = dict(parent.get_child_info(index) for index in range(12))
    batch = SimpleNamespace(
        req_ids=list(requests), num_tokens_no_spec=np.full(12, 7), temperature_cpu=np.ones(12, np.float32)
    )
    requests = {id: SimpleNamespace(sampling_params=params) for id, params in requests.items()}
    rows = drawer.BatchNoise(SimpleNamespace(input_batch=batch, requests=requests)).rows(np.ones(12, np.int64))
    assert rows.keyed.all()
    assert len(set(rows.keys.tolist())) == 12
    assert rows.keys[0] == 7, "a request with n=1 draws as the first of several"


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
