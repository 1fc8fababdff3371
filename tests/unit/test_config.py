"""The typed configuration: strict about keys, types, ranges and contradictions."""

import dataclasses
import inspect
from typing import get_args, get_type_hints

import pytest
from omegaconf import OmegaConf

from verl_rhyme import combinations, config_tree
from verl_rhyme.config import (
    CONFIG_PATH,
    LENGTH_PLACEMENTS,
    PLACEMENTS,
    SORTING_CHOICES,
    SORTING_MODES,
    SORTING_UNITS,
    ConfigError,
    RhymeConfig,
)
from verl_rhyme.config_tree import parse
from verl_rhyme.preflight.compose import compose
from verl_rhyme.scheduling import rules
from verl_rhyme.scheduling.placement import POLICIES, PlacementPolicy


def test_defaults_survive_a_round_trip():
    assert parse(RhymeConfig().to_dict()) == RhymeConfig()


def test_no_tree_and_enable_false_are_stock_verl():
    assert parse(None) is None
    assert parse({"enable": False, "drafting": {"max_tokens": 8}}) is None


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"drafting": {"windw": {}}}, ["drafting.windw", "drafting.window?"]),
        ({"histroy": {}}, ["histroy", "history?"]),
        ({"zzz": 1}, ["zzz", "known here", "drafting"]),
        ({"drafting": {"max_tokens": "many"}}, ["drafting.max_tokens", "int", "'many'"]),
        ({"drafting": {"max_tokens": 129}}, ["drafting.max_tokens", "128"]),
        ({"drafting": {"enable": 1}}, ["drafting.enable", "bool"]),
        ({"drafting": 3}, ["drafting", "mapping"]),
        ({"drafting": {"match": {"min": 9}}}, ["match.max", "match.min (9)"]),
        (
            {"drafting": {"policy": "paper", "max_tokens": 4, "window": {"start": 8}}},
            ["window.start=8", "max_tokens=4"],
        ),
        ({"history": {"max_bytes": 10}}, ["history.max_bytes", "1 MiB"]),
        ({"history": {"epochs": 0}}, ["history.epochs"]),
        ({"sorting": {"load": "roling"}}, ["sorting.load", "group, rolling", "did you mean rolling?"]),
        ({"sorting": {"harvest": "loaded", "harvest_tokens": 9}}, ["harvest_tokens", "sorting.harvest=shortest"]),
        ({"sorting": {"start_order": None}}, ["sorting.start_order"]),
        ({"poll_interval": 0}, ["poll_interval"]),
        ({"streaming": {"elastic": {"least": 0}}}, ["streaming.elastic.least", "at least 1"]),
        ({"streaming": {"elastic": {"least": 3, "most": 2}}}, ["streaming.elastic.most", "least (3)"]),
        ({"streaming": {"elastic": {"least": 2, "start": 1}}}, ["streaming.elastic.start", "from", "(2)", "all"]),
        ({"streaming": {"elastic": {"most": 2, "start": 3}}}, ["streaming.elastic.start", "most (2)"]),
        ({"streaming": {"elastic": {"window": 0}}}, ["streaming.elastic.window"]),
        (
            {"placement": {"policy": "sticky"}},
            ["placement.policy", "least_loaded, sticky_group", "did you mean sticky_group?"],
        ),
        ({"placement": {"policy": "sticky_group", "options": {"facto": 2}}}, ["options.facto", "did you mean factor?"]),
        (
            {"placement": {"policy": "histopipe", "options": {"gain": 0.1}}},
            ["options.gain: histopipe has groups, two_tier, migrate, tail; it is of makespan"],
        ),
        (
            {"placement": {"policy": "sticky_group", "options": {"tail": 0.1}}},
            ["options.tail: sticky_group has factor; it is of histopipe and skewness_aware"],
        ),
        ({"placement": {"policy": "least_loaded", "options": {"x": 2}}}, ["options.x: least_loaded has seed"]),
        ({"placement": {"options": {"factor": 2}}}, ["placement.options", "without a policy"]),
        ({"placement": {"policy": "sticky_group", "options": 2}}, ["placement.options must be dict", "2"]),
        ({"drafting": {"sampler_memory": 1 << 30}}, ["sampler_memory is gone", "drop it", "drafting.logits_memory"]),
        ({"history": {"keep": "served"}}, ["history.keep is gone", "drop it", "copies"]),
    ],
)
def test_errors_name_the_place_and_the_mend(tree, words):
    with pytest.raises(ConfigError) as caught:
        parse(tree)
    for word in words:
        assert word in str(caught.value)


def test_whole_numbers_may_be_written_as_floats():
    parsed = parse({"history": {"max_bytes": 1e9}})
    assert parsed is not None
    assert parsed.history.max_bytes == 1_000_000_000
    assert isinstance(parsed.history.max_bytes, int)


