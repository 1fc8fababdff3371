"""Acceptance alarm."""

from verl_rhyme.observability import metrics as names
from verl_rhyme.observability.alarms import WINDOW, AcceptanceAlarm


def step(drafted, accepted):
    return {names.SPEC_DRAFTED: drafted, names.SPEC_ACCEPTED: accepted}


def test_warns_once_and_is_active_until_a_token_is_accepted():
    alarm = AcceptanceAlarm()
    assert alarm.observe(step(WINDOW - 1, 0)) is None
    assert not alarm.active
    assert "all rejected" in (alarm.observe(step(1, 0)) or "")
    assert alarm.observe(step(WINDOW, 0)) is None, "warns once"
    assert alarm.active
    assert alarm.observe(step(10, 1)) is None
    assert not alarm.active
    assert "all rejected" in (alarm.observe(step(WINDOW, 0)) or "")


def test_no_alarm_without_drafts():
    alarm = AcceptanceAlarm()
    for _ in range(100):
        assert alarm.observe({}) is None
        assert alarm.observe(step(0, 0)) is None
    assert not alarm.active
