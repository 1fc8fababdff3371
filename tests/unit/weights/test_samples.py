"""Which elements are compared after a weight sync, and which differences end the run."""

import math

import pytest
import torch

from verl_rhyme.weights.folder import WeightsError
from verl_rhyme.weights.samples import POINTS, Held, Sent, compare, is_compared, points, take

VERSION = 2
WEIGHTS = {
    "model.embed_tokens.weight": torch.randn(40, 16),
    "model.layers.2.mlp.up_proj.weight": torch.randn(24, 16),
    "model.norm.weight": torch.randn(16),
}
WEIGHTS["lm_head.weight"] = WEIGHTS["model.embed_tokens.weight"]  # tied: the engine stores it once
ADAPTER = "base_model.model.model.layers.2.mlp.up_proj.lora_B.weight"


def sent(weights=WEIGHTS, version=VERSION, **more):
    return Sent(version, {name: take(tensor, version).tolist() for name, tensor in weights.items()}, **more)


def held(weights=WEIGHTS, version=VERSION, dtype="bfloat16", scale=1.0, **more):
    """What an engine reports that has stored these weights."""
    values = {}
    for name in weights.keys() - {"lm_head.weight"}:
        elements = take(weights[name], version).to(getattr(torch, dtype)) * scale
        values[name] = [(dtype, list(range(len(elements))), elements.tolist(), scale)]
    return Held(version, values, **more)


def changed(**tensors):
    return {**WEIGHTS, **{name.replace("__", "."): tensor for name, tensor in tensors.items()}}


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 1280, 4096, 152_064 * 3584])
def test_points_are_distinct_and_change_with_the_version(count):
    first, second = points(count, 0), points(count, 1)
    for each in (first, second, points(count, 10**6), points(count, None)):
        assert len(set(each.tolist())) == len(each) == min(count, POINTS)
        assert 0 <= each.min() <= each.max() < count
    assert count <= POINTS or first.tolist() != second.tolist()
    assert torch.equal(points(count, None), first)


