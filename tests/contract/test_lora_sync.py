"""LoRA adapters in weight syncs: what verl's FSDP engines give out of two ranks, and what is noticed."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

RANKS = Path(__file__).with_name("lora_ranks.py")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """``(given tensors, merged matrices, samples)`` by strategy, ``lora.merge`` and ``base_sync_done``."""
    folder = tmp_path_factory.mktemp("ranks")
    subprocess.run([sys.executable, RANKS, folder], check=True, timeout=280)
    made = torch.load(folder / "results")
    return {case: (given, merged, SimpleNamespace(**sent)) for case, (given, merged, sent) in made.items()}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_merged_adapters_are_in_what_is_sent(results, strategy):
    given, merged, sent = results[strategy, True, False]
    assert not [name for name in given if "lora_" in name]
    assert len(merged) == 4
    for name, matrix in merged.items():
        torch.testing.assert_close(given[name].float(), matrix, rtol=2**-8, atol=2**-8)
    assert sent.unsent == []
    assert sent.values["model.layers.0.mlp.down_proj.weight"]


@pytest.mark.slow
def test_dropped_adapters_are_noticed(results):
    """verl's sync to separate engines asks for the base only, and gets no adapters."""
    given, merged, sent = results["fsdp2", False, False]
    assert not [name for name in given if "lora_" in name]
    dropped = {name.removeprefix("base_model.model.") + ".weight" for name in sent.unsent}
    assert dropped == merged.keys()


@pytest.mark.slow
def test_sent_adapters_are_sampled(results):
    given, merged, sent = results["fsdp2", False, True]
    assert len([name for name in given if "lora_" in name]) == 2 * len(merged)
    assert sent.unsent == []
    assert {name.rsplit(".", 2)[-2] for name in sent.values} == {"lora_A", "lora_B"}
