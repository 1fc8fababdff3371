"""The order in which samples start, in the scheduler and in vLLM's queue."""

from verl_rhyme.scheduling.rollout import Rollout
from verl_rhyme.scheduling.rules import Rules


def test_the_oldest_batch_starts_first_and_in_it_the_longest_expected():
    """`b` is unknown and may be long. A sample that was lost starts before longer ones of a younger batch."""
    rollout = Rollout(Rules(2, 4, max_staleness=1, separate=True))
    rollout.publish(0, 2)
    rollout.add_prompts([(uid, 2) for uid in "abcd"])
    rollout.expect({"a": 10, "c": 30, "d": 40})
    starts = rollout.fill(limit=3)
    assert [start.attempt.name for start in starts] == ["b_0", "b_1", "a_0"]
    rollout.lost([starts[0].attempt])
    rollout.expect({"c": 99})
    rest = rollout.fill()
    assert [start.attempt.uid for start in rest] == ["b", "a", "c", "c", "d", "d"]
    priorities = [start.assignment.priority for start in starts[1:] + rest[1:]]
    assert priorities == sorted(priorities)
    assert len(set(priorities)) == 4, "one for each prompt"
    assert (min(priorities), rest[0].assignment.priority) == (1, 1)
