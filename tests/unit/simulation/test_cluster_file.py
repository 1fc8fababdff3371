"""Cluster files, right and wrong, and ``verl-rhyme simulate`` over them."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

import pytest
from typer.testing import CliRunner

from verl_rhyme.cli import app
from verl_rhyme.config import PRESETS, StreamingConfig
from verl_rhyme.planning.profile import PROFILES, StepFile, profile
from verl_rhyme.planning.typed_yaml import ClusterError
from verl_rhyme.simulation.cluster_file import load
from verl_rhyme.simulation.cluster_keys import OPTIONS, ClusterFile
from verl_rhyme.simulation.scenario import Streaming

EXAMPLE = Path(__file__).parents[3] / "examples" / "simulate" / "dapo32b.yaml"
SMALL = ["workload.prompts=16", "workload.samples=4", "batch_prompts=8"]


def test_every_profile_can_be_read_and_says_where_it_is_from():
    names = [path.stem for path in PROFILES.glob("*.yaml")]
    assert names
    for name in names:
        cost, source, parameters, _ = profile(name, EXAMPLE)
        assert parameters
        assert source
        assert cost.step.base > 0
        assert cost.room > cost.slots


def test_the_example_is_a_cluster_of_128_gpus():
    loaded = load(EXAMPLE)
    assert sum(cost.gpus for cost in loaded.scenario.replicas) == 128
    assert loaded.updates == 4
    assert loaded.scenario.rules.batch_samples == 512 * 16


def test_the_one_in_the_document_is_the_example(tmp_path):
    document = (EXAMPLE.parents[2] / "docs" / "simulation.md").read_text()
    text = document[document.index("    replicas:") :].partition("\n\n")[0]
    (tmp_path / "cluster.yaml").write_text(textwrap.dedent(text))
    example, shown = load(EXAMPLE), load(tmp_path / "cluster.yaml")
    assert shown.scenario.replicas == example.scenario.replicas
    assert shown.scenario.rules == example.scenario.rules
    assert shown.updates == example.updates
    assert shown.scenario.drafts.acceptance == (1, 2)


def test_every_key_stands_in_the_document():
    document = (EXAMPLE.parents[2] / "docs" / "simulation.md").read_text()
    table = {cell for line in document.splitlines() if line.startswith("| `") for cell in re.findall("`([^`]*)`", line)}

    def keys(kind: type, prefix: str) -> Iterator[str]:
        for name, of in get_type_hints(kind).items():
            inner = of if is_dataclass(of) else next(filter(is_dataclass, get_args(of)), None)
            own = f"{prefix}{name}" + (".N" if get_origin(of) is list else "")
            if inner is None:
                yield f"{prefix}{name}"
            else:
                yield from keys(inner, f"{own}.")

    missing = [key for key in (*keys(ClusterFile, ""), *(option.name for option in OPTIONS)) if key not in table]
    assert not missing
    assert all(f"`{name}`" in document for name in ("source", "parameters", "step", *get_type_hints(StepFile)))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("topology", ["colocated", "separate"])
def test_every_preset_is_played(preset, topology):
    """With its rules, placement and parts; those without the pipeline have verl's own schedule."""
    scenario = load(EXAMPLE, [*SMALL, f"preset={preset}", f"topology={topology}"]).scenario
    rules, given = scenario.rules, PRESETS[preset]
    assert scenario.placement == given.get("placement.policy", "least_loaded")
    assert (rules.separate, scenario.colocated) == (topology == "separate", topology == "colocated")
    if "max_staleness" not in given:
        assert (rules.max_staleness, rules.batches) == ((0, 1) if scenario.colocated else (7, 2))
        assert scenario.streaming is None
        return
    assert rules.max_staleness == given["max_staleness"]
    assert rules.take == given.get("scheduling.take", "finished")
    assert rules.refill == given.get("scheduling.refill", "always")
    part = StreamingConfig().part
    assert part is not None
    assert scenario.streaming == (None if scenario.colocated else Streaming(int(part * 32)))


