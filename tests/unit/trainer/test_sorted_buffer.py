"""What the buffer makes of TransferQueue's tags."""

import json
from collections import defaultdict

import pytest

from verl_rhyme.scheduling.rules import named
from verl_rhyme.trainer import sorted_buffer
from verl_rhyme.trainer.sorted_buffer import SortedReplayBuffer
from verl_rhyme.workers.session import PROMPTS, SESSIONS, sample_of, session_key


class AgentLoops:
    """Says what it is about: ``running``; ``None`` while it does not answer."""

    def __init__(self):
        self.running, self.abandoned, self.started = None, [], []

    def running_attempts(self):
        return self.running

    def abandon_attempts(self, sessions):
        self.abandoned += sessions

    def dispatch_limits(self):
        return 100, 1

    def load_prompts(self, count):
        return []

    def start_samples(self, starts):
        self.started += [start for group in starts.values() for start in group]


class Buffer(SortedReplayBuffer):
    """Tags as a test sets them."""

    def __init__(self, tags, mode="on_policy", **rules):
        super().__init__(
            named(mode, batch_prompts=1, batch_samples=2, max_staleness=1, **rules),
            rollout=AgentLoops(),
            trainer_mode="rhyme_sorted",
            trainer_config={},
            max_off_policy_threshold=None,
            max_off_policy_strategy="drop",
            sampler_kwargs={},
            refill_fn=lambda count: None,
        )
        self.tags = tags
        self.built.append(self)
        self.scheduler.begin(0)
        self.scheduler.load("a", 2)
        self.scheduler.dispatch()

    def _sync_metadata_from_transfer_queue(self):
        self.partitions = defaultdict(dict, {name: dict(tags) for name, tags in self.tags.items()})


@pytest.fixture(autouse=True)
def queue(monkeypatch):
    """What is cleared goes from the tags; nothing is fetched."""

    def kv_clear(keys, partition_id):
        for buffer in built:
            for key in keys:
                buffer.tags.get(partition_id, {}).pop(key, None)

    def kv_batch_put(keys, partition_id, tags):
        for buffer in built:
            buffer.tags[partition_id].update(zip(keys, tags, strict=True))

    built = []
    monkeypatch.setattr(sorted_buffer.tq, "kv_clear", kv_clear)
    monkeypatch.setattr(sorted_buffer.tq, "kv_batch_put", kv_batch_put)
    monkeypatch.setattr(Buffer, "built", built, raising=False)


GENERATED = {"status": "generated", "tokens": 5, "first_version": 0}


def states(buffer):
    return [sample.state for sample in buffer.scheduler.ledger.prompt("a").samples]


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
    assert buffer._trajectories() == {"a_0": ["a_0_0", "a_0_1"]}


def test_what_an_earlier_attempt_left_is_not_taken_for_this_one():
    buffer = Buffer({SESSIONS: {"a_0": {"status": "running"}}, "train": {"a_0_0": {"status": "success"}}})
    buffer._poll()
    assert states(buffer) == ["running", "running"]


def test_an_interruption_makes_it_pending_with_something_kept():
    tag = {"status": "interrupted", "tokens": 3, "first_version": 0}
    buffer = Buffer({SESSIONS: {"a_0": tag, "a_1": GENERATED}, "train": {}})
    buffer._poll()
    assert states(buffer) == ["pending", "generated"]
    assert buffer._reports == {("a", 0): "a_0", ("a", 1): "a_1"}
    assert buffer.scheduler.step.wasted_tokens == 3


RUNNING = {"status": "running"}
STORED = {"status": "success"}


def roll_call(buffer, running):
    buffer._rollout.running, buffer._ask_at = running, 0.0
    buffer._poll()


def test_an_attempt_that_no_worker_knows_and_that_told_nothing_starts_again_under_another_name():
    buffer = Buffer({SESSIONS: {"a_0": RUNNING, "a_1": RUNNING}, "train": {}})
    roll_call(buffer, None)
    assert states(buffer) == ["running", "running"]  # not all have answered
    roll_call(buffer, {"a_1"})
    assert states(buffer) == ["pending", "running"]
    buffer._fill()
    (start,) = buffer._rollout.started
    assert start.session == session_key("a", 0, attempt=1) != "a_0"
    assert sample_of(start.session) == ("a", 0)
    assert buffer.scheduler.step.abandoned == 1


