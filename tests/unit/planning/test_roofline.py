"""Costs calculated from a model's shape and a data sheet, and a measured run's factor over them."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_rhyme.observability.step_factor import step_factor
from verl_rhyme.planning import profile, roofline
from verl_rhyme.planning.architecture import PUBLISHED, Architecture
from verl_rhyme.planning.cost import TYPICAL, ReplicaCost, StepCost
from verl_rhyme.planning.experts import Experts
from verl_rhyme.planning.typed_yaml import ClusterError

SHAPES = {name: Architecture.read(config) for name, config in PUBLISHED.items()}
QWEN_32B = SHAPES["Qwen/Qwen2.5-32B"]


def test_known_models_have_their_published_parameters():
    """In billions, of their cards."""
    found = {name.partition("/")[2]: round(shape.parameters / 1e9, 1) for name, shape in SHAPES.items()}
    cards = {"Qwen2.5-7B": 7.6, "Qwen2.5-14B": 14.8, "Qwen2.5-32B": 32.8, "Qwen2.5-72B": 72.7}
    cards |= {"Qwen3-8B": 8.2, "Qwen3.5-9B": 9.0, "Llama-3.1-8B-Instruct": 8.0}
    cards |= {"Qwen3-30B-A3B": 30.5, "Qwen3-235B-A22B": 235.1, "GLM-4.5-Air": 106.9, "gpt-oss-20b": 20.9}
    cards["Qwen3-30B-A3B-Base"] = cards["Qwen3-30B-A3B"]
    assert found == cards


def test_a_token_is_computed_by_the_active_parameters():
    """In billions, of the cards; gpt-oss's leaves the input embedding out, GLM's both."""
    active = {name.partition("/")[2]: shape.active / 1e9 for name, shape in SHAPES.items() if shape.mixture}
    tables = {name.partition("/")[2]: shape.embedding / 1e9 for name, shape in SHAPES.items()}
    assert active["Qwen3-30B-A3B"] == pytest.approx(3.3, abs=0.06)
    assert active["Qwen3-235B-A22B"] == pytest.approx(22, abs=0.2)
    assert active["gpt-oss-20b"] - tables["gpt-oss-20b"] == pytest.approx(3.6, abs=0.05)
    assert active["GLM-4.5-Air"] - 2 * tables["GLM-4.5-Air"] == pytest.approx(12, abs=0.2)
    assert SHAPES["Qwen/Qwen3-8B"].active == SHAPES["Qwen/Qwen3-8B"].parameters


@pytest.mark.parametrize("tokens", [1, 4, 32, 256])
def test_loaded_experts_are_those_of_independent_routes(tokens):
    rng, experts = np.random.default_rng(0), Experts(128, 8)
    unique = [len(np.unique(rng.random((tokens, 128)).argsort()[:, :8])) for _ in range(400)]
    assert experts.loaded(tokens) == pytest.approx(np.mean(unique), rel=0.01)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_experts": 64, "moe_topk": [8, 8]}, Experts(64, 8)),  # Hunyuan, a value a layer
        ({"moe_num_experts": [64, 64], "moe_k": 6}, Experts(64, 6)),  # Ernie VL, of texts and of images
        ({"moe_num_experts": 48, "moe_top_k": 3}, Experts(48, 3)),  # Step
        ({"num_experts": 256, "num_experts_per_token": 8}, Experts(256, 8)),  # Kimi Linear
        ({"num_experts": [], "moe_topk": 1}, None),
    ],
)
def test_experts_of_other_families_are_found(config, expected):
    assert Experts.read(config) == expected


def test_a_mixture_by_hand():
    """30B-A3B over two H100s: a row loads 8 of 128 experts of 48 layers, 256 rows load all."""
    model = SHAPES["Qwen/Qwen3-30B-A3B"]
    cost, read = roofline.replica(model, roofline.GPUS["H100"], 2).step, 0.75 * 3.35e12
    routed = 2 * 48 * 3 * 2048 * 768 / 2  # bytes of an expert of all layers on a GPU
    assert cost.weights(1) - cost.base == pytest.approx(8 * routed / read)
    assert cost.weights(256) == pytest.approx(30.5e9 / read + 2.5e-3, rel=0.01)
    assert cost.row == pytest.approx(2 * 3.35e9 / 989e12 + 2 * 48 * 2 * 2048 / 450e9, rel=0.01)
    twice = cost.weights(2 * 5.0)
    drafted = ReplicaCost(cost).drafted(3.0, 2.0).step
    assert drafted.weights(2.0) == pytest.approx((twice + cost.drafting) / 3), "five tokens a row, in a step of three"


def test_a_roofline_by_hand():
    """32B over four H800s: 16.4 GB of weights and 64 KB a token each, 2 x 32.8 GFLOP and 2 MB of messages a token."""
    cost = roofline.replica(QWEN_32B, roofline.GPUS["H800"], 4)
    assert cost.step.base == pytest.approx(16.4e9 / (0.75 * 3.35e12) + 3.5e-3, rel=0.01)
    assert cost.step.cached == pytest.approx(65536 / (0.75 * 3.35e12))
    reduced = 2 * 64 * 2 * 5120 * 2 * 3 / 4 / 200e9
    assert cost.step.row == cost.prefill == pytest.approx(2 * 32.8e9 / (4 * 989e12 / 2) + reduced, rel=0.01)
    assert cost.room == pytest.approx((0.8 * 80e9 - 16.4e9 - 2.5e9) / 65536, rel=0.01)
    assert cost.gpus == 4
    for name in ("base", "cached"):
        assert getattr(TYPICAL.step, name) == pytest.approx(getattr(cost.step, name), rel=0.01)


@given(st.sampled_from(sorted(SHAPES)), st.sampled_from(sorted(roofline.GPUS)), st.sampled_from([1, 2]))
def test_more_gpus_and_fewer_bytes_make_a_replica_faster(name, device, tp):
    """But for the all-reduces of short steps."""
    gpu, shape = roofline.GPUS[device], SHAPES[name]
    one, two, small = (roofline.replica(shape, gpu, *given) for given in ((tp,), (2 * tp,), (tp, "fp8")))
    assert two.step.cached < one.step.cached
    assert two.step.seconds(256, 2e6) < one.step.seconds(256, 2e6)
    assert small.step.base < one.step.base
    assert one.room <= two.room
    assert one.room <= small.room
    assert roofline.training_token(shape, gpu) > one.step.row / 4


def test_names_of_devices():
    names = ["NVIDIA H100 80GB HBM3", "accelerator_type:H200", "AMD-Instinct-MI300X-OAM", "NVIDIA GH200 480GB", "CPU"]
    assert [roofline.gpu_named(name) for name in names] == ["H100", "H200", "MI300X", "", ""]


def test_a_runs_replicas_are_calculated_where_model_and_gpu_are_known(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Qwen/Qwen3-8B"]))
    found = profile.of_run(str(tmp_path), ["CPU", "accelerator_type:H100"], 2, "bfloat16")
    assert found is not None
    assert found.cost == roofline.replica(SHAPES["Qwen/Qwen3-8B"], roofline.GPUS["H100"], 2)
    assert found.source == f"roofline of {tmp_path.name}, bfloat16, on 2 H100"
    assert profile.of_run(str(tmp_path), ["CPU"], 2, "bfloat16") is None
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert profile.of_run(str(tmp_path), ["H100"], 2, "auto") is None
    assert profile.of_run("/nowhere", ["H100"], 2, "auto") is None


def test_a_model_is_named_or_its_config(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(PUBLISHED["Qwen/Qwen3-8B"]))
    plan = tmp_path / "plan.yaml"
    for name in ("Qwen/Qwen3-8B", "mine", "mine/config.json"):
        assert profile.model(name, plan) == SHAPES["Qwen/Qwen3-8B"]
    with pytest.raises(ClusterError, match=r"no model Qwen/Qwen3-8b; did you mean Qwen/Qwen3-8B"):
        profile.model("Qwen/Qwen3-8b", plan)
    (tmp_path / "mine" / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ClusterError, match=r"no estimate for this family \(gpt2; only for"):
        profile.model("mine", plan)


@given(st.floats(0.2, 5), st.integers(1, 3), st.booleans())
def test_the_factor_of_a_run_is_that_of_its_steps(factor, replicas, drafted):
    """Waves of eight requests that start together, with a step's seconds as calculated times the factor."""
    cost = StepCost(base=0.01, row=1e-3, cached=1e-7, draft=1e-3)
    rng = np.random.default_rng(0)
    rows = []
    for replica in range(replicas):
        for wave in range(4):
            tokens = np.sort(rng.integers(20, 200, 8))
            now, made = 1e9 + 100.0 * wave, 0
            pace = 2 if drafted else 1
            for number, length in enumerate(tokens):
                left, steps = 8 - number, (length - made) / pace
                held = left * (50 + (made + length) / 2)
                now += factor * steps * cost.seconds(left, held, 3.0 * left * drafted)
                made = length
                done = length / pace
                rows.append((replica, 1e9 + 100.0 * wave, now, 50, length + 1, length - done, done * drafted, 3 * done))
    names = ("replica", "first_token_at", "finished_at", "prompt_tokens", "response_tokens")
    names += ("accepted_tokens", "verify_steps", "drafted_tokens")
    requests = {name: np.array(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
    if not drafted:
        requests["drafted_tokens"] = 0 * requests["drafted_tokens"]
    assert step_factor(requests, cost) == pytest.approx(factor, rel=0.08)
    assert step_factor(requests, replace(cost, base=0.02, row=2e-3)) < factor
    few = {name: column[:15] for name, column in requests.items()}
    assert step_factor(few, cost) is None
    assert step_factor({**requests, "first_token_at": np.full(len(rows), np.nan)}, cost) is None
