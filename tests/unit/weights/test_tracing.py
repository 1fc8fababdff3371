"""Elements followed through what loaders of engines do with tensors."""

import pytest
import torch

from verl_rhyme.weights.samples import POINTS, Held, Sent, compare, points
from verl_rhyme.weights.tracing import Trace

VERSION = 3


def sent(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def followed(tensor, load):
    """Return the elements that are found after ``load(tensor)``: values by number, and the trace."""
    with torch.inference_mode(), Trace([("a", tensor)], VERSION) as trace:
        load(tensor)
    assert not trace.error
    pieces = trace.values.get("a", [])
    return {i: value for _, which, values, _ in pieces for i, value in zip(which, values, strict=True)}, trace


def expected(tensor, dtype=None):
    values = tensor.reshape(-1)[points(tensor.numel(), VERSION)]
    return dict(enumerate((values if dtype is None else values.to(dtype)).tolist()))


LOADERS = {
    "narrowed": lambda w, p: p.data.narrow(0, 40, 32).copy_(w),
    "transposed": lambda w, p: p.data[:40, :32].copy_(w.t()),
    "two halves": lambda w, p: (p.data[0:16].copy_(w[:16]), p.data[50:66].copy_(w.narrow(0, 16, 16))),
    "columns": lambda w, p: (p.data[:32, :20].copy_(w[:, 20:]), p.data[32:64, :20].copy_(w[:, :20])),
    "by rows": lambda w, p: [p.data[n].copy_(row) for n, row in enumerate(w)],
    "a copy of columns": lambda w, p: [p.data[:32, n : n + 20].copy_(w[:, n : n + 20].contiguous()) for n in (0, 20)],
    "cast": lambda w, p: p.data[:32].copy_(w.to(torch.float64)),
    "with one more dimension": lambda w, p: p.data[:32].view(32, 1, 40).copy_(w.unsqueeze(1)),
    "into one more dimension": lambda w, p: p.data[None, :32].copy_(w),
    "by a buffer of its own": lambda w, p: p.data[:32].copy_(torch.empty_like(w).copy_(w)),
    "by memory that is used again": lambda w, p: [p.data[n].copy_(w[n].clone()) for n in range(32)],
}


@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
def test_elements_are_found_where_a_loader_puts_them(load):
    tensor, parameter = sent(32, 40), torch.nn.Parameter(torch.zeros(96, 40))
    found, trace = followed(tensor, lambda w: load(w, parameter))
    assert found == expected(tensor)
    assert len(found) == POINTS
    assert not trace.altered
    assert trace.written[parameter.untyped_storage().data_ptr()] == tensor.numel()


def test_values_have_the_parameters_dtype_and_a_tensor_need_not_be_contiguous():
    tensor, parameter = sent(40, 32).t(), torch.zeros(32, 40, dtype=torch.bfloat16)
    assert followed(tensor, lambda w: parameter.copy_(w))[0] == expected(tensor, torch.bfloat16)


@pytest.mark.parametrize(
    ("tensor", "shape", "elements"),
    [(torch.tensor(2.5), (), {0: 2.5}), (torch.tensor(2.5), (1, 1), {0: 2.5}), (torch.zeros(0, 5), (0, 5), {})],
)
def test_numbers_and_empty_tensors(tensor, shape, elements):
    """Scales and temperatures: vLLM holds some of one element as a vector."""
    parameter = torch.zeros(shape)
    found, trace = followed(tensor, lambda w: parameter.copy_(w))
    assert (found, trace.altered) == (elements, set())


def test_a_shard_has_its_own_elements_only():
    tensor, parameter = sent(32, 40), torch.zeros(32, 10)
    found, _ = followed(tensor, lambda w: parameter.copy_(w.narrow(1, 10, 10)))
    assert found == {i: v for i, v in expected(tensor).items() if 10 <= points(1280, VERSION)[i] % 40 < 20}
    assert 0 < len(found) < POINTS


def test_adapters_are_scaled_before_they_are_stored():
    """As vLLM does: cast on the host, scaled in place, and copied into a slot."""
    tensor, slots = sent(32, 8), torch.zeros(2, 1, 40, 16)
    with Trace([("a", tensor)], VERSION) as trace:
        kept = tensor.to(torch.bfloat16)
        kept *= 2.0
        slots[1, 0, :32, :8].copy_(kept, non_blocking=True)
    [(_, which, values, scale)] = trace.values["a"]
    assert (len(which), scale) == (POINTS, 2.0)
    assert dict(zip(which, values, strict=True)) == {i: 2 * v for i, v in expected(tensor, torch.bfloat16).items()}


@pytest.mark.parametrize(
    "load",
    [
        lambda w, p: p.copy_(-w.exp()),
        lambda w, p: (p.copy_(w), p.copy_(-p.exp())),
        lambda w, p: (p.copy_(w), p.add_(1)),
        lambda w, p: p.copy_(w.add_(1)),
        lambda w, p: (w[:1].mul_(2), p.copy_(w)),
        lambda w, p: (torch.add(w, 1, out=w), p.copy_(w)),
        lambda w, p: (torch._foreach_add_([w], 1), p.copy_(w)),
        lambda w, p: torch._foreach_copy_([p], [w]),
        lambda w, p: p.view(torch.int32).copy_(w.view(torch.int32)),
        lambda w, p: p.copy_(torch.cat([w[:16], w[16:]])),
        lambda w, p: p.fill_(w[0, 0].item()),
    ],
)
def test_what_a_loader_computes_is_not_followed(load):
    parameter = torch.zeros(32, 40)
    _, trace = followed(sent(32, 40), lambda w: load(w, parameter))
    assert trace.altered == {"a"}
    # nothing of it is an alarm
    compare(0, Sent(VERSION, {"a": list(expected(sent(32, 40)).values())}), [Held(VERSION, trace.values, ["a"])])


@pytest.mark.parametrize(
    "load",
    [
        lambda w: None,
        lambda w: w.t().contiguous(),
        lambda w: (w.shape, w[:3]),
        lambda w: torch.empty_like(w).copy_(w).t(),
    ],
)
def test_a_tensor_that_is_stored_nowhere_has_no_elements(load):
    found, trace = followed(sent(32, 40), load)
    assert (found, trace.altered) == ({}, set())


def test_many_tensors_of_one_buffer():
    buffer, parameter = torch.zeros(4000, dtype=torch.uint8), torch.zeros(10, 10, 10)
    tensors = {f"t{n}": buffer[400 * n : 400 * (n + 1)].view(torch.float32).view(10, 10) for n in range(10)}
    for n, tensor in enumerate(tensors.values()):
        tensor.copy_(sent(10, 10) + n)
    with Trace(tensors.items(), VERSION) as trace:
        for n, tensor in enumerate(tensors.values()):
            parameter[9 - n].copy_(tensor.T)
    assert trace.values.keys() == tensors.keys()
    for name, [(_, which, values, _)] in trace.values.items():
        assert dict(zip(which, values, strict=True)) == expected(tensors[name])


def test_an_error_of_the_trace_does_not_stop_the_load(monkeypatch):
    parameter = torch.zeros(32, 40)
    with Trace([("a", sent(32, 40))], VERSION) as trace:
        monkeypatch.setattr(trace, "_copy", lambda *_: 1 / 0)
        parameter.copy_(sent(32, 40))
    assert torch.equal(parameter, sent(32, 40))
    assert "ZeroDivisionError" in trace.error