def test_points_lie_in_all_shards():
    """Of a matrix that is sharded by columns, and of one that is sharded by rows."""
    rows, columns = 128, 256
    where = points(rows * columns, 5)
    assert set((where % columns // (columns // 8)).tolist()) == set(range(8))
    assert set((where // columns // (rows // 8)).tolist()) == set(range(8))


def test_every_tensor_is_compared_in_turn():
    names = ["lm_head.weight", *(f"model.layers.{n}.self_attn.q_proj.weight" for n in range(30))]
    names += [f"model.layers.{n}.mlp.experts.{m}.up_proj.weight" for n in range(30) for m in range(64)]
    seen = [{name for name in names if is_compared(name, version)} for version in range(64)]
    assert set().union(*seen) == set(names)
    assert all("lm_head.weight" in each for each in seen)
    assert max(map(len, seen)) < len(names) / 20
    assert not {name for name in seen[3] if ".q_proj" in name} & {name for name in seen[4] if ".q_proj" in name}


def test_equal_weights_pass():
    compare(0, sent(), [held()])
    compare(0, sent(version=None), [held(version=None, dtype="float32")])
    wide = {name: tensor.to(torch.bfloat16).float() for name, tensor in WEIGHTS.items()}
    compare(0, sent(), [held(wide, dtype="float32")])  # rounded on the way, held in float32
    nothing = changed(model__norm__weight=torch.full((16,), math.nan))
    compare(0, sent(nothing), [held(nothing)])
    adapter = {ADAPTER: torch.randn(24, 8)}
    compare(0, sent(adapter), [held(adapter, scale=2.5)])


def test_two_workers_have_each_a_part():
    whole, first, second = held(), held(), held()
    for name, [(dtype, which, values, scale)] in whole.values.items():
        first.values[name] = [(dtype, which[::2], values[::2], scale)]
        second.values[name] = [(dtype, which[1::2], values[1::2], scale)]
    second.incomplete = ["layers.2.mlp.gate_up_proj.weight"]
    compare(0, sent(), [first, second])
    with pytest.raises(WeightsError, match=r"2.mlp.up_proj.weight: a part of it was loaded; layers.2.mlp.gate_up_proj"):
        compare(0, sent(), [first, Held(VERSION, incomplete=second.incomplete)])


OLD = torch.randn(24, 16)
FAULTS = {
    "dropped adapters": (
        sent(unsent=["model.layers.2.mlp.up_proj"]),
        held(),
        r"model.layers.2.mlp.up_proj was neither sent nor merged; set .*lora.merge=true",
    ),
    "an adapter that no module takes": (sent({ADAPTER: OLD}), Held(VERSION), r"lora_B.weight: it was not loaded"),
    "a tensor that the loader skips": (
        sent(),
        held({"model.norm.weight": WEIGHTS["model.norm.weight"]}, incomplete=["model.layers.2.mlp.gate_up.weight"]),
        r"layers.2.mlp.up_proj.weight: it was not loaded; model.layers.2.mlp.gate_up.weight got less",
    ),
    "a quantised replica that missed one": (
        sent(),
        Held(VERSION - 1, obstacle="the engines quantise"),
        "worker 0 has loaded version 1 last",
    ),
    "a replica with its first weights": (sent(), Held(), "worker 0 has loaded version None last"),
    "a tied embedding that was not updated": (
        sent({"lm_head.weight": WEIGHTS["lm_head.weight"]}),
        Held(VERSION, incomplete=["model.embed_tokens.weight"]),
        r"lm_head.weight: it was not loaded; model.embed_tokens.weight got less",
    ),
    "a parameter with random values": (sent(), held(blank=["model.bias"]), r"model.bias of worker 0 got nothing"),
    "less than the least difference": (
        sent(),
        held(
            changed(model__norm__weight=torch.nextafter(WEIGHTS["model.norm.weight"], torch.tensor(9.0))),
            dtype="float32",
        ),
        r"model.norm.weight: worker 0 has .* the actor",
    ),
}


@pytest.mark.parametrize(("actors", "engines", "named"), FAULTS.values(), ids=FAULTS)
def test_a_difference_names_replica_version_and_tensor(actors, engines, named):
    with pytest.raises(WeightsError, match=rf"(?s)replica 7 .* version {VERSION}: .*{named}.*last checkpoint"):
        compare(7, actors, [engines])


def test_what_a_loader_computes_is_not_compared():
    name = "model.layers.2.mixer.A_log"
    compare(0, sent({name: torch.randn(16)}), [Held(VERSION, altered=[name], incomplete=["model.layers.2.mixer.A"])])


def test_engines_that_cannot_be_compared_are_named_once(caplog):
    for _ in range(3):
        compare(0, sent(), [Held(VERSION, obstacle="the engines quantise")])
    assert caplog.messages == ["the weights of the engines are not compared with the actor's: the engines quantise"]


def test_kinds_of_tensors_that_are_not_compared_are_named_once(caplog):
    names = [f"model.layers.{n}.{kind}" for n in range(3) for kind in ("mixer.A_log", "experts.7.gate.bias")]
    more = changed(**{name.replace(".", "__"): torch.randn(16) for name in names})
    for version in range(3):
        compare(0, sent(more, version), [held(version=version, altered=names[::2])])
    assert [line.partition(" is not compared")[0] for line in caplog.messages] == [
        "model.layers.*.experts.*.gate.bias",
        "model.layers.*.mixer.A_log",
    ]


TOWER = ["visual.blocks.2.mlp.up_proj.weight", "visual.patch_embed.proj.weight"]


def test_a_tower_that_is_never_sent_is_named_once(caplog):
    """And tensors that the engine has no use for, in the same layer or outside of layers, are no sign of a fault."""
    more = changed(mtp__fc__weight=torch.randn(16), mtp__layers__2__norm__weight=torch.randn(16))
    for _ in range(2):
        compare(0, sent(more), [held(aside=TOWER)])
    assert "the actor sends no weights for visual of the engines" in caplog.messages[-1]
    assert len(caplog.messages) == 3


@pytest.mark.parametrize("name", TOWER)
def test_a_tower_that_is_sent_must_be_loaded(name):
    with pytest.raises(WeightsError, match=rf"model.{name}: it was not loaded; {name} got less"):
        compare(0, sent(changed(**{f"model__{name.replace('.', '__')}": torch.randn(16)})), [held(aside=TOWER)])


def test_what_is_missing_in_another_layer_is_no_sign_of_a_fault():
    more = changed(model__layers__2__norm__weight=torch.randn(16))
    compare(0, sent(more), [held(incomplete=["model.layers.6.mlp.gate_up_proj.weight"])])
    with pytest.raises(WeightsError, match=r"2.norm.weight: it was not loaded"):
        compare(0, sent(more), [held(incomplete=["language_model.model.layers.2.mlp.gate_up_proj.weight"])])