def test_what_a_preset_sets_may_be_set_otherwise():
    full = ["preset=full", "topology=separate"]
    rules = load(EXAMPLE, [*full, "max_staleness=4", "scheduling.at_version=finish"]).scenario.rules
    assert (rules.max_staleness, rules.batches, rules.finishes) == (4, 3, True)
    stream = load(EXAMPLE, ["preset=stream", "topology=separate", "max_staleness=0", "placement.policy=null"])
    assert (stream.scenario.rules.max_staleness, stream.scenario.rules.batches) == (0, 1)
    assert (stream.scenario.rules.take, stream.scenario.placement) == ("loaded", "least_loaded")
    assert load(EXAMPLE, [*full, "streaming.part=null"]).scenario.streaming is None
    batch = 512 * 16
    assert load(EXAMPLE, [*full, "training.gradients=false"]).scenario.streaming == Streaming(batch // 8, update=False)
    one, two = (load(EXAMPLE, [*full, f"drafts.acceptance=[{pace}]"]).scenario.rules.drafts for pace in (1, 2))
    assert (one, two) == (False, True)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            "preset=full max_staleness=0 scheduling.at_version=finish",
            "set max_staleness to at least 1, or leave at_ver",
        ),
        ("preset=full scheduling.at_version=finish", "at_version=finish needs replicas that take versions one by one"),
        ("preset=full scheduling.put_off=0.2", "put_off=0.2 is for max_staleness=0"),
        ("scheduling.in_flight=2", "scheduling: only the pipeline has what is set there; use +rhyme=full or"),
        ("max_staleness=1", "preset=off with max_staleness=1: presets with the pipeline (full, sorted"),
        ("preset=full max_staleness=null placement.policy=null", "preset=full with max_staleness=null"),
        ("sorting.mode=partial", "sorting has ended: set max_staleness; `verl-rhyme options` lists"),
        ("preset=full scheduling.tool_timeout=5", "scheduling.tool_timeout is not simulated: drop it"),
        ("preset=full placement.profile=mine.yaml", "placement.profile is not simulated: drop it"),
    ],
)
def test_rules_that_contradict_each_other(overrides, told):
    with pytest.raises(ClusterError, match=re.escape(told)):
        load(EXAMPLE, overrides.split())


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("replicas.0.count=x", "count: Value 'x' of type 'str' could not be converted to Integer"),
        ("training.token=x", "training.token: Value 'x' of type 'str' could not be converted to Float"),
        ("training.gradients=perhaps", "training.gradients: Value 'perhaps' is not a valid bool"),
        ("workload.percentiles={half: 900}", "workload.percentiles.half: 'half' is no percentile"),
    ],
)
def test_a_value_of_another_kind_is_told_with_its_whole_key(override, told):
    with pytest.raises(ClusterError, match=told):
        load(EXAMPLE, [override])


def test_simulate_tells_each_update_and_all():
    told = CliRunner().invoke(app, ["simulate", str(EXAMPLE), *SMALL, "--json"])
    assert told.exit_code == 0, told.output
    rows = [json.loads(line) for line in told.stdout.splitlines()]
    *steps, whole = rows
    assert [step["version"] for step in steps] == [0, 1, 2, 3]
    assert whole["updates"] == 4
    assert whole["samples"] == 16 * 4 * 2
    assert whole["gpus"] == 128
    assert whole["sources"]
    again = CliRunner().invoke(app, ["simulate", str(EXAMPLE), *SMALL, "--json"])
    assert again.stdout == told.stdout, "the same run each time"


def test_simulate_prints_a_table():
    told = CliRunner().invoke(app, ["simulate", str(EXAMPLE), *SMALL, "preset=sorted", "max_staleness=2"])
    assert told.exit_code == 0, told.output
    assert "trained tokens/s on 128 GPUs of 32 replicas" in told.stdout
    assert "roofline" in told.stdout


