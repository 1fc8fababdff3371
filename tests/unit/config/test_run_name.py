"""Names of runs: the preset, and the options that differ."""

import pytest

from verl_rhyme.config import PRESETS, config_tree, presets
from verl_rhyme.config.run_name import run_name


def rhyme(preset, **changes):
    return config_tree.parse(presets.tree(preset, {name.replace("__", "."): v for name, v in changes.items()}))


@pytest.mark.parametrize("preset", PRESETS)
def test_an_unchanged_preset_gives_its_name(preset):
    tree = None if preset == "off" else rhyme(preset)
    assert (run_name(tree), run_name(tree, switches=False)) == (preset, preset)


@pytest.mark.parametrize(
    ("preset", "changes", "name", "run"),
    [
        ("sorted", {"max_staleness": 1}, *["sorted-k1"] * 2),
        (
            "full",
            {"max_staleness": 2, "drafting__enable": False, "placement__policy": None},
            "full-k2-no_drafting-no_policy",
            "full-k2-no_policy",
        ),
        ("full", {"scheduling__in_flight": 1.5, "streaming__part": None}, *["full-in_flight_1.5-no_part"] * 2),
        ("histospec", {"drafting__policy": "paper"}, "histospec-paper", "histospec"),
        (
            "histospec",
            {"placement__policy": "histopipe", "placement__options": {"groups": 2}},
            *["histospec-histopipe-groups_2"] * 2,
        ),
        ("sorted", {"drafting__wait_for_history": True}, "sorted-wait_for_history", "sorted"),
        # folders and waiting times are left out
        ("full", {"history__dir": "/x", "events__enable": False, "scheduling__lost_after": 60.0}, *["full"] * 2),
        # options of another preset give that preset's name
        ("full", {"scheduling__take": "loaded", "placement__policy": "histopipe"}, *["histopipe"] * 2),
    ],
)
def test_changed_options_are_in_the_name(preset, changes, name, run):
    tree = rhyme(preset, **changes)
    assert (run_name(tree), run_name(tree, switches=False)) == (name, run)
