"""The recipes for GPUs, cut down by SMOKE=1: their own scripts, YAML and preflight, through Megatron, on the CPU."""

import json

import pytest
import whole_run

from tests.conftest import ONLY_SLOW

pytestmark = [ONLY_SLOW, pytest.mark.timeout(900), pytest.mark.whole_run]


@pytest.mark.parametrize(
    ("recipe", "variables", "metrics"),
    [
        ("qwen32b_dapo", {}, []),
        ("llama8b_logic", {}, ["actor/kl_loss"]),
        ("qwen3_8b_grpo", {}, ["actor/kl_loss"]),
        (
            "qwen3_8b_grpo",
            {"RHYME": "full", "STALENESS": "2", "MODE": "separate_async"},
            ["actor/kl_loss", "training/parts/count"],
        ),
        ("qwen32b_ppo_math", {}, ["critic/vf_loss", "critic/grad_norm"]),
        ("qwen32b_dapo", {"RHYME": "full"}, ["training/order/by_length"]),
        ("llama8b_logic", {"RHYME": "full"}, ["training/order/by_length", "actor/kl_loss"]),
        ("qwen3_8b_grpo", {"RHYME": "sorted"}, ["training/order/by_length", "actor/kl_loss"]),  # full: above
        ("qwen32b_ppo_math", {"RHYME": "full"}, ["training/order/by_length", "critic/vf_loss", "critic/grad_norm"]),
        ("qwen3_5_9b_dapo", {"STALENESS": "1"}, ["training/order/by_length"]),
        ("qwen3_30b_a3b_gspo", {}, []),
        (
            "qwen3_30b_a3b_gspo",
            {"ENGINE": "fsdp", "RHYME": "full", "STALENESS": "1", "MODE": "separate_async"},
            ["training/parts/count"],
        ),
    ],
)
def test_two_steps(recipe, variables, metrics, tmp_path):
    run(recipe, metrics, tmp_path, **variables)


def test_experts_on_two_ranks(tmp_path):
    megatron = "actor_rollout_ref.actor.megatron.expert_model_parallel_size=2"
    run("qwen3_30b_a3b_gspo", [], tmp_path, "trainer.n_gpus_per_node=2", megatron)


def run(recipe, metrics, tmp_path, *overrides, **variables):
    settings = {"SMOKE": "1", "SKIP_BOOTSTRAP": "1", **variables}
    output = whole_run.finish(whole_run.start_recipe(recipe, tmp_path, *overrides, **settings), tmp_path, timeout=800)
    assert f"{recipe}: finished" in output
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line["data"]["training/rollout_actor_probs_pearson_corr"] > 0.999
        assert line["data"]["rollout/spec/errors"] == 0
        assert line["data"]["actor/grad_norm"] > 0
    assert set(metrics) <= lines[-1]["data"].keys()
    assert (tmp_path / "checkpoints" / "global_step_2" / "actor" / "history").is_dir()
    assert any(key.startswith("val-") for key in lines[-1]["data"])
