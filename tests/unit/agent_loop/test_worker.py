"""Attempts of an agent loop worker: how they run, end and are reported."""

import asyncio
import sys
from array import array
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from verl_rhyme.agent_loop import stored_attempts
from verl_rhyme.agent_loop import worker as workers
from verl_rhyme.agent_loop.reports import NotReported
from verl_rhyme.agent_loop.session import (
    PROMPTS,
    SESSIONS,
    STARTS,
    Call,
    Conversation,
    Interrupted,
    Turn,
    current,
)
from verl_rhyme.agent_loop.stored_attempts import REPORT, TRAIN, KeptTurns
from verl_rhyme.agent_loop.validation import Validation
from verl_rhyme.agent_loop.worker import RhymeAgentLoopWorker, SessionAgentLoopWorker
from verl_rhyme.processes.deadline import NoAnswer
from verl_rhyme.scheduling import retries
from verl_rhyme.scheduling.attempts import Attempt, AttemptReport, Start
from verl_rhyme.scheduling.retries import HANG_TRIES

_Worker = SessionAgentLoopWorker.__ray_metadata__.modified_class


A0, A1, A2 = (Attempt("a", number) for number in range(3))


class Worker(_Worker):
    """Worker whose agent loop is the test's."""

    def __init__(self, run):
        self.run, self.reported, self.broken = run, [], False
        self._seed, self._filter_metric, self._tool_timeout = 0, None, 60.0
        self._attempts, self._sessions, self._kept = {}, {}, KeptTurns()
        self._validation = Validation(60.0)
        self.background_tasks = set()
        self._reports = self
        self.reward_loop_worker_handles = None

    async def send(self, report):
        if self.broken:
            raise NotReported("gone")
        self.reported.append(report)

    @property
    def statuses(self):
        return [report.status for report in self.reported]

    async def kept(self):
        return [report.attempt for report in (await self.attach(None))[1]]

    async def generate_sequences(self, batch):
        """Replace verl's way from a batch to its prompts."""
        for order in batch[STARTS]:
            order = getattr(order, "data", order)
            uid = order.starts[0].attempt.uid
            prompt = {"uid": uid, "global_steps": batch["global_steps"], STARTS: order}
            task = asyncio.create_task(self._run_prompt(prompt, {}, {"validate": False}))
            self.background_tasks.add(task)

    async def _run_agent_loop(self, sampling_params, trajectory, trace, session_id, **prompt):
        await self.run(self, sampling_params, session_id, prompt)

    async def start(self, *starts):
        """Wait until all of them have ended."""
        await self.start_attempts(list(starts), 4)
        while self._attempts:
            await asyncio.sleep(0.001)
        await asyncio.gather(*self.background_tasks)


@pytest.fixture(autouse=True)
def queue(monkeypatch):
    """TransferQueue with prompts without columns, and earlier attempts of the test."""
    left, asked = {}, []

    async def fetch(keys, partition_id, select_fields=None):
        asked.append((partition_id, list(keys)))
        if partition_id == PROMPTS:
            return TensorDict({"index": torch.arange(len(keys))}, batch_size=len(keys))
        if not (found := [key for key in keys if key in left]):  # the answer leaves out missing keys
            raise ValueError("keys or partition were not found!")
        return {name: [left[key][name] for key in found] for name in select_fields}

    monkeypatch.setattr(workers.tq, "async_kv_batch_get", fetch)
    return SimpleNamespace(left=left, asked=asked)


@pytest.fixture
def postprocessed(monkeypatch):
    """Outputs that verl's postprocessing got; it gives them their ``reward``, else 0.5, and the metric ``acc``."""
    outputs = []

    async def postprocess(self, output, validate, **kwargs):
        outputs.append(output)
        if made := output if isinstance(output, list) else [output] if output else []:
            await self._compute_score(made, kwargs)

    async def score(self, outputs, kwargs):
        extra = outputs[-1].extra_fields
        outputs[-1].reward_score, extra["reward_extra_info"] = extra.get("reward", 0.5), {"acc": 1}

    monkeypatch.setattr(workers._AgentLoopWorker, "_agent_loop_postprocess", postprocess)
    monkeypatch.setattr(workers._AgentLoopWorker, "_compute_score", score)
    return outputs


def first(number):
    return Start(Attempt("a", number), partial=True, spans=True)


async def interrupted(worker, params, session_id, prompt):
    """An agent loop whose attempt is interrupted at once."""
    raise Interrupted


