"""LoRA adapters reach separate engines merged into the weights."""

import pytest
from omegaconf import OmegaConf

from verl_rhyme.trainer.base import _merge_adapters

NONE = {"rank": 0, "merge": False}


@pytest.mark.parametrize(
    ("model", "merged"),
    [
        ({"lora_rank": 8, "lora": NONE}, True),
        ({"lora_rank": 0, "lora": {"rank": 8, "merge": False}}, True),
        ({"lora_rank": 8}, True),
        ({"lora_rank": 8, "lora": {"rank": 0, "merge": True}}, True),
        ({"lora_rank": 0, "lora": NONE}, False),
        ({}, None),
    ],
)
def test_adapters_are_merged_where_there_are_some(model, merged):
    config = OmegaConf.create(model)
    OmegaConf.set_struct(config, True)
    _merge_adapters(config)
    assert OmegaConf.select(config, "lora.merge") == merged
