"""The scheduler's decisions, one by one; test_invariants.py has the properties of all schedules."""

import pytest

from verl_rhyme.scheduling.rules import Rules
from verl_rhyme.scheduling.scheduler import Scheduler

#: SortedRL's three batches in flight, of a prompt with two samples each; on-policy, partial.
LOADS = {"in_flight": 3, "refill": "when_empty"}
ON_POLICY, PARTIAL = {"max_staleness": 0, **LOADS}, {"max_staleness": 1, **LOADS}
SEPARATE = {"separate": True, "relayed": True}
FINISHING = {**SEPARATE, "at_version": "finish", "in_flight": 3}


def scheduler(batch=1, **rules):
    built = Scheduler(Rules(batch, 2 * batch, **{**ON_POLICY, **rules}))
    built.begin(0)
    load(built)
    built.dispatch()
    return built


def load(built):
    for _ in range(built.loadable()):
        built.load(f"p{built.ledger.loaded}", 2)


def running(built):
    return [prompt.uid for prompt, number, _ in built.ledger.samples("running") if number == 0]


def finish(built, uid, *lengths, version=0):
    for number, length in enumerate(lengths):
        built.generate(uid, number, length, version)
        built.finish(uid, number)


def test_of_finished_groups_the_first_loaded_are_trained_sorted_by_length():
    built = scheduler()
    finish(built, "p2", 9, 11)
    finish(built, "p0", 30, 20)
    batch = built.collect()
    assert batch.samples == [("p0", 1), ("p0", 0)]
    assert batch.lengths == [20, 30]


@pytest.mark.parametrize(("bound", "stale"), [(0, [("p2", 0), ("p2", 1)]), (2, [])])
def test_surplus_is_stale_on_policy_and_else_kept(bound, stale):
    built = scheduler(max_staleness=bound)
    finish(built, "p0", 30, 30)
    finish(built, "p2", 9, 9)
    built.collect()
    assert built.begin(1) == stale
    assert built.step.wasted_tokens == 9 * len(stale)
    assert built.ready() == (not stale)


def test_a_dropped_prompt_wastes_its_trainable_tokens_once():
    built = scheduler(unit="trajectory")
    finish(built, "p1", 5, 6)
    assert built.collect().lengths == [5, 6]
    built.interrupt("p0", 0, 100, 0), built.interrupt("p0", 1, 30, 0)
    assert built.step.wasted_tokens == 0, "the engines might continue under this version"
    built.begin(1)
    assert built.step.wasted_tokens == 130
    built.dispatch()
    built.drop("p0")
    assert built.step.wasted_tokens == 130
    built.generate("p2", 0, 7, 1), built.finish("p2", 0), built.generate("p2", 1, 9, 1)
    built.drop("p2")
    assert built.step.wasted_tokens == 146


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (lambda c: finish(c, "p0", 5) or c.finish("p0", 0), "cannot become finished: it is finished"),
        (lambda c: c.load("p0", 2), "p0 is loaded already"),
        (lambda c: c.collect(), "call ready"),
        (lambda c: c.ledger.move("p0", 0, "running"), "cannot become running: it is running"),
    ],
)
def test_impossible_events_are_rejected(event, message):
    with pytest.raises(ValueError, match=message):
        event(scheduler())


# ---- the pipeline ----


def test_no_prompt_begins_between_a_batch_and_its_policy_unless_they_start_early():
    for early in (False, True):
        built = scheduler(max_staleness=2, in_flight=2, refill="always", start_early=early, **SEPARATE)
        built.interrupt("p1", 0, 3, 0)
        finish(built, "p0", 5, 5)
        built.collect()
        load(built)
        assert built.dispatch() == [("p1", 0)] + [("p2", 0), ("p2", 1)] * early, "samples of started prompts continue"
        built.begin(1)
        assert built.dispatch() == [("p2", 0), ("p2", 1)] * (not early)


def test_tokens_without_a_version_are_refused():
    """Their staleness is unknown: they must not count as the current policy's, nor be continued."""
    built = scheduler(max_staleness=1)
    built.begin(2)
    built.dispatch()
    for event in (built.generate, built.interrupt):
        with pytest.raises(ValueError, match="5 tokens without a policy version"):
            event("p0", 0, 5, None)
    assert built.generate("p0", 0, 0, None), "a response without policy tokens"
    assert built.interrupt("p0", 1, 0, None)