async def hangs(*_, **__):
    """An agent loop, or a reward, without an end."""
    await asyncio.Event().wait()


def returning(make):
    """An agent loop that returns ``make()``."""

    async def run(worker, params, session_id, prompt):
        await worker._agent_loop_postprocess(make(), False, session_id=session_id, **prompt)

    return run


def trajectory(**extra_fields):
    """Return a trajectory without policy tokens."""
    return SimpleNamespace(extra_fields=extra_fields, response_mask=[0, 0])


def generate(tokens=2):
    """Generate a turn in the session, as the client does."""
    turn = current().begin_turn("p")
    current().extend(turn, [7] * tokens, None, 2, "completed")
    turn.first_version = 1


def kept_turns(met):
    """An agent loop that notes in ``met``, by sample, the tokens that its turns continue or draft from."""

    async def run(worker, params, session_id, prompt):
        begun = [current().begin_turn("p") for _ in current().earlier_turns]
        met[session_id] = [list(turn.tokens or turn.draft) for turn in begun]
        raise Interrupted

    return run


async def test_every_attempt_at_a_sample_draws_with_the_same_noise():
    """With or without drafts, at any staleness: otherwise what is regenerated would be shorter."""
    met = {0: set(), 1: set()}

    async def run(worker, params, session_id, prompt):
        met[session_id].add(int(current().noise, 16))
        raise Interrupted

    worker = Worker(run)
    for attempt in range(3):
        await worker.start(*(Start(Attempt("a", number, attempt)) for number in range(2)))
    assert [len(noises) for noises in met.values()] == [1, 1]
    assert met[0] != met[1]


async def test_attempt_is_listed_until_it_has_been_reported(caplog):
    worker = Worker(interrupted)
    task = asyncio.create_task(worker.start(first(0), first(1)))
    await asyncio.sleep(0)
    assert sorted(await worker.attempts()) == [A0, A1]
    await task
    assert await worker.attempts() == []
    assert worker.statuses == ["interrupted", "interrupted"]
    worker.broken = True
    with caplog.at_level("WARNING"):
        await worker.start(first(2))
    assert await worker.attempts() == []
    assert "could not be reported" in caplog.text


async def test_abandoned_attempt_ends_alone_without_a_report():
    async def run(worker, params, session_id, prompt):
        if session_id:
            await hangs()  # in a tool
        await asyncio.sleep(0.02)
        raise Interrupted

    worker = Worker(run)
    task = asyncio.create_task(worker.start(first(0), first(1)))
    await asyncio.sleep(0.01)
    await worker.abandon([A1, Attempt("b", 7)], [])
    await asyncio.wait_for(task, 5)
    assert [report.attempt for report in worker.reported] == [A0]


@pytest.mark.parametrize("drafts", [[], [A0]])
async def test_a_generated_response_is_known_until_its_reward_and_may_be_a_draft_after_it(monkeypatch, drafts):
    """TransferQueue has nothing of it: a coordinator that opens again asks the workers."""

    async def run(*args):
        generate()
        await returning(trajectory)(*args)

    monkeypatch.setattr(workers._AgentLoopWorker, "_agent_loop_postprocess", hangs)
    worker = Worker(run)
    await worker.start_attempts([first(0)], 4)
    while not worker.reported:
        await asyncio.sleep(0.001)
    running, reports = await worker.attach(None)
    assert (list(running), reports) == ([A0], worker.reported)
    assert (reports[0].status, reports[0].tokens, reports[0].first_version) == ("generated", 2, 1)
    await worker.abandon([A0], drafts)
    await asyncio.sleep(0.01)
    assert (await worker.attempts(), await worker.kept()) == ([], drafts)
    assert [turn.tokens.tolist() for left, _ in worker._kept.find(drafts).values() for turn in left] == [[7, 7]] * len(
        drafts
    )


async def test_unreported_end_of_generation_is_no_failure():
    """A coordinator that restarts slowly is no fault of the prompt."""

    async def run(worker, params, session_id, prompt):
        worker.broken = True
        try:
            await returning(trajectory)(worker, params, session_id, prompt)
        finally:
            worker.broken = False

    worker = Worker(run)
    await worker.start(first(0))
    assert worker.reported == []


