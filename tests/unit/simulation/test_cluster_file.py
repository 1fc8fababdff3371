"""Valid and invalid cluster files, and ``verl-rhyme simulate``."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from verl_rhyme.cli import app
from verl_rhyme.config import PRESETS, StreamingConfig
from verl_rhyme.planning.typed_yaml import ClusterError
from verl_rhyme.simulation import summary
from verl_rhyme.simulation.cluster_file import load
from verl_rhyme.simulation.run import Simulation

EXAMPLE = Path(__file__).parents[3] / "examples" / "simulate" / "dapo32b.yaml"
PARTS = round(1 / (StreamingConfig().part or 1.0))
SMALL = ["workload.prompts=16", "workload.samples=4", "batch_prompts=8"]


@pytest.mark.parametrize("path", sorted(EXAMPLE.parent.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_can_be_read(path):
    loaded = load(path)
    assert loaded.scenario.training.token > 0
    assert all(cost.room > 100_000 for cost in loaded.scenario.replicas)


def test_training_is_calculated_for_the_gpus_that_train():
    """(6 + 2) x 32.8e9 operations a token, at 35% of 989e12 a second."""
    token = load(EXAMPLE).scenario.training.token
    assert token == pytest.approx(8 * 32.8e9 / (0.35 * 989e12 * 128), rel=0.01)
    fewer = ["training.gpus=null", "replicas.0.count=16"]
    assert load(EXAMPLE, fewer).scenario.training.token == pytest.approx(2 * token)
    with pytest.raises(ClusterError, match=r"training.token is missing: .* replicas.0.gpu and training.gpus"):
        load(EXAMPLE, [*fewer, "topology=separate"])


def test_kv_cache_in_host_memory_is_that_of_a_replica(tmp_path):
    """Of 32B on four GPUs a token has 64 layers x 8 key heads x 128 x 2 values of 2 bytes."""
    loaded = load(EXAMPLE, [*SMALL, "replicas.0.kv_offloading_size=100"])
    assert loaded.scenario.replicas[0].host == pytest.approx(100 * 2**30 / (64 * 8 * 128 * 2 * 2))
    with pytest.raises(ClusterError, match="kv_offloading_size must be GiB, at least 0, not -1"):
        load(EXAMPLE, ["replicas.0.kv_offloading_size=-1"])
    (tmp_path / "measured.yaml").write_text("{source: here, step: {base: 0.01}}")
    with pytest.raises(ClusterError, match=r"set host .tokens. in"):
        load(EXAMPLE, [f"replicas.0.profile={tmp_path}/measured.yaml", "replicas.0.kv_offloading_size=1"])


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("topology", ["colocated", "separate"])
def test_every_preset_is_simulated(preset, topology):
    """With its rules, placement and parts; presets without the pipeline have verl's schedule."""
    scenario = load(EXAMPLE, [*SMALL, f"preset={preset}", f"topology={topology}"]).scenario
    rules, given = scenario.rules, PRESETS[preset]
    assert scenario.placement == given.get("placement.policy", "least_loaded")
    assert (rules.separate, scenario.colocated) == (topology == "separate", topology == "colocated")
    if "max_staleness" not in given:
        assert (rules.max_staleness, rules.batches) == ((0, 1) if scenario.colocated else (7, 2))
        assert scenario.part_samples is None
        return
    assert rules.max_staleness == given["max_staleness"]
    assert rules.take == given.get("scheduling.take", "finished")
    assert rules.refill == given.get("scheduling.refill", "always")
    assert scenario.part_samples == (None if scenario.colocated else 32 // PARTS)


def test_options_of_a_preset_can_be_overridden():
    full = ["preset=full", "topology=separate"]
    rules = load(EXAMPLE, [*full, "max_staleness=4", "scheduling.at_version=finish"]).scenario.rules
    assert (rules.max_staleness, rules.batches, rules.finishes) == (4, 3, True)
    assert load(EXAMPLE, [*full, "streaming.part=null"]).scenario.part_samples is None
    drafted = load(EXAMPLE, [*full, "placement.policy=null", "drafts.acceptance=[2]", "replicas.0.factor=2"])
    assert (drafted.scenario.rules.drafts, drafted.scenario.placement) == (True, "least_loaded")
    assert drafted.sources == ["roofline of Qwen2.5-32B, bfloat16, on 4 H800 x 2"]
    assert drafted.scenario.replicas[0] == load(EXAMPLE).scenario.replicas[0].slowed(2)


def test_simulate_prints_each_step_and_the_run_as_json():
    result, again, sorted_ = (
        CliRunner().invoke(app, ["simulate", str(EXAMPLE), *SMALL, *more])
        for more in (["--json"], ["--json"], ["preset=sorted", "max_staleness=2"])
    )
    assert result.exit_code == 0, result.output
    *steps, whole = [json.loads(line) for line in result.stdout.splitlines()]
    assert [step["version"] for step in steps] == [0, 1, 2, 3]
    assert (whole["updates"], whole["samples"], whole["gpus"]) == (4, 16 * 4 * 2, 128)
    assert whole["sources"]
    assert again.stdout == result.stdout, "the simulation is not reproducible"
    assert "trained tokens/s on 128 GPUs of 32 replicas" in sorted_.stdout
    assert "source of step costs: roofline" in sorted_.stdout


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("preset=full max_staleness=0 scheduling.at_version=finish", "set max_staleness to at least 1, or omit at_ver"),
        ("max_staleness=1", "preset=off with max_staleness=1: presets with the pipeline (full, histopipe"),
        ("preset=full scheduling.tool_timeout=5", "scheduling.tool_timeout is not simulated: drop it"),
        ("preset=ful", "preset must be full, histopipe, histospec, off, sorted, stream, not 'ful'; did you mean full?"),
        ("replicas=[3]", "replicas[0]: Invalid type assigned: int is not a subclass of ReplicasFile"),
        ("replicas.7.count=4", "such as replicas.0.count=4"),
        ("training.gpus=[1", "training.gpus=[1 is not YAML: while parsing"),
        ("workload.response_limit=9000000", " tokens, but a request may have 9000300: raise replicas.0.tp"),
        ("replicas.0.count=0", "replicas is empty: add at least one replica"),
        ("batch_prompts=0", "an update batch needs at least one prompt"),
        ("training.gpus=0", "training.token is missing: set it"),
        ("workload.response_limit=0", "limit must be at least 1, not 0"),
        ("replicas.0.tp=3", "replicas.0: tp=3 must divide the model's 40 attention heads"),
        ("replicas.0.dtype=int3", "replicas.0: dtype must be bfloat16, float16, fp8, not 'int3'"),
        ("replicas.0.factor=0", "replicas.0.factor must be above 0 and finite, not 0.0"),
        ("replicas.0.gpu=null", "replicas.0.gpu is missing: set it, or replicas.0.profile to a measured profile"),
        ("model=null", "model is missing: set it, or replicas.0.profile"),
        ("training.token=-1", "training.token must be seconds, at least 0, not -1.0"),
        ("workload.percentiles.90=100", "rising tokens"),
        ("workload.alike=1.5", "alike must be from 0 to 1, not 1.5"),
        ("workload.prompts=3", "prompts, fewer than batch_prompts=512"),
        ("topology=apart", "topology must be colocated, separate"),
        ("placement.options.factor=2", "factor"),
        ("drafts.acceptance=[]", "drafts.acceptance must be one or more acceptance lengths"),
    ],
)
def test_an_error_is_one_line(override, message):
    result = CliRunner().invoke(app, ["simulate", str(EXAMPLE), *override.split()])
    assert result.exit_code == 1
    [line] = result.stderr.strip().splitlines()
    assert message in line
    assert line.startswith(f"verl-rhyme simulate: {EXAMPLE}: ")