def test_a_replica_may_generate_with_the_oldest_version_within_the_bound():
    """Of update batches as they were loaded, with replicas that take new versions one by one."""
    built = scheduler(max_staleness=1, take="loaded", in_flight=None, refill="always", **SEPARATE)
    assert built.oldest_version("p0") == built.oldest_version("p1") == 0  # p1 is trained by version 1 at the earliest
    finish(built, "p0", 3, 3)
    built.collect()
    assert built.oldest_version("p1") == 0
    built.load("p2", 2)
    assert built.oldest_version("p1") == 0
    assert built.oldest_version("p2") == 1, "it is trained by version 2, which is not there yet"
    built.begin(1)
    assert [built.oldest_version(uid) for uid in ("p1", "p2")] == [0, 1]
    built.load("p3", 2)
    assert built.oldest_version("p3") == 1, "no update comes before p3 starts"


@pytest.mark.parametrize(("relayed", "wanted"), [(True, 3), (False, 0)])
def test_any_of_the_next_batches_may_take_the_first_finished_samples(relayed, wanted):
    built = scheduler(max_staleness=1, separate=True, relayed=relayed)
    built.begin(3)
    assert built.oldest_version("p1") == wanted


def test_a_batch_waits_for_rewards_of_the_first_samples_but_not_for_running_ones():
    built = scheduler(max_staleness=1, **FINISHING)
    finish(built, "p1", 9, 9)
    assert built.has_settled(0.0)  # p0 runs on
    assert all(built.generate("p0", number, 5, 0) for number in range(2))
    assert not built.has_settled(0.0)
    assert built.has_settled(30.0)
    assert built.collect().samples == [("p1", 0), ("p1", 1)]


# ---- tail batching ----


def rounds(batch=2, **rules):
    """Lengths are known of earlier prompts, of which one in four has 100 tokens, the others 10."""
    built = Scheduler(Rules(batch, batch, **{"max_staleness": 0, "in_flight": 1.5, "put_off": 0.25, **rules}))
    built.begin(0)
    for number in range(4 * batch):
        built._tail.expected.append(100.0 if number % 4 == 0 else 10.0)
    built._tail.restore([], False)
    return built


def test_a_prompt_expected_among_the_longest_is_put_off_and_another_loaded_for_it():
    built = rounds()
    for uid in ("p0", "p1", "p2"):
        built.load(uid, 1)
        built.expect(uid, 120 if uid == "p1" else 9)
    assert list(built.ledger.put_off) == ["p1"]
    assert built.loadable() == 1
    assert [uid for uid, _ in built.dispatch()] == ["p0", "p2"]


def test_each_prompt_counts_once_among_the_expected_lengths():
    """A ranker's forecast replaces an earlier one; a resumed run forecasts its prompts again."""
    built = rounds()
    built.load("p0", 1)
    built.load("p1", 1)
    for uid, tokens in (("p0", 30), ("p1", 50), ("p0", 40)):
        built.expect(uid, tokens)
    resumed = rounds()
    resumed._tail.expected.clear()
    resumed.load_state_dict(built.state_dict())
    resumed.expect("p0", 45)
    for scheduler, latest in ((built, [50, 40]), (resumed, [50, 45])):
        window = list(scheduler._tail.expected)
        assert window[-2:] == latest
        assert not {30, 50, 40, 45}.difference(latest) & set(window)
        assert sorted(window) == scheduler._tail._sorted


def test_prompts_that_a_batch_left_out_wait_for_a_separate_round():
    built = rounds(in_flight=2, put_off=0)
    names = iter(f"p{number}" for number in range(20))

    def update(version, finished):
        built.begin(version)
        for uid in [next(names) for _ in range(built.loadable())]:
            built.load(uid, 1)
        started = {uid for uid, _ in built.dispatch()}
        for uid in finished:
            built.generate(uid, 0, 5, version)
            built.finish(uid, 0)
        built.collect()
        for uid in started - set(finished):
            built.interrupt(uid, 0, 3, version)
        return started

    assert update(0, ["p0", "p2"]) == {"p0", "p1", "p2", "p3"}
    assert update(1, ["p1", "p3"]) == {"p1", "p3"}, "prompts that were left out have a separate round"
    assert update(2, ["p4", "p5"]) == {"p4", "p5", "p6", "p7"}