async def test_earlier_turns_are_fetched_at_once_and_missing_ones_start_over(queue):
    """Of 16 samples that start again together, a missing text affects only its own sample."""
    met = {}
    for number in range(3):
        turn = Turn("p")
        turn.tokens.extend([number, 7])
        queue.left[f"a_{number}"] = {"turns": [turn.to_dict()], "report": {"records": []}}
    worker = Worker(kept_turns(met))
    again = [Start(Attempt("a", number, 1), Attempt("a", number), partial=True) for number in range(3)]
    await worker.start(*again)
    assert met == {number: [[number, 7]] for number in range(3)}
    assert queue.asked == [(PROMPTS, ["a"]), (SESSIONS, ["a_0", "a_1", "a_2"])]
    del queue.left["a_1"]
    await worker.start(*again)
    assert met == {0: [[0, 7]], 1: [], 2: [[2, 7]]}


async def test_regenerated_response_is_drafted_from_its_trajectory(queue):
    """The draft has the tokens of each turn without tool answers; a missing trajectory affects only its own sample."""
    for number, tokens, mask in [(0, [5, 6, 9, 9, 7], [1, 1, 0, 0, 1]), (1, [8], [1])]:
        queue.left[f"a_{number}_0"] = {"responses": torch.tensor(tokens), "response_mask": torch.tensor(mask)}
    met = {}
    again = [Start(Attempt("a", n, 1), Attempt("a", n), stored=True) for n in range(3)]
    await Worker(kept_turns(met)).start(*again)
    assert met == {0: [[5, 6], [7]], 1: [[8]], 2: []}
    assert queue.asked[1][0] == TRAIN


async def test_interrupted_tokens_stay_in_the_worker_until_a_checkpoint(queue, monkeypatch):
    """A checkpoint stores each turn once."""
    met = {}
    turn = Turn("p", array("i", [1, 2, 3]), first_version=2, version=2)

    async def interrupt(worker, params, session_id, prompt):
        current().turns.append(turn)
        raise Interrupted

    async def store(keys, partition_id, fields):
        for key, report, turns in zip(keys, fields["report"], fields["turns"], strict=True):
            assert key not in queue.left, "stored twice"
            queue.left[key] = {"report": getattr(report, "data", report), "turns": list(turns)}

    worker = Worker(interrupt)
    await worker.start(first(0), first(1))
    assert await worker.kept() == [A0, A1]
    turn.tokens.append(9)  # of a task that runs on
    worker.run = kept_turns(met)
    await worker.start(Start(Attempt("a", 0, 1), A0, partial=True))
    assert met == {0: [[1, 2, 3]]}
    assert SESSIONS not in dict(queue.asked)
    await worker.forget([A0])
    monkeypatch.setattr(stored_attempts.tq, "async_kv_batch_put", store)
    await worker.store_turns()
    await worker.store_turns()
    reports = await stored_attempts.fetch_reports({SESSIONS: {key: {} for key in queue.left}})
    assert {*reports} == {A1, Attempt("a", 0, 1)}
    assert reports[A1] == AttemptReport(A1, "interrupted", 3, 2)
    await worker.forget([A1])
    await worker.start(Start(Attempt("a", 1, 1), A1, partial=True))
    assert met[1] == [[1, 2, 3]], "from the checkpoint"


def test_what_an_attempt_left_is_found_unchanged_after_a_lost_one():
    kept, report = KeptTurns(), AttemptReport(A0, "interrupted", 1, 0, [{"id": "r", "response_tokens": 1}])
    kept.keep(report, [Turn("p", array("i", [1]))])
    for _ in range(2):
        turns, records = kept.find([A0])[A0]
        assert ([turn.tokens.tolist() for turn in turns], len(records)) == ([[1]], 1)
        turns[0].tokens.append(2)
        records.append({"id": "s"})


async def test_a_checkpoint_has_what_fails_while_it_is_stored(monkeypatch):
    """Thousands of samples are stored in parts; each is in one of them, once, and ends in between."""
    kept, running, stored = KeptTurns(), {Attempt("a", n): 1 for n in range(200)}, []
    report_of = lambda attempt, tokens: AttemptReport(attempt, "interrupted", tokens, 0)  # noqa: E731
    turns = [Turn("p", array("i", [1]))]

    def fail(number):
        running.pop(attempt := Attempt("a", number))
        kept.keep(report_of(attempt, 2), turns)

    async def put(keys, partition_id, fields):
        stored.extend(zip(keys, (row["report"]["tokens"] for row in fields), strict=True))
        if len(running) == 200:  # the first part
            fail(3)
            fail(150)

    monkeypatch.setattr(stored_attempts.tq, "async_kv_batch_put", put)
    monkeypatch.setattr(stored_attempts, "list_of_dict_to_tensordict", lambda rows: rows)

    async def store():
        sessions = ((report_of(a, running[a]), turns) for a in list(running) if a in running)
        await kept.store(sessions)

    kept.keep(report_of(Attempt("a", 0), 1), turns)  # it has failed, and its report is under way
    await store()
    assert {*stored} == {(Attempt("a", n).name, 2 if n == 150 else 1) for n in range(200)}
    assert len(stored) == 200
    del stored[:]
    await store()
    assert (Attempt("a", 3).name, 2) in stored, "the last checkpoint has fewer tokens of it"
    assert Attempt("a", 150).name not in dict(stored)


