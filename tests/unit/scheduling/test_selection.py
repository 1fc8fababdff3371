"""What is trained has the policy's lengths under every schedule, because regenerated responses use the same noise.

The table of docs/pipeline.md is made by the same simulation.
"""

from itertools import islice

import pytest

from benchmarks import selection

STEPS = 5

#: Table of docs/pipeline.md: shift of the mean length of the response that a token of the gradient belongs to, with one
#: batch at a time, with several that are loaded together, and with stale tokens.
SHIFTS = {"token-mean": (-0.04, -0.21, -0.09), selection.NORM: (-0.27, -0.33, -0.30)}


def test_every_schedule_trains_the_lengths_of_an_unmoved_policy():
    """A part of ``python -m benchmarks.selection --all``; exact: each loaded prompt is trained with its first draws."""
    cases = list(selection.product())
    assert len(cases) > 800
    for name, rules, world in islice(cases, 0, None, 17):
        found = selection.measure(rules, STEPS, 1, **world)
        assert abs(found["shift"]) < 1e-9, (name, world)


@pytest.mark.parametrize(
    ("preset", "changes", "separate", "world"),
    [
        ("sorted", {}, False, {}),
        ("sorted", {"drafting.enable": False}, False, {}),
        ("full", {"scheduling.at_version": "regenerate"}, True, {}),
        ("full", {}, True, {"restarts": True}),  # penalties: interrupted responses start again, at any staleness
    ],
)
def test_with_fresh_noise_it_would_train_short_responses(preset, changes, separate, world):
    rules = selection.rules(preset, changes, separate)
    assert selection.measure(rules, 24, 2, fresh=True, **world)["shift"] < -0.03


@pytest.mark.parametrize(
    ("preset", "changes", "separate", "kind"),
    [
        ("full", {"max_staleness": 0, "scheduling.in_flight": 1.0}, False, 0),
        ("full", {"max_staleness": 0}, False, 1),
        ("sorted", {"max_staleness": 1}, False, 1),
        ("full", {}, False, 2),
        ("full", {"max_staleness": 4}, True, 2),
    ],
)
def test_loss_averages_shift_the_gradient_as_documented(preset, changes, separate, kind):
    found = selection.measure(selection.rules(preset, changes, separate), 24, 2)
    for average, name in (("token-mean", "token-mean"), (selection.NORM, "norm")):
        assert found[name] == pytest.approx(SHIFTS[average][kind], abs=0.05)
