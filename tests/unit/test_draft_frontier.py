"""What two drafters make where they verify as much."""

import pytest

from benchmarks.draft_frontier import frontier


def row(arm, verified, tokens, trace="t", epochs="later"):
    return {"trace": trace, "epochs": epochs, "arm": arm, "verified_per_token": verified, "tokens_per_step": tokens}


def test_between_two_floors_it_is_interpolated():
    rows = [
        row("adaptive floor 0.1", 2.0, 3.0),
        row("adaptive floor 0.4", 1.5, 2.0),
        row("adaptive floor 0.1, 8 epochs", 1.8, 9.0),
        row("arctic factor 1", 1.75, 2.0),
        row("arctic factor 4", 9.0, 4.0),
        row("adaptive floor 0.1", 1.0, 1.0, epochs="first"),
        row("arctic factor 1", 1.0, 2.0, epochs="first"),
        row("arctic factor 1", 1.0, 2.0, trace="only theirs"),
    ]
    later, first = frontier(rows)
    assert (later["ours"], later["theirs"], later["ratio"]) == (2.5, 2.0, 1.25)
    assert (first["epochs"], first["ratio"]) == ("first", pytest.approx(0.5))