@pytest.mark.parametrize("preset", ["full", "stream", "sorted", "histopipe"])
@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_each_preset_keeps_its_bound(preset, staleness):
    for topology in ("colocated", "separate"):
        of = [f"preset={preset}", f"max_staleness={staleness}", f"topology={topology}"]
        told = CliRunner().invoke(app, ["simulate", str(EXAMPLE), *SMALL, *of, "--json"])
        assert told.exit_code == 0, told.output
        whole = json.loads(told.stdout.splitlines()[-1])
        assert 0 <= whole["staleness_mean"] <= whole["staleness_max"] <= staleness
        assert whole["step_s"] > 0
        assert whole["tokens_per_s"] > 0


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("rules.mode=sync", "rules has ended: set batch_prompts, preset, max_staleness, and scheduling.* as of"),
        ("topolgy=separate", "unknown key topolgy: did you mean topology?"),
        ("max_stalness=1", "unknown key max_stalness: did you mean max_staleness?"),
        ("scheduling.in_fligt=2", "unknown key scheduling.in_fligt: did you mean scheduling.in_flight?"),
        ("scheduling.take=late", "scheduling.take must be finished or loaded, not 'late'"),
        ("preset=ful", "preset must be histospec, full, sorted, histopipe, stream, off, not 'ful'; did you mean full?"),
        ("max_staleness=1.5", "max_staleness must be int or null, not 1.5"),
        ("replicas=[]", "replicas is empty"),
        ("replicas={count: 1}", "a whole list is set by replicas='[{count: 4, profile: NAME}]'"),
        ("replicas=[3]", "replicas[0]: Invalid type assigned: int is not a subclass of ReplicasFile"),
        ("replicas.count=4", "cannot set replicas.count=4: a list's elements that are there have numbers from 0 on"),
        ("replicas.7.count=4", "such as replicas.0.count=4"),
        ("replicas.0.cuont=4", "Key 'cuont' not in 'ReplicasFile'"),
        ("placement=histopipe", "placement must be a mapping, not 'histopipe'"),
        ("workload.percentiles=900", "workload.percentiles: Cannot assign int to Dict"),
        ("drafts.acceptance=2", "drafts.acceptance: Invalid value assigned"),
        ("updates=[1]", "updates: Value '[1]' of type 'ListConfig' could not be converted to Integer"),
        ("updates=[1", "updates=[1 is no YAML: while parsing"),
        ("updates", "'updates' is no KEY=VALUE"),
        ("replicas=[{count: 0, profile: qwen2.5-32b-h800-tp4}]", "replicas.0.count must be at least 1, not 0"),
        ("replicas=[{count: 1, profile: qwen2.5-32b-h800-tp4, slots: 0}]", "slots must be at least 1, not 0"),
        ("replicas=[{count: 1, profile: qwen2.5-32b-h800-tp4, room: 0}]", "room must be at least 1, not"),
        ("replicas=[{count: 1, profile: qwen2.5-32b-h800-tp4, room: .nan}]", "room must be at least 1, not"),
        ("replicas.0.room=9000", "replicas.0 has room for 9000 tokens, and a request may have "),
        ("updates=-1", "updates must be at least 1, not -1"),
        ("updates=0", "updates must be at least 1, not 0"),
        ("limit=0", "limit must be at least 1, not 0"),
        ("limit=-1", "limit must be at least 1, not -1"),
        ("batch_prompts=0", "batch_prompts must be at least 1, not 0"),
        ("batch_prompts=-3", "batch_prompts must be at least 1, not -3"),
        ("workload.seed=-1", "workload.seed must be at least 0, not -1"),
        ("workload.samples=0", "workload.samples must be at least 1, not 0"),
        ("workload.growth=.inf", "growth above 0, not 8192 and inf"),
        ("workload.percentiles={50: .nan}", "percentiles must be two or more, between 0 and 100, with rising tokens"),
        ("drafts.acceptance=[1, .nan]", "acceptance lengths must be at least 1"),
        ("drafts.overhead=.nan", "as must the overhead"),
        ("replicas=[{count: 1, profile: qwen2.5-32b-h100}]", "did you mean qwen2.5-32b-h"),
        ("replicas=[{count: 1}]", "missing"),
        ("training.logprobs=2", "training.logprobs must be a share, from 0 to 1, not 2.0"),
        ("batch_prompts=many", "batch_prompts: Value 'many' of type 'str' could not be converted to Integer"),
        ("max_staleness=-1", "max_staleness must be null, or at least 0"),
        ("workload.percentiles={50: 900, 90: 100}", "rising tokens"),
        ("workload.response_limit=0", "limit must be at least 1"),
        ("workload.prompts=3", "fewer prompts than batch_prompts=512"),
        ("workload.unseen=2", "workload.unseen must be a share"),
        ("topology=apart", "topology must be colocated, separate"),
        ("placement.policy=best", "placement.policy must be null or one of"),
        ("placement.options={factor: 2}", "factor"),
        ("streaming.part=1.5", "streaming.part must be null, or above 0 and at most 1, not 1.5"),
        ("training.sync=-3", "training.sync must be seconds of at least 0"),
        ("drafts.acceptance=[0.5]", "acceptance lengths must be at least 1"),
        ("drafts.acceptance=[]", "drafts.acceptance is empty"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(override, told):
    result = CliRunner().invoke(app, ["simulate", str(EXAMPLE), override])
    assert result.exit_code == 1
    [line] = result.stderr.strip().splitlines()
    assert told in line
    assert line.startswith(f"verl-rhyme simulate: {EXAMPLE}: ")


def test_paths_in_a_file_are_told_as_they_are_found(tmp_path, monkeypatch):
    """The file as the user gave it; what it names from where the user is."""
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters" / "mine.yaml").write_text(EXAMPLE.read_text())
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["simulate", "clusters/mine.yaml", "replicas=[{count: 1, profile: ../p.yaml}]"])
    assert result.exit_code == 1
    assert result.stderr.startswith("verl-rhyme simulate: clusters/mine.yaml: ")
    assert "counts from the folder of mine.yaml, and p.yaml is no file" in result.stderr


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: [", "no YAML mapping"),
        ("- 1", "is no YAML mapping of keys"),
        ("3", "is no YAML mapping"),
        ("just a string", "is no YAML mapping of keys"),
        ("", "missing"),
        ("x: 1", "x"),
        ("replicas: {count: 1}", "replicas"),
    ],
)
def test_files_that_are_none(tmp_path, text, told):
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(ClusterError, match=told):
        load(path)
    with pytest.raises(ClusterError, match="cannot be read"):
        load(tmp_path / "nothing.yaml")


