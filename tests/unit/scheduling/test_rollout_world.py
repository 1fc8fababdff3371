"""What a rollout promises while workers die, rewards fail, and its own process is lost at any moment."""

import json
import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import examples
from verl_rhyme.scheduling.attempts import AttemptReport
from verl_rhyme.scheduling.rollout import Rollout
from verl_rhyme.scheduling.rules import Rules

SAMPLES, LONGEST, UPDATES, WORKERS = 2, 6, 6, 3


@dataclass
class Task:
    """An attempt that its worker runs; ``text`` has the version of each token."""

    worker: int
    text: list[int]
    records: list[dict]
    report: AttemptReport | None = field(default=None)  # generated


class World:
    """Workers, a judge, a queue and a trainer around a rollout. ``losses``: share of events that are losses."""

    def __init__(self, rules, seed, filters, losses):
        self.rules, self.random, self.filters, self.losses = rules, random.Random(seed), filters, losses
        self.empties = self.random.choice([0.0, 0.1])
        self.version, self.left, self.loaded, self.generation, self.now = 0, UPDATES, 0, 0, 0.0
        self.tasks, self.kept, self.stored = {}, {}, {}  # kept: text, report and worker of ended attempts
        self.started, self.trained, self.used, self.made = set(), [], [], {}
        self.training, self.empty = False, False
        self.rollout = self.new_rollout()
        self.rollout.publish(0, self.left)
        self.save()

    def new_rollout(self):
        return Rollout(self.rules, "score" if self.filters else None, self.generation)

    def save(self):
        self.saved, self.added = json.dumps(self.rollout.state_dict()), []

    # ---- messages ----

    def fill(self):
        self.now += 100.0  # over all pauses after failures
        while missing := self.rollout.missing_prompts():
            prompts = [(f"p{self.loaded + i}", SAMPLES) for i in range(missing)]
            self.loaded += missing
            self.added += prompts
            self.rollout.add_prompts(prompts)
        for start in self.rollout.fill(self.random.choice([None, 2, 5]), now=self.now):
            attempt, before = start.attempt, start.predecessor
            assert attempt not in self.started, "an attempt starts twice"
            assert attempt.sample not in {task.sample for task in self.tasks}, "two attempts at a sample run"
            self.started.add(attempt)
            text, records, worker = [], [], self.random.randrange(WORKERS)
            if before is not None:
                assert before.sample == attempt.sample
                assert start.stored == (before in self.stored), "its turns are elsewhere"
                assert start.stored or before in self.kept, "it begins with turns that are lost"
            if before in self.kept:
                kept, report, worker = self.kept[before]
                if start.partial:
                    text, records = [*kept], [*report.records]
                    assert min(text) >= self.version - self.rules.max_staleness
            assert len(text) == self.rollout.content.kept_tokens(*attempt.sample)
            self.tasks[attempt] = Task(worker, text, records)
        self.tidy()

    def tidy(self):
        for attempt in self.rollout.pop_abandoned():
            self.end(attempt)
        for attempt in self.rollout.content.pop_obsolete():
            self.kept.pop(attempt, None)
        assert {*self.tasks} == {*self.rollout.attempts()}
        assert all(self.rollout.content.needs_turns(attempt) for attempt in self.kept), "turns stay in memory"
        assert all(
            self.rollout.content.needs_trajectories(a) for a, report in self.stored.items() if self.pending(a, report)
        )

    def end(self, attempt):
        """Abandon an attempt; a generated text remains a draft."""
        task = self.tasks.pop(attempt, None)
        if task is not None and task.report and self.rollout.content.needs_turns(attempt):
            self.kept[attempt] = task.text, task.report._replace(status="interrupted"), task.worker
        elif not self.rollout.content.needs_turns(attempt):
            self.kept.pop(attempt, None)

    def pending(self, attempt, report):
        ledger = self.rollout.scheduler.ledger
        if attempt.uid not in ledger or report.empty:
            return False
        sample = ledger.prompt(attempt.uid).samples[attempt.number]
        return sample.state == "finished" and sample.attempt == attempt.attempt

    def report(self, attempt, status, **fields):
        task = self.tasks[attempt]
        first = min(task.text, default=None)
        return AttemptReport(attempt, status, len(task.text), first, [*task.records], **fields)

    def send(self, report):
        if report.status != "generated":
            task = self.tasks.pop(report.attempt)
            if report.leaves_turns:
                self.kept[report.attempt] = task.text, report._replace(status="interrupted"), task.worker
        self.rollout.ended(report, self.now)
        self.tidy()

    # ---- events ----

    def event(self):
        chance = self.random.random()
        running = [attempt for attempt, task in self.tasks.items() if task.report is None]
        waiting = [attempt for attempt, task in self.tasks.items() if task.report is not None]
        if chance < self.losses / 3:
            self.restart()
        elif chance < self.losses * 2 / 3:
            self.kill_worker(self.random.randrange(WORKERS))
        elif chance < self.losses and (judged := running + [a for a in waiting if self.tasks[a].text]):
            self.send(self.report(self.random.choice(judged), "failed", error="no judge"))
        elif self.training and self.random.random() < 0.5:
            self.publish()
        elif waiting and (not running or self.random.random() < 0.4):
            self.reward(self.random.choice(waiting))
        elif running:
            self.advance(self.random.choice(running))
        elif self.training:
            self.publish()

    def advance(self, attempt, stop=False):
        task = self.tasks[attempt]
        left = LONGEST - len(task.text)
        number = self.random.randint(0 if stop else min(1, left), left)
        if number:
            task.text += [self.version] * number
            record = {"response_tokens": number, "policy_version_end": self.version}
            task.records.append({"id": len(self.made), "started_at": 0.0, "finished_at": 1.0, **record})
            self.made[len(self.made)] = number
        if len(task.text) == LONGEST or (self.random.random() < 0.4 and not stop and task.text):
            if self.random.random() < self.empties and self.rules.unit == "group":
                task.text, self.empty = [], True  # the agent loop returns no trajectory
            task.report = self.report(attempt, "generated")
            self.send(task.report)
        elif stop:
            self.send(self.report(attempt, "interrupted"))

    def reward(self, attempt):
        task = self.tasks[attempt]
        scores = [float(self.random.random() < 0.5)] if task.text else []
        report = self.report(attempt, "finished", scores=scores, empty=not task.text)
        if task.text:
            self.stored[attempt] = report
        self.send(report._replace(records=[]))

    def kill_worker(self, worker):
        attempts = [attempt for attempt, task in self.tasks.items() if task.worker == worker]
        turns = [attempt for attempt, (_, _, keeper) in self.kept.items() if keeper == worker]
        unrewarded = [attempt for attempt in attempts if self.tasks[attempt].report]
        for attempt in attempts:
            del self.tasks[attempt]
        for attempt in turns:
            del self.kept[attempt]
        before = self.rollout.scheduler.step.unrewarded
        assert {*self.rollout.lost(attempts, turns)} == {*attempts}
        assert self.rollout.scheduler.step.unrewarded - before == len(unrewarded)
        self.tidy()

    def restart(self):
        """The rollout is lost, and restored from its last saved state and from what workers and queue have."""
        before, alone = self.facts(), self.random.random() < 0.5
        for worker in range(WORKERS):
            if not alone and self.random.random() < 0.3:  # dies with it
                self.tasks = {a: task for a, task in self.tasks.items() if task.worker != worker}
                self.kept = {a: kept for a, kept in self.kept.items() if kept[2] != worker}
        known = {attempt: task.report for attempt, task in self.tasks.items()}
        known |= {attempt: report for attempt, (_, report, _) in self.kept.items()} | self.stored
        self.generation += 1
        self.rollout = self.new_rollout()
        state = json.loads(self.saved)
        prompts = {prompt["uid"] for prompt in state["ledger"]["prompts"]} | {uid for uid, _ in state["stock"]}
        prompts |= {uid for uid, _ in self.added}
        self.rollout.scheduler.version = self.version
        assert self.rollout.restore(state, self.version, self.left, known, prompts, self.added, self.now) == []
        for attempt in [attempt for attempt in self.tasks if not self.rollout.content.may_train(attempt)]:
            self.end(attempt)
        self.kept = {attempt: kept for attempt, kept in self.kept.items() if self.rollout.content.needs_turns(attempt)}
        # of finished attempts the report may still come
        finished = {*self.tasks} - {*self.rollout.attempts()}
        self.tasks = {attempt: task for attempt, task in self.tasks.items() if attempt not in finished}
        self.tidy()
        if alone and not self.empty:  # nothing shows that a sample without a trajectory is finished
            assert self.facts() == before
        if self.training:
            self.publish()

    def facts(self):
        return {
            (prompt.uid, number): (sample.state, sample.tokens, sample.first_version)
            for prompt in self.rollout.scheduler.ledger
            for number, sample in enumerate(prompt.samples)
            if sample.state != "pending" or sample.first_version is not None
        }

    def stop(self):
        for attempt in [attempt for attempt, task in self.tasks.items() if task.report is None]:
            if attempt in self.tasks and self.random.random() < 0.9:  # others are busy in a tool
                self.advance(attempt, stop=True)

    def publish(self):
        self.version += 1
        self.rollout.publish(self.version, self.left)
        self.training = False
        self.tidy()

    def collect(self):
        scheduler = self.rollout.scheduler
        if self.training or not scheduler.has_batch():
            return
        if self.rules.stops:
            self.stop()
            self.rollout.abandon_running()
            self.tidy()
        if not (scheduler.has_settled(30.0) and scheduler.ready()):
            return
        batch = self.rollout.take()
        self.left -= 1
        self.training = True
        reports = [self.stored.pop(attempt) for attempt in batch.attempts]
        for attempt, report in zip(batch.attempts, reports, strict=True):
            assert attempt.sample not in self.trained, "trained twice"
            assert 0 <= self.version - report.first_version <= self.rules.max_staleness
        self.trained += batch.collected.samples
        self.used += [record["id"] for record in [*batch.trained, *batch.wasted]]
        assert len(self.used) == len({*self.used}), "tokens count twice"
        stored = {record["id"] for report in reports for record in report.records}
        assert {record["id"] for record in batch.trained} == stored
        self.save()
        self.tidy()

    def run(self):
        for _ in range(4000):
            if not self.left:
                return
            self.fill()
            self.collect()
            self.event()
        raise AssertionError("the rollout is stuck")


rules_of = st.builds(
    lambda batch, bound, take, separate, unit, drafts, in_flight, finish: Rules(
        batch,
        batch * SAMPLES,
        max_staleness=bound,
        take="finished" if unit == "trajectory" else take,
        separate=separate,
        relayed=separate,
        at_version="finish" if finish and separate and bound else None,
        unit=unit,
        drafts=drafts,
        in_flight=None if take == "loaded" and unit == "group" else in_flight,
    ),
    st.integers(1, 3),
    st.integers(0, 2),
    st.sampled_from(["finished", "loaded"]),
    st.booleans(),
    st.sampled_from(["group", "trajectory"]),
    st.booleans(),
    st.sampled_from([None, 1]),
    st.booleans(),
)


@settings(max_examples=examples(150, slow=2000))
@given(rules_of, st.integers(0, 10**6), st.booleans(), st.sampled_from([0.0, 0.05, 0.2]))
def test_every_sample_is_trained_once_whatever_is_lost(rules, seed, filters, losses):
    World(rules, seed, filters and rules.unit == "group", losses).run()
