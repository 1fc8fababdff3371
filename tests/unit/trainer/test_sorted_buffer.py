"""What the buffer makes of TransferQueue's tags."""

from collections import defaultdict

from verl_rhyme.sorting.controller import Rules
from verl_rhyme.trainer.sorted_buffer import SortedReplayBuffer
from verl_rhyme.workers.session import SESSIONS


class Buffer(SortedReplayBuffer):
    """Tags as a test sets them; nothing is cleared."""

    def __init__(self, tags):
        rules = Rules(batch_prompts=1, batch_samples=2)
        super().__init__(
            rules,
            rollout=None,
            trainer_mode="rhyme_sorted",
            trainer_config={},
            max_off_policy_threshold=None,
            max_off_policy_strategy="drop",
            sampler_kwargs={},
            refill_fn=lambda count: None,
        )
        self.tags = tags
        self.controller.begin(0)
        self.controller.load("a", 2)
        self.controller.dispatch()

    def _sync_metadata_from_transfer_queue(self):
        self.partitions = defaultdict(dict, {name: dict(tags) for name, tags in self.tags.items()})


GENERATED = {"status": "generated", "tokens": 5, "first_version": 0}


def states(buffer):
    return [sample.state for sample in buffer.controller.buffer.prompt("a").samples]


def test_a_sample_is_finished_when_all_its_trajectories_are_stored():
    buffer = Buffer({SESSIONS: {"a_0": GENERATED, "a_1": {"status": "running"}}, "train": {}})
    buffer._poll()
    assert states(buffer) == ["generated", "running"]
    # The key is there before its tag; an agent loop's second trajectory before its data.
    buffer.tags["train"] = {"a_0_0": {"status": "success"}, "a_0_1": {}}
    buffer._poll()
    assert states(buffer) == ["generated", "running"]
    buffer.tags["train"]["a_0_1"] = {"status": "success"}
    buffer._poll()
    assert states(buffer) == ["finished", "running"]
    assert buffer._trajectories() == {("a", 0): ["a_0_0", "a_0_1"]}


def test_what_an_earlier_attempt_left_is_not_taken_for_this_one():
    buffer = Buffer({SESSIONS: {"a_0": {"status": "running"}}, "train": {"a_0_0": {"status": "success"}}})
    buffer._poll()
    assert states(buffer) == ["running", "running"]


def test_an_interruption_makes_it_pending_with_something_kept():
    tag = {"status": "interrupted", "tokens": 3, "first_version": 0}
    buffer = Buffer({SESSIONS: {"a_0": tag, "a_1": GENERATED}, "train": {}})
    buffer._poll()
    assert states(buffer) == ["pending", "generated"]
    assert buffer._kept == {("a", 0)}
    assert buffer.controller.step.discarded_tokens == 3