def test_who_told_of_the_end_before_the_look_or_started_after_the_question_is_not_lost():
    buffer = Buffer({SESSIONS: {"a_0": RUNNING, "a_1": RUNNING}, "train": {}})
    roll_call(buffer, None)  # asked
    buffer.tags[SESSIONS] |= {"a_0": GENERATED, "a_1": {"status": "interrupted", "tokens": 3, "first_version": 0}}
    buffer.tags["train"]["a_0_0"] = STORED
    buffer._poll()
    buffer._fill()  # the second starts again, under another name
    assert states(buffer) == ["finished", "running"]
    roll_call(buffer, set())
    assert states(buffer) == ["finished", "running"]


def test_a_response_whose_worker_died_at_its_reward_is_begun_from_what_it_had_said():
    buffer = Buffer({SESSIONS: {"a_0": GENERATED, "a_1": RUNNING}, "train": {}})
    buffer._poll()
    roll_call(buffer, {"a_1"})
    assert states(buffer) == ["pending", "running"]
    buffer._fill()
    (start,) = buffer._rollout.started
    assert start.kept == "a_0"
    assert "a_0" in buffer.tags[SESSIONS]


def test_what_an_abandoned_attempt_still_writes_is_nobodys():
    buffer = Buffer({SESSIONS: {"a_0": RUNNING, "a_1": RUNNING}, "train": {}}, stop_wait=5.0)
    assert not buffer.scheduler.settled(4.9)
    assert buffer.scheduler.settled(5.0)
    buffer._give_up()
    assert sorted(buffer._rollout.abandoned) == ["a_0", "a_1"]
    buffer._fill()
    again = session_key("a", 0, attempt=1)
    buffer.tags[SESSIONS] |= {"a_0": GENERATED, "a_1": {"status": "failed"}}  # late
    buffer.tags["train"] |= {"a_0_0": STORED}
    buffer._poll()
    assert states(buffer) == ["running", "running"]
    assert buffer.tags["train"] == {}, "it would be trained, or filtered by"
    buffer.tags["train"][f"{again}_0"] = STORED
    buffer.tags[SESSIONS][again] = GENERATED
    buffer._poll()
    assert states(buffer) == ["finished", "running"]
    assert set(buffer.tags[SESSIONS]) == {again, session_key("a", 1, attempt=1)}


@pytest.mark.parametrize("mode", ["on_policy", "partial"])
def test_after_a_resume_too_nobody_goes_on_from_what_an_abandoned_attempt_wrote(mode):
    """In partial mode its tokens are of a version that the ledger knows nothing of."""
    first = {"status": "interrupted", "tokens": 3, "first_version": 0}
    buffer = Buffer({SESSIONS: {"a_0": first, "a_1": RUNNING}, "train": {}}, mode=mode)
    buffer._poll()
    buffer._fill()  # the first goes on from its own report
    buffer._give_up()
    again = session_key("a", 0, attempt=1)
    state = json.loads(json.dumps(buffer.state_dict()))
    late = {"status": "interrupted", "tokens": 9, "first_version": 0}
    buffer.tags[SESSIONS] |= {again: late, "a_1": late}  # between the ledger's checkpoint and TransferQueue's
    resumed = Buffer({**buffer.tags, PROMPTS: {"a": {}}}, mode=mode)
    resumed.load_state_dict(state)
    assert set(resumed.tags[SESSIONS]) == {"a_0"}
    resumed._fill()
    assert {start.session: start.kept for start in resumed._rollout.started} == {
        session_key("a", 0, attempt=2): "a_0",
        session_key("a", 1, attempt=1): None,
    }


def test_after_a_resume_what_had_told_its_end_is_still_gone_on_from():
    buffer = Buffer({SESSIONS: {"a_0": GENERATED, "a_1": GENERATED}, "train": {"a_1_0": STORED}})
    buffer._poll()
    assert states(buffer) == ["generated", "finished"]
    for state in (buffer.state_dict(), buffer.scheduler.state_dict()):  # the second: of before reports were in it
        resumed = Buffer({**buffer.tags, PROMPTS: {"a": {}}})
        resumed.load_state_dict(json.loads(json.dumps(state)))
        assert states(resumed) == ["pending", "finished"]
        assert resumed._reports == {("a", 0): "a_0", ("a", 1): "a_1"}