@pytest.mark.parametrize("tokens", [0, 3])
async def test_a_tool_that_cancels_its_own_task_fails_the_sample(tokens):
    """As cancel scopes of other libraries do: without a report the sample would start again and again."""

    async def run(worker, params, session_id, prompt):
        generate(tokens)
        tool = asyncio.ensure_future(asyncio.sleep(3600))
        tool.cancel()
        await asyncio.gather(tool)

    worker = Worker(run)
    await worker.start(first(0))
    [report] = worker.reported
    assert (report.status, report.tokens) == ("failed", tokens)
    assert "cancelled its own task" in report.error
    assert worker._attempts == {}
    await asyncio.sleep(0)


async def test_turns_of_an_attempt_abandoned_while_it_reports_are_freed():
    worker, sending = Worker(interrupted), asyncio.Event()

    async def send(report):
        sending.set()
        await asyncio.sleep(3600)

    worker.send = send
    task = asyncio.create_task(worker.start(first(0)))
    await sending.wait()
    assert [*worker._kept.find([A0])] == [A0]
    await worker.abandon([A0], [])
    await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), 5)
    assert await worker.kept() == []


async def test_attempts_without_prompt_data_are_reported(monkeypatch):
    async def gone(**kwargs):
        raise ConnectionError("no queue")

    monkeypatch.setattr(workers.tq, "async_kv_batch_get", gone)
    worker = Worker(None)
    await worker.start(first(0), first(1))
    assert worker.reported == [AttemptReport(each, "lost", error="ConnectionError('no queue')") for each in (A0, A1)]


async def test_attempt_abandoned_while_its_data_are_fetched_never_starts(monkeypatch):
    release, met = asyncio.Event(), {}

    async def slow(keys, **kwargs):
        await release.wait()
        return TensorDict({"index": torch.arange(len(keys))}, batch_size=len(keys))

    monkeypatch.setattr(workers.tq, "async_kv_batch_get", slow)
    worker = Worker(kept_turns(met))
    task = asyncio.create_task(worker.start(first(0), first(1)))
    await asyncio.sleep(0.01)
    await worker.abandon([A1], [])
    release.set()
    await task
    assert list(met) == [0]
    assert [report.attempt for report in worker.reported] == [A0]


@pytest.mark.parametrize(
    ("metric", "scores"), [("reward", [0.5, 0.5]), ("acc", [1.0, 1.0]), (None, []), ("score", None)]
)
async def test_finished_report_has_the_scores_for_group_filters(postprocessed, metric, scores):
    worker = Worker(returning(lambda: [trajectory(), trajectory()]))
    worker._filter_metric = metric
    await worker.start(first(0))
    generated, ended = worker.reported
    assert generated.status == "generated"
    if scores is None:
        assert ended.status == "failed"
        assert "metric=score: the reward function returns ['acc']" in ended.error
    else:
        assert (ended.status, ended.scores) == ("finished", scores)
        stored = AttemptReport(A0, **postprocessed[0][0].extra_fields[REPORT])
        assert stored == ended, "a restarted coordinator knows them"


@pytest.mark.parametrize("score", [None, float("nan"), 0.5])
async def test_reward_that_is_not_finite_fails_the_sample(postprocessed, score):
    """A NaN makes the advantages of its whole group NaN, and verl skips a step with such a gradient. Without a reward
    the step would lack the column. Other metrics may have any value."""
    worker = Worker(returning(lambda: trajectory(reward=score)))
    worker.reward_loop_worker_handles = ["a judge"]
    await worker.start(first(0))
    assert worker.statuses == ["generated", "finished" if score == 0.5 else "failed"]
    assert score == 0.5 or f"the reward of prompt a, sample 0, is {score}" in worker.reported[-1].error