def test_reads_verls_config_and_its_rollout_part():
    whole = OmegaConf.create({"actor_rollout_ref": {"rollout": {"custom": {"rhyme": {"poll_interval": 1}}}}})
    assert config_tree.from_verl(whole) == config_tree.from_rollout(whole.actor_rollout_ref.rollout)
    assert config_tree.from_verl(OmegaConf.create({})) is None
    assert config_tree.from_rollout(OmegaConf.create({"custom": None})) is None


def test_the_groups_set_every_key_and_its_defaults(request):
    def tree(group):
        path = request.config.rootpath / "verl_rhyme" / "conf" / "rhyme" / f"{group}.yaml"
        return OmegaConf.to_container(OmegaConf.load(path).actor_rollout_ref.rollout.custom.rhyme)

    defaults = RhymeConfig().to_dict()
    sorting, streaming = defaults.pop("sorting"), defaults.pop("streaming")
    assert tree("histospec") == defaults
    old = {key.removeprefix("sorting."): None for key in config_tree.RENAMED}  # so that they compose without +
    assert tree("sorted") == {"sorting": {**sorting, "mode": "on_policy", **old}}
    assert tree("stream")["streaming"] == {**streaming, "enable": True}
    assert {field.name for field in dataclasses.fields(RhymeConfig)} == {*defaults, "sorting", "streaming"}


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_numbers_are_finite(number):
    for tree in (
        {"sorting": {"oversubscription": number}},
        {"poll_interval": number},
        {"placement": {"policy": "sticky_group", "options": {"factor": number}}},
    ):
        with pytest.raises(ConfigError, match=r"(oversubscription|poll_interval|factor) must be finite, not (inf|nan)"):
            parse(tree)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"sorting": {"mode": "histopipe", "max_staleness": 0}}, "max_staleness must be left out with .*histopipe"),
        ({"sorting": {"mode": "histopipe", "harvest_tokens": 9}}, "harvest_tokens must be left out with .*histopipe"),
        ({"sorting": {"mode": "histopipe", "group_batches": 8}}, "group_batches must be left out with .*histopipe"),
        ({"sorting": {"mode": "on_policy", "load": "rolling"}}, "sorting.load must be group .*mode=on_policy"),
        (
            {"sorting": {"mode": "partial", "load": "rolling", "group_batches": 8}},
            "group_batches must be left out with sorting.load=rolling, .*max_staleness",
        ),
        ({"sorting": {"mode": "sometimes"}}, "sorting.mode must be null, on_policy, partial, histopipe"),
        ({"sorting": {"mode": "on_policy", "max_staleness": -1}}, "max_staleness must be at least 0, not -1"),
        ({"sorting": {"mode": "stream", "max_staleness": -1}}, "max_staleness must be at least 0, not -1"),
        ({"sorting": {"mode": "partial", "max_staleness": 0}}, "on-policy bound is sorting.mode=on_policy"),
        ({"sorting": {"mode": "partial", "max_versions": 1}}, "on-policy bound is sorting.mode=on_policy"),
        ({"sorting": {"mode": "partial", "max_versions": "two"}}, "sorting.max_staleness must be int, not 'two'"),
        (
            {"sorting": {"mode": "partial", "max_versions": 2, "max_staleness": 3}},
            "sorting.max_versions=2 contradicts .*sorting.max_staleness=3, whose earlier name it is: drop it",
        ),
        (
            {"sorting": {"mode": "on_policy", "coupled": False}, "sampling": {"coupled": True}},
            "sorting.coupled=False contradicts .*sampling.coupled=True",
        ),
        (
            {"sorting": {"mode": "on_policy", "max_staleness": 5}},
            "sorting.max_staleness must be left out with sorting.mode=on_policy.*, not 5",
        ),
        ({"sampling": {"coupled": True, "verify": "vllm"}}, "false with sampling.verify=vllm"),
        ({"sampling": {"verify": "theirs"}}, "sampling.verify must be ours or vllm"),
        ({"sorting": {"oversubscription": 100}}, "sorting.oversubscription must be from 1 to 32"),
        ({"sorting": {"order": 1.5}}, "sorting.order must be null, or from 0 to 1"),
        ({"sorting": {"group_batch": 2}}, "did you mean .*sorting.group_batches"),
    ],
)
def test_contradictions_of_sorting_say_what_to_change(tree, message):
    with pytest.raises(ConfigError, match=message):
        parse(tree)


def test_a_key_of_an_earlier_version_is_read_and_told(monkeypatch):
    told = []
    monkeypatch.setattr(config_tree.logger, "warning", lambda message, *values: told.append(message % values))
    found = parse({"sorting": {"mode": "on_policy", "coupled": True}})
    assert found.sampling.coupled
    [line] = told
    assert line.index("sorting.coupled is now called") < line.index("sampling.coupled")


