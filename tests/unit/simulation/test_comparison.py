"""Shapes of runs, and the presets compared for one."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from verl_rhyme.cli import app
from verl_rhyme.commands.shapes import of_arguments
from verl_rhyme.planning import plan_file, planner
from verl_rhyme.planning.shape import ACCEPTANCE, SOURCE, Shape
from verl_rhyme.planning.typed_yaml import ClusterError
from verl_rhyme.planning.workload import Lengths
from verl_rhyme.simulation import comparison

NODE = ["gpu=h100", "gpus=8", "model=Qwen/Qwen3-8B", "batch=128", "samples=16", "response=8192"]
SMALL = [*NODE[:3], "batch=16", "samples=4", "response=8192"]


def shape(*changes, base=NODE):
    return Shape.parse([*base, *changes])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["gpu=h1000"], r"no data sheet of h1000; did you mean H100\?"),
        (["gpus=eight"], "gpus: Value 'eight'"),
        (["gpus=12"], "gpus=12 are not whole nodes of node=8 GPUs"),
        (["model=Qwen/Qwen3-9B"], r"no model Qwen/Qwen3-9B; did you mean Qwen/Qwen3"),
        (["bach=128"], r"no key bach; did you mean batch\?"),
        (["gpus"], "write 'gpus' as KEY=VALUE"),
        (["entropy=0"], "entropy must be above 0"),
        (["mean=8000"], "mean must be from 1 to 7373"),
        (["batch=0"], "batch must be at least 1"),
        (["tp=3"], "tp=3 must divide gpus=8 and node=8"),
        (["tp=16", "gpus=32"], "tp=16 must divide gpus=32 and node=8"),
        (
            ["model=Qwen/Qwen2.5-72B", "gpus=4"],
            "with Adam, without offload, does not fit into 4 H100",
        ),
    ],
)
def test_a_wrong_size_is_named(changes, message):
    with pytest.raises(ClusterError, match=message):
        Shape.parse([*NODE, *changes]).plan_file(1)


def test_missing_sizes_are_named_with_an_example():
    with pytest.raises(ClusterError, match=r"shape: model, batch missing: for example gpu=h100 gpus=8 "):
        Shape.parse([each for each in NODE if not each.startswith(("model", "batch"))])


@pytest.mark.parametrize("mean", [200, 1500, 4000])
def test_lengths_have_the_given_mean(mean):
    given = shape(f"mean={mean}")
    assert Lengths(given.percentiles, given.response).typical().mean() == pytest.approx(mean, rel=0.03)
    assert given.mean_tokens == pytest.approx(mean, rel=0.03)


def test_acceptance_follows_the_entropy():
    for entropy, first, later in ACCEPTANCE:
        assert shape(f"entropy={entropy}").acceptance == (first, later)
    first, later = np.array([shape(f"entropy={entropy}").acceptance for entropy in (0.1, 0.3, 0.6, 1.5, 3, 9)]).T
    assert np.all(np.diff(first) <= 0)
    assert np.all(np.diff(later) <= 0)
    assert later[-1] == 1.0


def test_copies_take_as_few_gpus_as_can_hold_them_and_replicas_those_that_are_fast():
    assert (shape().replica_gpus, shape().copy_gpus) == (2, 2)
    large = shape("model=Qwen/Qwen2.5-32B", "gpus=32", "response=20480")
    assert (large.replica_gpus, large.copy_gpus) == (8, 8)
    assert shape("tp=4").replica_gpus == 4
    assert shape("gpus=24").copy_gpus == 2  # one node trains
    assert shape("gpus=32", "model=Qwen/Qwen2.5-72B").copy_gpus == 24  # three nodes
    assert shape("gpus=16", "node=4", "model=Qwen/Qwen2.5-32B").copy_gpus == 12


def test_a_slice_has_the_same_work_for_a_replica():
    large = shape("model=Qwen/Qwen2.5-32B", "gpus=128", "batch=512", "response=20480")
    parts = large.slices(64)
    assert parts > 1
    tree = large.cluster_file(64, 64, parts, epochs=1, steps=1)
    assert tree["replicas"][0]["count"] * parts == 64 // large.replica_gpus
    assert tree["batch_prompts"] * parts == 512
    assert large.slices(3 * large.replica_gpus) == 1
    assert shape().slices(8) == 1


def test_a_plan_is_made_of_a_shape():
    plans = planner.plan_bounds(plan_file.of_tree(shape().plan_file(None, 2.4), SOURCE).problem)
    best = planner.profitable(plans).best
    assert best.rollout_gpus + best.train_gpus <= 8


@pytest.fixture(scope="module")
def rows():
    return [comparison._row(shape("entropy=0.2", base=SMALL), row) for row in comparison.ROWS]


def test_the_presets_are_compared(rows):
    by = {(row.preset, row.max_staleness, row.separate): row for row in rows}
    stock, drafts = by["off", None, False], by["histospec", None, False]
    assert drafts.tokens_per_s > 1.2 * stock.tokens_per_s
    assert stock.step_first_s == pytest.approx(stock.step_s, rel=0.3)
    assert drafts.step_first_s > drafts.step_s  # the first epoch has no history
    assert [by["full", k, False].staleness_max <= k for k in (0, 1, 2)] == [True] * 3
    assert by["full", 0, False].staleness_mean == 0
    assert 0 < stock.rollout < 1
    assert all(row.split.rollout_gpus + row.split.train_gpus <= 8 for row in rows if row.separate)
    best = comparison.chosen(rows)
    assert best.tokens_per_s >= 0.95 * max(row.tokens_per_s for row in rows)


def test_none_is_chosen_where_none_gains():
    """Drafts that are never accepted."""
    rows = [comparison._row(shape("entropy=9", base=SMALL), row) for row in comparison.ROWS[:2]]
    assert rows[0].tokens_per_s == pytest.approx(rows[1].tokens_per_s)
    assert comparison.chosen(rows) is None


def test_a_row_that_does_not_fit_says_why():
    """On half of the GPUs each would hold 94 GB, on all of them there is room."""
    found = comparison._row(shape("gpus=4", "tp=2"), ("full", 1, True))
    assert isinstance(found, comparison.Refused)
    assert "training on" in found.reason
    with pytest.raises(ClusterError, match="no preset is possible"):
        comparison.chosen([found])


def test_the_command_prints_a_row_for_each_preset():
    result = CliRunner().invoke(app, ["simulate", "--json", "entropy=0.2", *SMALL])
    found = [json.loads(line) for line in result.output.splitlines() if line.startswith("{")]
    assert [(row["preset"], row["max_staleness"], row["separate"]) for row in found] == list(comparison.ROWS)
    assert sum(row["chosen"] for row in found) == 1


def test_a_verl_command_has_a_shape():
    options = {
        "actor_rollout_ref.model.path": "Qwen/Qwen3-8B",
        "actor_rollout_ref.rollout.n": 16,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
        "data.train_batch_size": 128,
        "data.max_prompt_length": 256,
        "data.max_response_length": 8192,
        "trainer.nnodes": 2,
        "trainer.n_gpus_per_node": 8,
    }
    overrides = [f"{key}={value}" for key, value in options.items()]
    overrides.append("reward.custom_reward_function.path=/a/reward.sh")
    command = ["/usr/bin/python3", "-m", "verl.trainer.main_ppo", "+rhyme=full", *overrides]
    found = of_arguments(["gpu=h200", *command])
    sizes = "gpus=16 model=Qwen/Qwen3-8B batch=128 samples=16 response=8192 prompt=256 tp=2 node=8"
    assert found == Shape.parse(["gpu=H200", *sizes.split()])
    with pytest.raises(ClusterError, match=r"gpu missing: for example gpu=h100 -- python -m verl\.trainer\.main_ppo"):
        of_arguments(command)
    with pytest.raises(ValueError, match="a script cannot be read"):
        of_arguments(["bash", "recipes/run_qwen3_8b_grpo.sh"])
    assert of_arguments(["gpu=h200", "+rhyme=full", *overrides]) == found


def test_a_file_is_no_shape(tmp_path):
    file = tmp_path / "gpu=h100.yaml"
    file.touch()
    assert of_arguments([str(file)]) is None
    assert of_arguments(["missing.yaml", "preset=full"]) is None