@pytest.mark.parametrize(("tokens", "versions"), [(0, (3, 3)), (2, (1, 2))])
async def test_trajectories_get_the_versions_that_they_lack(postprocessed, tokens, versions):
    """Those of the sample's tokens; without tokens the current one."""

    async def run(*args):
        if tokens:
            generate(tokens)
        await returning(lambda: [trajectory(min_global_steps=None), trajectory(max_global_steps=1)])(*args)

    worker = Worker(run)
    await worker.start(first(0))
    assert worker.reported[0].first_version == (versions[0] if tokens else None)
    found = [
        (each.extra_fields["min_global_steps"], each.extra_fields["max_global_steps"]) for each in postprocessed[0]
    ]
    assert found == [versions, (versions[0], 1)]


@pytest.mark.parametrize(("tokens", "versions"), [(0, (7, 7)), (2, (1, 2))])
async def test_the_versions_of_one_trajectory_are_those_of_all_turns(postprocessed, tokens, versions):
    """verl's ToolAgentLoop keeps the oldest version of its first turn."""

    async def run(*args):
        if tokens:
            generate(tokens)
        await returning(lambda: trajectory(min_global_steps=7, max_global_steps=7))(*args)

    await Worker(run).start(first(0))
    (made,) = postprocessed
    assert (made.extra_fields["min_global_steps"], made.extra_fields["max_global_steps"]) == versions


@pytest.mark.parametrize(("generated", "returned"), [(0, [3]), (4, [2, 5]), (4, [3, 4])])
async def test_policy_tokens_from_elsewhere_fail_the_sample(postprocessed, generated, returned):
    """An agent loop that generates by HTTP, in another sample's task, or in a thread that swallows the error: nobody
    knows the version of its tokens."""

    def trajectories():
        made = [trajectory() for _ in returned]
        for each, tokens in zip(made, returned, strict=True):
            each.response_mask = [1] * tokens + [0]
        return made

    async def run(*args):
        generate(generated)
        await returning(trajectories)(*args)

    worker = Worker(run)
    await worker.start(first(0))
    if max(returned) <= generated:
        assert worker.statuses == ["generated", "finished"]
    else:
        [report] = worker.reported
        assert (report.status, postprocessed) == ("failed", [])
        assert f"a trajectory of {max(returned)} policy tokens" in report.error


@pytest.mark.parametrize(
    ("error", "broken"), [(KeyError("answer"), True), (ConnectionError("at some place\n" * 1000 + "answer"), False)]
)
async def test_failed_attempt_leaves_its_turns_to_the_next(error, broken):
    """Its text is sound: the next attempt calls the tool again."""

    async def run(worker, params, session_id, prompt):
        turn = Turn("key", array("i", [4, 5]), first_version=3, version=3, complete=True)
        current().turns.append(turn)
        raise error

    worker = Worker(run)
    await worker.start(first(0))
    [report] = worker.reported
    assert (report.status, report.tokens, report.first_version, report.tries) == ("failed", 2, 3, 1)
    assert report.broken == broken
    assert "answer" in report.error
    assert len(report.error) <= 1000, "a remote error has a long traceback before its message"
    [(turns, _)] = worker._kept.find([A0]).values()
    assert [turn.tokens.tolist() for turn in turns] == [[4, 5]]
    assert (await worker.attach(None))[1] == [AttemptReport(A0, "interrupted", 2, 3, error=report.error, broken=broken)]


async def test_validation_samples_are_tried_again(monkeypatch):
    """verl leaves out the samples that fail: the score would be of the others."""
    ran = []

    async def run(self, sampling_params, trajectory, **kwargs):
        ran.append(await worker.validating())
        if len(ran) < 3:
            raise ConnectionError("no judge")

    async def prompt(self, prompt, sampling_params, trajectory, trace):
        await _Worker._run_agent_loop(self, sampling_params, trajectory, session_id=0, **prompt)

    monkeypatch.setattr(retries, "PAUSE_S", 0.001)
    monkeypatch.setattr(workers._AgentLoopWorker, "_run_agent_loop", run)
    monkeypatch.setattr(workers._AgentLoopWorker, "_run_prompt", prompt)
    worker = Worker(None)
    await worker._run_prompt({"uid": "u"}, {}, {"validate": True})
    assert ran == [["u"]] * 3
    assert await worker.validating() == []


async def test_agent_loop_without_a_trajectory_affects_only_its_sample():
    """verl's worker stores nothing then."""

    async def run(worker, params, session_id, prompt):
        generate()
        await worker._agent_loop_postprocess([], False, session_id=session_id, **prompt)

    worker = Worker(run)
    await worker.start(first(0))
    reports = [(report.status, report.tokens, report.empty) for report in worker.reported]
    assert reports == [("generated", 0, False), ("finished", 0, True)]