def test_a_key_of_an_earlier_version_may_have_another_value_there(monkeypatch):
    told = []
    monkeypatch.setattr(config_tree.logger, "warning", lambda message, *values: told.append(message % values))
    # as +rhyme=sorted has it: the new key at its default, the old one at null until it is overridden
    tree = {"sorting": {"mode": "partial", "max_staleness": 1, "max_versions": None}}
    assert parse(tree).sorting.max_staleness == 1
    assert not told
    tree["sorting"]["max_versions"] = 4
    assert parse(tree).sorting.max_staleness == 3
    tree["sorting"]["max_staleness"] = 3  # that is what it says
    assert parse(tree).sorting.max_staleness == 3
    [line, _] = told
    assert line.index("sorting.max_versions is now called") < line.index("sorting.max_staleness: write 3 for 4")


def test_a_preset_is_overridden_without_a_plus():
    ours = [
        "sorting.mode=partial",
        "sorting.max_versions=3",
        "sampling.coupled=true",
        "placement.policy=sticky_group",
        "history.epochs=2",
    ]
    changes = [f"{CONFIG_PATH}.{change}" for change in [*ours, "sorting.coupled=true", "sorting.draft_ahead=true"]]
    found = compose(["+rhyme=sorted", "trainer.v1.trainer_mode=separate_async", *changes])
    assert found.trainer.v1.trainer_mode == "separate_async"
    rhyme = config_tree.from_verl(found)
    assert (rhyme.sorting.max_staleness, rhyme.sorting.draft_ahead, rhyme.sampling.coupled) == (2, True, True)
    assert (rhyme.placement.policy, rhyme.history.epochs) == ("sticky_group", 2)
    options = [f"{CONFIG_PATH}.placement.policy=sticky_group", f"+{CONFIG_PATH}.placement.options.factor=1.5"]
    assert config_tree.from_verl(compose(["+rhyme=histospec", *options])).placement.options == {"factor": 1.5}


@pytest.mark.parametrize(
    ("changes", "coupled"),
    [
        ([], True),
        (["sampling.coupled=false"], False),
        (["sorting.mode=partial"], False),  # nothing is drawn again
        (["drafting.enable=false"], False),  # nothing to verify
        (["sampling.verify=vllm"], False),  # it draws with noise of its own
    ],
)
def test_on_policy_sorted_rollout_is_coupled_unless_something_else_is_asked_for(changes, coupled):
    engine = ["actor_rollout_ref.rollout.name=vllm"]
    found = compose(["+rhyme=sorted", *engine, *(f"{CONFIG_PATH}.{change}" for change in changes)])
    rhyme = config_tree.from_verl(found)
    assert rhyme.coupled == coupled
    assert not list(combinations.refusals(found, rhyme))


@pytest.mark.parametrize("preset", ["histospec", "histopipe", "stream", "full"])
def test_other_presets_are_not_coupled(preset):
    assert not config_tree.from_verl(compose([f"+rhyme={preset}"])).coupled


def test_every_placement_has_the_options_that_its_policy_takes():
    def options(policy):
        hints = get_type_hints(policy.__init__)
        _fleet, *others = inspect.signature(policy).parameters
        return {name: hints[name] for name in others}

    assert {name: options(policy) for name, policy in POLICIES.items()} == PLACEMENTS


def test_placements_by_forecasts_are_those_that_plan():
    def plans(policy):
        return any(getattr(policy, name) is not getattr(PlacementPolicy, name) for name in ("plan", "coming"))

    assert {name for name, policy in POLICIES.items() if plans(policy)} == set(LENGTH_PLACEMENTS)


@pytest.mark.parametrize(
    ("policy", "name", "value", "kind"),
    [
        ("histopipe", "groups", "x", "int"),
        ("histopipe", "groups", 2.5, "int"),
        ("histopipe", "groups", True, "int"),
        ("histopipe", "migrate", "nope", "bool"),
        ("histopipe", "two_tier", "no_way", "bool"),
        ("histopipe", "tail", True, "float"),
        ("least_loaded", "seed", "x", "int or null"),
        ("makespan", "gain", None, "float"),
    ],
)
def test_options_of_a_placement_have_its_types(policy, name, value, kind):
    message = rf"placement\.options\.{name} must be {kind}, not {value!r}"
    with pytest.raises(ConfigError, match=message):
        parse({"placement": {"policy": policy, "options": {name: value}}})


def test_options_of_a_placement_may_be_written_as_the_other_number():
    found = parse({"placement": {"policy": "histopipe", "options": {"groups": 2.0, "tail": 1}}}).placement.options
    assert [(value, type(value)) for value in found.values()] == [(2, int), (1.0, float)]


def test_every_mode_names_a_set_of_rules():
    assert tuple(rules.MODES) == SORTING_MODES
    assert get_args(rules.Unit) == SORTING_UNITS
    kinds = {"load": rules.Load, "harvest": rules.HarvestOrder, "start_order": rules.StartOrder}
    choices = {name: tuple(filter(None, values)) for name, values in SORTING_CHOICES.items()}  # null is the mode's own
    assert {name: get_args(kind) for name, kind in kinds.items()} == choices
    for mode in SORTING_MODES:
        parsed = parse({"sorting": {"mode": mode}}).sorting
        assert rules.named(mode, batch_prompts=1, batch_samples=1, max_staleness=parsed.max_staleness)
