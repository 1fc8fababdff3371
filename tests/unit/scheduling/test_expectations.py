"""Expected lengths of prompts as they arrive, finish and leave."""

from __future__ import annotations

import json

import pytest

from verl_rhyme.scheduling.expectations import Expectations

PROMPTS = {"a": 100, "b": 400, "c": 50}


def epoch(expectations: Expectations, number: int) -> dict[str, float]:
    """Run one visit of all prompts; return the expected lengths, by key."""
    uids = {f"{key}{number}": key for key in PROMPTS}
    expected = expectations.add_prompts(uids)
    for uid, key in uids.items():
        for i in range(4):
            expectations.generated(uid, i, PROMPTS[key] + 10 * i)
    expectations.retain(lambda uid: False)
    return {uids[uid]: tokens for uid, tokens in expected.items()}


def test_expected_lengths_follow_the_history():
    expectations = Expectations(1000)
    first = epoch(expectations, 0)
    assert len(set(first.values())) == 1, "nothing is known yet"
    for number in range(1, 4):
        expected = epoch(expectations, number)
    assert expected["c"] < expected["a"] < expected["b"]
    assert expected["b"] == pytest.approx(415, rel=0.2)
    measured = expectations.measures()
    assert measured["rank_correlation"] > 0
    assert expectations.measures() == {}
    assert expectations.prompt_state == {}


def test_a_prompt_that_leaves_early_keeps_its_finished_lengths():
    expectations = Expectations(1000)
    expectations.add_prompts({"u": "key", "v": ""})
    expectations.generated("u", 3, 500)
    assert expectations.prompt_state == {"u": ["key", [(3, 500)]], "v": ["", []]}
    expectations.retain(lambda uid: uid == "v")
    assert expectations.measures()["seen"] == 0
    expectations.generated("u", 3, 700)  # late, and nobody's
    assert expectations.predictor.knows("key")
    assert expectations.measures() == {}


def test_a_response_without_tokens_has_no_length():
    """Its agent loop returned no trajectory; its length is unknown."""
    expectations = Expectations(1000)
    expectations.add_prompts({"u": "key", "v": "other"})
    for number in range(4):
        expectations.generated("u", number, 0 if number else 500)
        expectations.generated("v", number, 0)
    expectations.retain(lambda uid: False)
    assert [expectations.predictor.knows(key) for key in ("key", "other")] == [True, False]


def test_a_prompt_that_is_present_twice_has_the_siblings_of_both():
    expectations = Expectations(30_000)
    expectations.add_prompts({"first": "key", "second": "key", "other": "another"})
    for number in range(7):
        expectations.generated("first", number, 200)
    alone, *both = (
        expectations.lengths(uids, [0] * len(uids))
        for uids in (["first", "other"], ["first", "second"], ["second", "first"])
    )
    assert 2 * alone.expected[0] < alone.expected[1]
    for forecast in both:
        assert forecast.expected.tolist() == [alone.expected[0]] * 2


def test_prompts_without_a_key_are_no_siblings():
    expectations = Expectations(30_000)
    count = 200
    expectations.add_prompts({f"u{i}": "" for i in range(count)} | {f"v{i}": f"key {i}" for i in range(count)})
    forecasts = [expectations.lengths([f"{kind}{i}" for i in range(count)], [600] * count) for kind in "uv"]
    assert forecasts[0].expected.tolist() == forecasts[1].expected.tolist()
    expectations.generated("u0", 0, 20_000)
    forecast = expectations.lengths(["u0", "u1"], [0, 0])
    assert forecast.expected[0] > forecast.expected[1]


def test_a_regenerated_sample_counts_once():
    """On-policy, untrained finished samples are regenerated: short ones would count again and again."""
    once, again = Expectations(30_000), Expectations(30_000)
    for expectations in (once, again):
        expectations.add_prompts({"u": "key"})
        for _ in range(1 if expectations is once else 5):
            for number in range(12):
                expectations.generated("u", number, 500)
        for number in range(12, 16):
            expectations.generated("u", number, 18_000)
        expectations.retain(lambda uid: False)
    (first,), (second,) = (e.predictor.forecast(["key"]).expected for e in (once, again))
    assert first == second > 1000