def test_a_checkpointed_report_that_turned_into_a_failure_is_not_gone_on_from():
    buffer = Buffer({SESSIONS: {"a_0": GENERATED, "a_1": RUNNING}, "train": {}})
    buffer._poll()
    state = buffer.state_dict()
    resumed = Buffer({SESSIONS: {"a_0": {"status": "failed"}}, PROMPTS: {"a": {}}, "train": {}})
    resumed.load_state_dict(state)
    resumed._fill()
    assert [start.kept for start in resumed._rollout.started] == [None, None]


def test_where_every_prompt_fails_an_error_says_what_the_last_failure_was():
    buffer = Buffer({SESSIONS: {}, "train": {}}, group_batches=4)
    loads = iter(range(1000))
    buffer._rollout.load_prompts = lambda count: [(f"p{next(loads)}", 2) for _ in range(count)]

    def look():
        for uid, number in buffer._in("running"):
            if number == 1:
                error = f"ValueError: no such column {uid}"
                buffer.tags[SESSIONS][buffer._session(uid, number)] = {"status": "failed", "error": error}
        buffer._poll()
        buffer._fill()
        return True

    with pytest.raises(
        RuntimeError, match=r"16 prompts.* sample 1 of prompt p\d+: ValueError: no such column p"
    ) as raised:
        assert all(look() for _ in range(100))
    assert "reward.custom_reward_function" in str(raised.value)
    assert next(loads) < 64


def test_a_prompt_that_came_to_its_end_in_the_same_look_as_failures_is_seen():
    buffer = Buffer({SESSIONS: {}, "train": {}}, group_batches=4)
    buffer._rollout.load_prompts = lambda count: []
    for number in range(20):
        buffer.scheduler.load(f"p{number}", 1)
    buffer._fill()
    for number in range(19):
        buffer.tags[SESSIONS][f"p{number}_0"] = {"status": "failed", "error": "TimeoutError"}
    buffer.tags[SESSIONS]["p19_0"] = GENERATED
    buffer.tags["train"]["p19_0_0"] = STORED
    buffer._poll()
    assert {prompt.uid for prompt in buffer.scheduler.ledger} == {"a", "p19"}


@pytest.mark.parametrize("named", [{}, {"attempt": 0}])
def test_a_state_of_an_earlier_version_is_read(named):
    """As ``rhyme_sorted.json`` has been written, before attempts had names and after."""
    text = {"first_version": 2, "interruptions": 0, **named}
    samples = [{"state": "finished", "tokens": 5, **text}, {"state": "pending", "tokens": 3, **text}]
    prompts = [{"uid": "a", "number": 7, "samples": samples, "waited": 1}]
    state = {"version": 2, "owed": 1, "buffer": {"loaded": 9, "prompts": prompts}, "reports": ["a_0", "a_1"]}
    tags = {"a_0": GENERATED, "a_1": {"status": "interrupted", "tokens": 3, "first_version": 2}}
    buffer = Buffer({SESSIONS: tags, PROMPTS: {"a": {}}, "train": {"a_0_0": STORED}}, mode="partial")
    buffer.load_state_dict(json.loads(json.dumps(state)))
    assert states(buffer) == ["finished", "pending"]
    assert (buffer.scheduler.version, buffer.scheduler.ledger.loaded) == (2, 9)
    again = buffer.state_dict()
    assert (again["version"], again["owed"], again["reports"]) == (2, 1, ["a_0", "a_1"])
    buffer.load_state_dict(json.loads(json.dumps(again)))
    assert states(buffer) == ["finished", "pending"]
    buffer._fill()
    [start] = buffer._rollout.started
    assert (start.kept, start.partial) == ("a_1", True)
    prompt = buffer.scheduler.ledger.prompt("a")
    assert (prompt.number, prompt.waited, prompt.samples[1].first_version) == (7, 1, 2)


def test_what_is_generated_anew_is_drafted_from_where_the_rules_say_so():
    for redraft in (True, False):
        tag = {"status": "interrupted", "tokens": 3, "first_version": 0}
        buffer = Buffer({SESSIONS: {"a_0": tag, "a_1": {"status": "running"}}, "train": {}}, redraft=redraft)
        buffer._poll()
        buffer._fill()
        [start] = buffer._rollout.started
        assert (start.kept, start.partial) == ("a_0" if redraft else None, False)


def test_a_server_without_the_latest_weights_stops_the_run():
    buffer = Buffer({SESSIONS: {"a_0": GENERATED, "a_1": RUNNING}, "train": {}})
    buffer.scheduler.begin(1)
    with pytest.raises(RuntimeError, match=r"staleness 1 where 0 to 0 is allowed.* without the latest weights"):
        buffer._poll()
