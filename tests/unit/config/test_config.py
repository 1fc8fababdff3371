"""Typed configuration: keys, types, ranges, contradictions, presets and generated files."""

import dataclasses
import inspect
import json
from typing import get_type_hints

import pytest
from omegaconf import OmegaConf
from typer.testing import CliRunner

from verl_rhyme.checks.preflight.compose import compose
from verl_rhyme.cli import app
from verl_rhyme.config import (
    CONFIG_PATH,
    PIPELINES,
    PLACEMENTS,
    PRESETS,
    ConfigError,
    RhymeConfig,
    config_tree,
    generate,
    options,
    presets,
)
from verl_rhyme.config.config_tree import parse
from verl_rhyme.placement import POLICIES


def tree(path, value):
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def test_defaults_survive_a_round_trip():
    assert parse(RhymeConfig().to_dict()) == RhymeConfig()
    pipeline = RhymeConfig(max_staleness=2)
    assert parse(pipeline.to_dict()) == pipeline
    assert parse(None) is parse({"enable": False, "drafting": {"max_tokens": 8}}) is None, "stock verl"


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("drafting.flor", 0.1, "unknown key .*drafting.flor: did you mean .*drafting.floor"),
        ("zzz", 1, "known here: .*drafting"),
        ("drafting.max_tokens", "many", "must be int, not 'many'"),
        ("drafting", 3, "must be a mapping"),
        ("drafting.policy", "papr", "adaptive or paper, not 'papr'; did you mean paper"),
        ("history.max_bytes", 10, "1 MiB"),
        ("history.epochs", 0, "at least 1"),
        ("scheduling.in_flight", 0.9, "null, or at least 1, not 0.9"),
        ("scheduling.in_flight", float("inf"), "must be finite"),
        ("scheduling.put_off", 1, "at least 0 and below 1"),
        ("scheduling.order", 0.5, "null, 0 or 1"),
        ("streaming.part", 0, "null, or above 0 and at most 1"),
        ("streaming.elastic", {"min_replicas": 3, "max_replicas": 2}, r"at least streaming.elastic.min_replicas \(3\)"),
        ("streaming.elastic.max_replicas", 2, r"min_replicas \(null\)"),
        ("placement.policy", "histopip", "longest_first, histopipe.*did you mean histopipe"),
        ("placement.options", {"factor": 2}, "without a policy"),
        ("placement.profile", "x.yaml", "null without a policy"),
        ("placement", {"policy": "histopipe", "options": {"group": 2}}, "options.group: .*did you mean groups"),
        ("placement", {"policy": "longest_first", "options": {"tail": 0.1}}, "option of histopipe and skewness_aware"),
        ("placement", {"policy": "histopipe", "options": {"migrate": "no"}}, "migrate must be bool, not 'no'"),
        ("lengths.ranker", "folder", "null without max_staleness"),
        ("weights.site_label", "", "must be str or null, not empty"),
        ("events", {"enable": False, "responses": True}, "events.responses must be false with events.enable=false"),
        ("drafting.max_batch_tokens", 0, "null or at least 1 .*drafting.enable=false"),
        ("drafting", {"policy": "paper", "floor": 0.2}, "floor must be 0.05 .its default. with policy=paper"),
        ("drafting", {"policy": "paper", "max_tokens": 128}, "max_tokens must be at most 32 with policy=paper"),
        ("scheduling", {"order": 0, "in_flight": 2}, "in_flight, .*scheduling.order need the pipeline"),
        ("streaming.elastic.min_replicas", 1, "elastic.min_replicas needs the pipeline"),
    ],
)
def test_errors_name_the_option_and_the_remedy(path, value, words):
    with pytest.raises(ConfigError, match=words):
        parse(tree(path, value))


def test_floats_and_integers_are_converted():
    parsed = parse({"history": {"max_bytes": 1e9}, "max_staleness": 1, "scheduling": {"in_flight": 2}})
    assert [(value, type(value)) for value in (parsed.history.max_bytes, parsed.scheduling.in_flight)] == [
        (10**9, int),
        (2.0, float),
    ]


def test_reads_verls_full_config_and_its_rollout_config():
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"custom": {"rhyme": {"max_staleness": 1}}}}})
    assert config_tree.from_verl(config) == config_tree.from_rollout(config.actor_rollout_ref.rollout)
    assert config_tree.from_verl(OmegaConf.create({})) is None
    assert config_tree.from_rollout(OmegaConf.create({"custom": None})) is None


# ---- presets and generated files ----


def test_generated_files_match_the_options(request):
    for path, text in generate.files().items():
        assert (request.config.rootpath / path).read_text() == text, f"{path}: run python -m verl_rhyme.config.generate"


def test_the_command_lists_all_options():
    result = CliRunner().invoke(app, ["options", "--json"])
    assert json.loads(result.stdout) == [dataclasses.asdict(option) for option in options()]
    table = CliRunner().invoke(app, ["options"]).stdout
    assert all(option.name in table for option in options())


@pytest.mark.parametrize("preset", [preset for preset in PRESETS if preset != "off"])
def test_a_preset_sets_exactly_its_mapping(preset):
    found = compose([f"+rhyme={preset}"])
    assert config_tree.from_verl(found) == parse(presets.tree(preset))
    assert found.trainer.v1.trainer_mode == ("separate_async" if preset == "stream" else "sync"), "the user's"
    if preset in PIPELINES:
        assert found.trainer.v1.separate_async.parameter_sync_step == 1
        assert found.actor_rollout_ref.rollout.scheduling_policy == "priority"


def test_overrides_of_a_preset_need_no_plus():
    ours = ["max_staleness=2", "streaming.part=0.5", "placement.policy=histopipe", "history.epochs=2"]
    changes = [f"{CONFIG_PATH}.{change}" for change in ours] + [f"+{CONFIG_PATH}.placement.options.tail=0.2"]
    rhyme = config_tree.from_verl(compose(["+rhyme=full", *changes]))
    assert (rhyme.max_staleness, rhyme.streaming.part, rhyme.history.epochs) == (2, 0.5, 2)
    assert (rhyme.placement.policy, rhyme.placement.options) == ("histopipe", {"tail": 0.2})


# ---- options of a policy match its class ----


def test_placement_options_match_the_arguments_of_the_policy():
    def arguments(policy):
        hints = get_type_hints(policy.__init__)
        _fleet, *others = inspect.signature(policy).parameters
        return {name: hints[name] for name in others}

    named = {name: arguments(policy) for name, policy in POLICIES.items() if name != "least_loaded"}  # verl's: null
    assert named == PLACEMENTS
