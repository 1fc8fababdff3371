"""Samples that cannot be started: again and again is the end of the run, now and then is not."""

from verl_rhyme.scheduling.lost_starts import LostStarts


def is_the_end(*ended):
    """Of these, one after another: (when, lost)."""
    starts = LostStarts()
    return max(starts.ended(lost, when) for when, lost in ended)


def test_minutes_of_lost_starts_end_the_run():
    assert is_the_end(*((10.0 * i, True) for i in range(20)))
    assert not is_the_end(*((10.0 * i, True) for i in range(19)))


def test_a_start_in_between_or_a_long_pause_resets_the_count():
    assert not is_the_end(*((10.0 * i, i != 10) for i in range(25)))
    assert not is_the_end((0.0, True), (240.0, True), (500.0, True)), "hundreds may have started, and told nothing"
