"""Valid and invalid plan files, and ``verl-rhyme plan``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from verl_rhyme.checks import combinations
from verl_rhyme.checks.preflight.compose import compose
from verl_rhyme.cli import app
from verl_rhyme.config import config_tree

ROOT = Path(__file__).parents[3]
ONE, TWO = (ROOT / "examples" / "plan" / f"{name}.yaml" for name in ("one_site", "two_sites"))


def run(*arguments: str, file: Path = ONE):
    return CliRunner().invoke(app, ["plan", str(file), *arguments])


def test_one_site_is_split_and_printed_as_overrides_that_verl_composes():
    result = run("--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    best = found["best"]
    assert best["gpus"] == best["train"]["gpus"] + best["rollout"]["gpus"] <= 128
    assert best["step_s"] == min([best["step_s"], *(other["step_s"] for other in found["compared"])])
    assert 0 <= best["trainer_idle"] < 1
    assert "in turns on here/H800" in {other["what"] for other in found["compared"]}
    config = compose(found["overrides"])
    assert config.trainer.nnodes * config.trainer.n_gpus_per_node == best["train"]["gpus"]
    rollout = config.actor_rollout_ref.rollout
    assert rollout.nnodes * rollout.n_gpus_per_node == best["rollout"]["gpus"]
    assert rollout.tensor_model_parallel_size == best["tensor_parallel"]
    assert (rollout.gpu_memory_utilization, rollout.max_num_seqs) == (0.8, 256), "not the planned values"
    assert config.trainer.v1.trainer_mode == "separate_async"
    assert rollout.custom.rhyme.max_staleness == found["max_staleness"] == 1
    rollout.name = "vllm"
    assert [*combinations.refusals(config, config_tree.from_verl(config))] == [], "to paste, and nothing else"


def test_a_node_shared_by_two_roles_has_gpus_per_node_of_each():
    found = json.loads(run("sites.0.gpus=8", "kinds.0.training.copy_gpus=4", "kinds.0.memory=400e9", "--json").stdout)
    assert "trainer.nnodes=1" in found["overrides"]
    assert "trainer.n_gpus_per_node=4" in found["overrides"]
    assert "actor_rollout_ref.rollout.n_gpus_per_node=4" in found["overrides"]


def test_plan_prints_which_bound_is_profitable_and_why():
    """A larger bound helps the long tail of 1,024 GPUs. With 128 GPUs slots and trainer bind early."""
    large = ["sites.0.gpus=1024", "drafts.acceptance=2.25", "drafts.overhead=2.77"]
    few, many = (json.loads(run(*more, "--json").stdout) for more in ([], large))
    for found in few, many:
        assert [row["max_staleness"] for row in found["dial"]] == [0, 1, 2, 4, 8]
        assert [row["staleness_mean"] for row in found["dial"]] == [0, 1, 1, 2, 4]
        steps = {row["max_staleness"]: row["step_s"] for row in found["dial"]}
        assert found["best"]["step_s"] == steps[found["max_staleness"]] <= 1.1 * min(steps.values())
    assert few["max_staleness"] < many["max_staleness"]
    assert few["dial"][-1]["binds"] in ("slots", "trainer")
    assert many["dial"][0]["binds"] == "longest response"
    output = run().stdout
    turns = few["dial"][0]["colocated_step_s"]
    assert turns < few["dial"][0]["step_s"]
    assert f"max_staleness=1 is profitable: {turns / few['best']['step_s']:.2f} times the tokens/s of max_st" in output
    assert "+rhyme=full" in output
    none, two = (run(f"max_staleness={bound}").stdout for bound in (0, 2))
    assert "colocated on 128 GPUs, a step takes" in none, "nothing overlaps"
    assert "max_staleness=2, as given" in two
    assert "rhyme.max_staleness=2" in two
    assert "colocated on 128 GPUs" not in two


def test_a_measured_profile_takes_the_place_of_a_data_sheet(tmp_path):
    (tmp_path / "mine.yaml").write_text("source: measured here\nstep: {base: 0.02}\ngpus: 2\n")
    plan = tmp_path / "plan.yaml"
    kind = "{name: mine, memory: 80e9, profiles: [mine.yaml], training: {token: 1e-3}}"
    site = "{name: here, kind: mine, gpus: 16}"
    batch = "{prompts: 8, samples: 8, response_limit: 2000, percentiles: {50: 200, 90: 900}}"
    plan.write_text(f"parameters: 7e9\nkinds: [{kind}]\nsites: [{site}]\nbatch: {batch}\n")
    found, faster = (
        json.loads(run("--json", "max_staleness=1", *drafts, file=plan).stdout)
        for drafts in ([], ["drafts.acceptance=2"])
    )
    assert found["sources"] == {"mine, tensor parallel size 2": "measured here"}
    assert found["best"]["tensor_parallel"] == 2
    assert faster["best"]["rollout_s"] < found["best"]["rollout_s"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("kinds.0.memry=1", "Key 'memry' not in 'KindFile'"),
        ("objective=speed", "objective must be time or cost, not 'speed'"),
        ("kinds=[]", "kinds is empty"),
        ("kinds=[{gpu: H100}, {name: H100, memory: 1}]", "kinds.1.name=H100 is used twice"),
        ("sites=[{name: a, kind: H800, gpus: 8}, {name: a, kind: H800, gpus: 8}]", "H800 at a is listed twice"),
        ("sites.0.kind=H900", "sites.0.kind=H900 is not in kinds (H800); did you mean H800?"),
        ("sites.0.gpus=abc", "gpus: Value 'abc' of type 'str' could not be converted to Integer"),
        ("kinds.0.tp=[4,4]", "kinds.0: two profiles have tensor parallel size 4"),
        ("kinds.0.tp=[]", "H800 generates at here but has no replicas: set tp of its kind"),
        ("kinds.0.gpu=H900", "kinds.0.gpu: no data sheet of H900; did you mean H800?"),
        ("kinds.0.gpu=null", "kinds.0: set gpu to a data sheet (A100, H20, H800, H100,"),
        ("model=null", "kinds.0.tp needs the file's model and kinds.0.gpu"),
        ("links=[{between: [here, there], gbps: 1}]", "there is not in sites; did you mean here?"),
        ("links=[{between: [here, here], gbps: 1}]", "links.0.between must be two sites, such as [east, west]"),
        ("objective=cost kinds.0.price=null", "set price for here/H800"),
    ],
)
def test_an_error_is_one_line(overrides, message):
    result = run(*overrides.split(" ") if "{" not in overrides and "[" not in overrides else [overrides])
    assert result.exit_code == 1
    [line] = result.stderr.strip().splitlines()
    assert message in line
    assert line.startswith("verl-rhyme plan: ")


def test_of_two_sites_the_cheap_one_generates():
    found = json.loads(run("--json", file=TWO).stdout)
    assert (found["best"]["train"]["pool"], found["best"]["rollout"]["pool"]) == ("east/H800", "west/H20")
    assert found["best"]["transfer_s"] == pytest.approx(6.56, rel=0.01)
    assert found["best"]["step_s"] <= 900