def test_a_users_profile_is_read(tmp_path):
    (tmp_path / "mine.yaml").write_text("source: measured here\nstep: {base: 0.02}\nslots: 4\n")
    cluster = tmp_path / "cluster.yaml"
    given = EXAMPLE.read_text().replace("gpu: H800, tp: 4", "profile: mine.yaml")
    cluster.write_text(given.replace("gpus: 128", "token: 1e-5"))
    loaded = load(cluster, [*SMALL, "model=null"])
    assert loaded.sources == ["measured here"]
    assert [cost.slots for cost in loaded.scenario.replicas] == [4] * 32
    for text, wrong in (
        ("source: measured here\nstep: {base: -1}", r"mine.yaml: step.base must be seconds"),
        ("source: measured here\nstep: {row: 1}", r"mine.yaml: step.base is missing"),
        ("- 1", r"mine.yaml is not a YAML mapping of keys"),
    ):
        (tmp_path / "mine.yaml").write_text(text)
        with pytest.raises(ClusterError, match=wrong):
            load(cluster)
    with pytest.raises(ClusterError, match=r"nowhere.yaml cannot be read: No such file"):
        load(tmp_path / "nowhere.yaml")


def test_the_gradient_of_token_mean():
    """Steps of 100 and 300 tokens, which are orthogonal: (10, 17.3) with equal weights, (0.1, 0.058) by tokens."""
    equal, by_tokens = (100**0.5, 300**0.5), (100**-0.5, 300**-0.5)
    product = sum(a * b for a, b in zip(equal, by_tokens, strict=True))
    assert summary.token_mean([100, 300]) == pytest.approx(product / math.hypot(*equal) / math.hypot(*by_tokens))
    assert summary.token_mean([200, 200]) == pytest.approx(1)


def test_turns_and_tools_of_a_cluster_file_slow_a_run():
    """Each sample waits for its tools; its tokens count as those of one turn do."""
    tools = ["workload.turns=4", "workload.tool_seconds=[30,90]", "workload.tool_tokens=100"]
    small = [*SMALL, "workload.response_limit=2000", "preset=full"]
    small += [f"workload.percentiles.{percent}={tokens}" for percent, tokens in ((50, 100), (90, 200), (99, 300))]
    plain, slow = ([*load(EXAMPLE, [*small, *more]).prompts] for more in ([], tools))
    assert {len(sample) for prompt in slow for sample in prompt.turns} > {3, 4, 5}
    assert not any(prompt.turns for prompt in plain)
    seconds = []
    for more in ([], tools):
        loaded = load(EXAMPLE, [*small, *more])
        seconds.append(Simulation(loaded.scenario, loaded.prompts, loaded.updates).run()[0].rollout)
    assert seconds[1] > seconds[0] + 60
    with pytest.raises(ClusterError, match="tool_seconds must be median and 99th percentile"):
        load(EXAMPLE, ["workload.tool_seconds=[1]"])
    with pytest.raises(ClusterError, match="turns must be at least 1"):
        load(EXAMPLE, ["workload.turns=0.5"])