def test_prompts_that_left_are_learnt_with_all_their_samples():
    expectations = Expectations(1000)
    expectations.add_prompts({"u": "key", "again": "key", "failed": "other", "v": ""})
    expectations.generated("u", 0, 5)
    expectations.generated("v", 0, 5)
    expectations.retain(lambda uid: True)  # a batch took some; the group has samples to come
    expectations.generated("u", 1, 70)
    expectations.generated("again", 0, 6)
    expectations.retain(lambda uid: False)
    assert expectations.predictor._known["key"].tolist() == [5, 70, 6]
    assert not expectations.predictor.knows(""), "prompts without a key are no history"


def test_present_prompts_are_restored_after_a_restart():
    before, after = Expectations(1000), Expectations(1000)
    before.add_prompts({"u": "key", "gone": "other"})
    before.generated("u", 0, 300)
    state = json.loads(json.dumps(before.prompt_state))
    assert set(after.restore_prompts(state, lambda uid: uid == "u")) == {"u"}
    after.generated("u", 1, 310)
    after.retain(lambda uid: False)
    assert after.predictor.forecast(["key"]).expected[0] == 305
    assert after.restore_prompts({"torn": 1}, lambda uid: True) == {}
    assert after.errors == 1


def test_it_survives_a_restart():
    expectations, again = Expectations(1000), Expectations(1000)
    for number in range(3):
        epoch(expectations, number)
    again.load_state_dict(json.loads(json.dumps(expectations.state_dict())))
    assert epoch(again, 9) == pytest.approx(epoch(expectations, 9))


def test_prompt_tokens_are_the_reported_ones_or_the_mean():
    expectations, again = Expectations(1000), Expectations(1000)
    expectations.add_prompts({"u": "short", "v": "long", "w": "new", "x": ""})
    assert expectations.prompt_tokens(["u", "x", "gone"]) == [0, 0, 0]
    expectations.set_prompt_tokens("u", 90)
    expectations.set_prompt_tokens("u", 100)  # the latest counts
    expectations.set_prompt_tokens("v", 301)
    expectations.set_prompt_tokens("x", 5000)  # nobody knows whose
    expectations.set_prompt_tokens("gone", 5000)
    assert expectations.prompt_tokens(["u", "v", "w", "x", "gone"]) == [100, 301, 200, 200, 200]
    again.load_state_dict(json.loads(json.dumps(expectations.state_dict())))
    again.add_prompts({"y": "long"})
    assert again.prompt_tokens(["y", "w"]) == [301, 200]


def test_an_error_costs_the_expectation_alone():
    expectations = Expectations(1000)
    expectations.load_state_dict({"prompts": "torn"})
    assert expectations.errors == 1
    assert "KeyError" in expectations.last_error
    expectations.predictor = None  # type: ignore[assignment]
    assert expectations.add_prompts({"u": "key"}) == {}
    expectations.generated("u", 0, 3)
    expectations.retain(lambda uid: False)
    assert expectations.measures() == {}
    assert expectations.state_dict() == {}
    assert expectations.errors == 4


def test_a_step_sends_what_it_learnt_and_no_more():
    """100,000 known prompts take half a second to send."""
    expectations, mirror = Expectations(1000), Expectations(1000)
    for number in range(40):
        expectations.add_prompts({f"u{number}": f"key {number}"})
        expectations.set_prompt_tokens(f"u{number}", 30 + number)
        expectations.generated(f"u{number}", 0, 100)
        expectations.retain(lambda uid: False)
        changes = json.loads(json.dumps(expectations.pop_changes()))
        assert [*changes["lengths"]] == [*changes["prompt_tokens"]] == [f"key {number}"]
        mirror.update(changes)
        if number == 20:  # the coordinator was restarted
            expectations = Expectations(1000)
            expectations.load_state_dict(mirror.state_dict())
    assert mirror.state_dict() == expectations.state_dict()
    assert mirror.errors == 0
