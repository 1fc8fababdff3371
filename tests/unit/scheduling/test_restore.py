"""A sample is restored from newer reports; ``test_rollout_world.py`` compares whole rollouts."""

from verl_rhyme.scheduling.rules import Rules
from verl_rhyme.scheduling.scheduler import Scheduler


def scheduler(at_version="regenerate", max_staleness=0):
    rules = {"max_staleness": max_staleness, "in_flight": 4, "refill": "when_empty"}
    built = Scheduler(Rules(1, 2, at_version=at_version, separate=True, relayed=True, **rules))
    built.begin(3)
    for number in range(built.loadable()):
        built.load(f"p{number}", 2)
    return built


def sample(built, uid="p0", number=0):
    found = built.ledger.prompt(uid).samples[number]
    return found.state, found.attempt, found.tokens, found.first_version


def test_an_interrupted_text_is_kept_where_it_may_continue():
    for first_version, kept in ((3, 3), (2, 2), (1, None)):
        built = scheduler("continue", max_staleness=1)
        assert built.restore("p0", 0, 4, "pending", 7, first_version) == (kept is not None)
        assert sample(built) == ("pending", 4, 7, kept)
    built = scheduler()
    assert not built.restore("p0", 0, 4, "pending", 7, 3)
    assert sample(built) == ("pending", 4, 7, None)
    assert built.dispatch()[0] == ("p0", 0)
    assert sample(built)[1] == 5


def test_samples_that_became_too_stale_are_regenerated():
    for state in ("generated", "finished"):
        built = scheduler()
        assert not built.restore("p0", 0, 0, state, 7, 2)
        assert sample(built) == ("pending", 0, 7, None)
        assert built.step.wasted_tokens == 7
        assert built.restore("p0", 1, 0, state, 7, 3)
        assert sample(built, number=1) == (state, 0, 7, 3)
    built = scheduler("finish", max_staleness=1)
    assert not built.restore("p0", 0, 0, "running", 7, 1)
    assert sample(built) == ("pending", 0, 7, None)


def test_a_running_sample_has_the_version_of_its_kept_tokens_until_it_reports():
    built = scheduler("finish", max_staleness=2)
    assert built.restore("p0", 0, 1, "running", 7, 2)
    assert built.restore("p0", 1, 0, "running", 0, None)
    assert [sample.oldest_version for sample in built.ledger.prompt("p0").samples] == [2, 3]
    assert built.dispatch()[0] == ("p1", 0), "it would run twice"