def test_elements_of_a_list_are_set_by_their_number():
    for key in ("replicas.0.count", "replicas[0].count"):
        loaded = load(EXAMPLE, [f"{key}=3", "replicas.0.slots=7", "drafts.acceptance=[1, 2]", "drafts.acceptance.1=3"])
        assert [cost.slots for cost in loaded.scenario.replicas] == [7] * 3
        assert loaded.scenario.drafts.acceptance == (1, 3)


def test_a_profile_that_no_file_names():
    with pytest.raises(
        ClusterError, match=r"^no profile nope.yaml: .* counts from the current folder, and nope.yaml is no"
    ):
        profile("nope.yaml")


def test_a_profile_of_ones_own(tmp_path):
    (tmp_path / "mine.yaml").write_text("source: measured here\nstep: {base: 0.02}\nslots: 4\n")
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(EXAMPLE.read_text().replace("qwen2.5-32b-h800-tp4", "mine.yaml"))
    loaded = load(cluster, SMALL)
    assert loaded.sources == ["measured here"]
    assert [cost.slots for cost in loaded.scenario.replicas] == [4] * 32
    (tmp_path / "mine.yaml").write_text("source: measured here\nstep: {base: -1}\n")
    with pytest.raises(ClusterError, match=r"mine.yaml: step.base must be seconds"):
        load(cluster)
