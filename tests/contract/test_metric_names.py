"""The names and definitions that our report shares with verl are still verl's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from verl import DataProto
from verl.trainer.ppo import metric_utils, ray_trainer
from verl.utils import tracking

from verl_rhyme.observability import metrics as m
from verl_rhyme.observability import steps
from verl_rhyme.observability.progress import LOGGER_VARIABLE, MetricsFollower


def test_acceptance_is_defined_as_verl_does() -> None:
    rng = np.random.default_rng(0)
    drafted = rng.integers(0, 50, 200)
    accepted = (drafted * rng.random(200)).astype(int)
    verify = np.where(drafted > 0, rng.integers(1, 20, 200), 0)
    theirs = ray_trainer.compute_spec_decode_metrics(drafted, accepted, verify)
    assert theirs == pytest.approx(
        {m.SPEC_ACCEPT_RATE: m.accept_rate(drafted, accepted), m.SPEC_ACCEPT_LENGTH: m.accept_length(accepted, verify)}
    )


def test_verl_logs_the_names_we_read(tmp_path, monkeypatch) -> None:
    tokens = ("responses", "response_mask", "token_level_scores", "token_level_rewards", "advantages", "returns")
    lengths = {"prompt_length": torch.tensor([4.0, 4.0]), "response_length": torch.tensor([3.0, 5.0])}
    batch = DataProto.from_dict(
        tensors={
            **{"prompts": torch.zeros(2, 4), "attention_mask": torch.ones(2, 9)},
            **{name: torch.ones(2, 5) for name in tokens},
            **lengths,
        },
        meta_info={"global_token_num": [7, 9]},
    )
    timing = {"gen": 2.0, "step": 4.0}
    data = {
        **metric_utils.compute_data_metrics(batch, use_critic=False),
        **metric_utils.compute_timing_metrics(batch, timing),
        **metric_utils.compute_throughout_metrics(batch, timing, 1),
        m.EPOCH: 0,
    }
    read = {m.REWARD_MEAN, m.REWARD_MEAN_AFTER_KL, m.GEN_S, m.STEP_S, m.GEN_MS_PER_TOKEN, m.TOTAL_TOKENS}
    assert read | {m.PROMPT_LENGTH_MEAN, m.RESPONSE_LENGTH_MEAN} <= set(data)
    assert m.response_tokens(data) == 8
    del data[m.GEN_MS_PER_TOKEN]
    assert m.response_tokens(data) == 8

    path = tmp_path / "metrics.jsonl"
    monkeypatch.setenv(LOGGER_VARIABLE, str(path))
    logger = tracking.FileLogger("project", "experiment")
    follower = MetricsFollower(path)
    logger.log(data, step=3)
    assert [step for step, _ in follower.poll()] == [3]
    logger.finish()
    assert steps.from_metrics(path)[3][m.REWARD_MEAN] == 5.0