async def interrupt():
    """Raise an interruption, as the client does in a call of the agent loop."""
    with current().generation(Call(Conversation("p"))):
        await asyncio.sleep(0)
        raise Interrupted


async def test_agent_loop_that_continues_after_an_interruption_stores_nothing(postprocessed):
    async def run(worker, params, session_id, prompt):
        await asyncio.gather(interrupt(), interrupt(), return_exceptions=True)
        if session_id == 1:
            raise TypeError("'Interrupted' object is not subscriptable")
        await worker._agent_loop_postprocess(trajectory(), False, session_id=session_id, **prompt)

    worker = Worker(run)
    await worker.start(first(0), first(1))
    assert postprocessed == []
    assert worker.statuses == ["interrupted", "interrupted"]


async def test_tokens_of_parallel_calls_are_reported_with_an_interruption():
    """The first interrupted call ends the agent loop; without the others' tokens long turns would be drawn anew."""

    async def call(tokens):
        turn = current().begin_turn(str(tokens))
        with current().generation(Call(Conversation("p"))):
            await asyncio.sleep(tokens / 100)
            current().extend(turn, [7] * tokens, None, 0, "aborted")

    async def run(worker, params, session_id, prompt):
        await asyncio.gather(call(5), call(1), call(9))

    worker = Worker(run)
    await worker.start(first(0))
    [report], (turns, _) = worker.reported, worker._kept.find([A0])[A0]
    assert (report.status, report.tokens) == ("interrupted", 15)
    assert sorted(len(turn.tokens) for turn in turns) == [1, 5, 9]


async def test_an_interruption_after_the_response_is_a_failure_of_the_reward(monkeypatch):
    """A judge calls the engine. The response is complete and kept: only the reward is repeated."""

    async def judge(self, output, validate, **kwargs):
        await interrupt()

    async def run(*args):
        generate()
        await returning(trajectory)(*args)

    monkeypatch.setattr(workers._AgentLoopWorker, "_agent_loop_postprocess", judge)
    worker = Worker(run)
    await worker.start(first(0))
    assert [(report.status, report.tokens) for report in worker.reported] == [("generated", 2), ("failed", 2)]
    assert await worker.kept() == [A0]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio has no task groups")
async def test_interruption_in_an_exception_group_is_recognised():
    async def run(worker, params, session_id, prompt):
        async with asyncio.TaskGroup() as group:
            group.create_task(interrupt())
            group.create_task(hangs())

    worker = Worker(run)
    await worker.start(first(0))
    assert worker.statuses == ["interrupted"]


async def test_tool_or_reward_without_an_answer_fails_only_its_sample(monkeypatch):
    async def run(worker, params, session_id, prompt):
        if session_id == 0:
            await hangs()
        if session_id == 1:
            await returning(trajectory)(worker, params, session_id, prompt)
        with current().generation(Call(Conversation("p"))):
            await asyncio.sleep(0.3)  # a long queue at the engines
        await asyncio.sleep(0.05)
        raise Interrupted

    monkeypatch.setattr(workers._AgentLoopWorker, "_agent_loop_postprocess", hangs)
    worker = Worker(run)
    worker._tool_timeout = 0.1
    await asyncio.wait_for(worker.start(first(0), first(1), first(2)), 5)
    reports = {report.attempt: report for report in worker.reported}
    assert [reports[each].status for each in (A0, A1, A2)] == ["failed", "failed", "interrupted"]
    for number, attempt in enumerate((A0, A1)):
        assert reports[attempt].tries == HANG_TRIES, "an hour each"
        assert f"prompt a, sample {number}: no answer from its tool or reward for 0.1 s" in reports[attempt].error
        assert "scheduling.tool_timeout" in reports[attempt].error


async def test_tool_timeout_applies_without_the_pipeline(monkeypatch):
    """verl counts it as a failed session."""
    monkeypatch.setattr(workers._AgentLoopWorker, "_run_agent_loop", hangs)
    worker = object.__new__(RhymeAgentLoopWorker.__ray_metadata__.modified_class)
    worker._tool_timeout = 0.05
    work = worker._run_agent_loop({}, {"validate": False}, session_id=1, uid="u", agent_name="search")
    with pytest.raises(NoAnswer, match="agent loop search, prompt u, sample 1: no answer"):
        await asyncio.wait_for(work, 5)
