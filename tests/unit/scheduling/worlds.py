"""Simulated engines and trainers around a scheduler: engines that run on, and engines that stop."""

import copy
import random

from hypothesis import strategies as st

from verl_rhyme.scheduling.admission import startable
from verl_rhyme.scheduling.rules import STOP_WAIT_S, Rules
from verl_rhyme.scheduling.scheduler import Scheduler

SAMPLES, LONGEST = 3, 40

#: Rules of separate engines.
rules_of = st.builds(
    lambda batch, at_version, staleness, in_flight, **rules: Rules(
        batch,
        batch * SAMPLES,
        at_version=None if at_version == "regenerate" else at_version,
        max_staleness=0 if at_version == "regenerate" else staleness,
        in_flight=in_flight and min(in_flight, staleness + 1),
        separate=True,
        relayed=True,
        **rules,
    ),
    batch=st.integers(1, 4),
    at_version=st.sampled_from(["regenerate", "continue", "finish"]),
    staleness=st.integers(1, 3),
    in_flight=st.sampled_from([None, 1, 1.5, 2, 4]),
    unit=st.sampled_from(["group", "trajectory"]),
)


class World:
    """Replicas and a trainer around a scheduler; ``text`` holds the version of every token of a sample.

    ``lag``: replicas take new weights at random times, before or after the scheduler's event.
    ``losses``: share of events at which an attempt is lost with its tokens, or interrupted on its replica.
    ``mishaps``: share of rewards that fail. ``uneven``: prompts have groups of different size. ``updates``: training
    steps.
    """

    def __init__(self, rules, seed, lag=False, losses=0.0, mishaps=0.0, uneven=False, updates=None):
        self.left, self.staleness = updates, []
        self.rules, self.lag, self.losses, self.mishaps, self.uneven = rules, lag, losses, mishaps, uneven
        self.scheduler, self.random = Scheduler(rules), random.Random(seed)
        self.scheduler.begin(0, updates)
        self.text, self.length, self.kept, self.place = {}, {}, {}, {}  # of samples
        self.running, self.unrewarded, self.trained, self.dropped = [], [], [], set()
        self.sizes, self.loads, self.weights, self.training = {}, 0, 0, False
        self.replicas = [0, 0, 0]
        self.limit = self.random.choice([None, None, 1, 7])

    def run(self):
        while self.left and (self.scheduler.loadable() or len(self.scheduler.ledger)):
            self.until_collected()

    def until_collected(self):
        while True:
            self.fill()
            scheduler = self.scheduler
            assert not (self.training and (scheduler.has_batch() or scheduler.ready())), (
                "trained before the policy is new"
            )
            if scheduler.has_batch() and scheduler.has_settled(self.random.choice([0.0, 30.0])) and scheduler.ready():
                return self.collect()
            self.event()

    def fill(self):
        scheduler = self.scheduler
        while count := scheduler.loadable():
            for _ in range(count):
                uid = f"p{self.loads}"
                self.sizes[uid] = self.random.randint(1, 2 * SAMPLES) if self.uneven else SAMPLES
                scheduler.load(uid, self.sizes[uid])
                self.loads += 1
        for sample in scheduler.dispatch(self.limit):
            assert sample not in self.running
            if not self.text.get(sample):
                self.text[sample], self.length[sample] = [], self.random.randint(1, LONGEST)
            self.kept[sample] = len(self.text[sample])
            self.place[sample] = self.random.randrange(len(self.replicas))
            self.running.append(sample)

    def event(self):
        happen = [self.advance] * (4 * bool(self.running)) + [self.reward] * (2 * bool(self.unrewarded))
        happen += [self.publish] * self.training
        happen += [self.pull] * (self.lag and min(self.replicas) < self.weights)
        assert happen, "nothing is on its way, nothing enough: the scheduler is stuck"
        self.random.choice(happen)()

    def advance(self):
        sample = self.random.choice(self.running)
        text, scheduler = self.text[sample], self.scheduler
        more = self.length[sample] - len(text)
        made = self.random.choice([more, self.random.randint(0, more)])
        text += [self.replicas[self.place[sample]]] * made
        if self.random.random() < self.losses:
            self.running.remove(sample)
            if self.random.random() < 0.5:
                scheduler.abandon(*sample)
                del text[self.kept[sample] :]
            elif not scheduler.interrupt(*sample, len(text), min(text, default=None)):
                text.clear()
        elif len(text) == self.length[sample]:
            self.running.remove(sample)
            if scheduler.generate(*sample, len(text), min(text)):
                self.unrewarded.append(sample)
            else:
                text.clear()

    def reward(self):
        uid, number = sample = self.random.choice(self.unrewarded)
        self.unrewarded.remove(sample)
        if self.random.random() < self.losses:
            self.scheduler.abandon(uid, number)  # the next attempt continues from earlier reports
        elif self.random.random() < self.mishaps:
            self.dropped.add(uid)
            self.scheduler.drop(uid)
            self.forget(uid)
        else:
            self.scheduler.finish(uid, number)

    def forget(self, uid):
        """End the attempts at a dropped prompt."""
        self.running = [sample for sample in self.running if sample[0] != uid]
        self.unrewarded = [sample for sample in self.unrewarded if sample[0] != uid]

    def pull(self):
        number = self.random.randrange(len(self.replicas))
        self.replicas[number] = self.weights

    def publish(self):
        """New weights are available; the scheduler receives the event at once or later."""
        if self.weights == self.scheduler.version:
            self.weights += 1
            if self.lag:
                return
            self.replicas = [self.weights] * len(self.replicas)
        for sample in self.scheduler.begin(self.weights, self.left):
            self.end(sample)
        self.training = False

    def end(self, sample):
        """End an attempt whose text is too stale."""
        self.text[sample].clear()
        for place in (self.running, self.unrewarded):
            if sample in place:
                place.remove(sample)

    def collect(self):
        self.left -= 1
        batch = self.scheduler.collect()
        self.staleness += batch.staleness
        assert batch.samples
        assert batch.lengths == sorted(batch.lengths) == [len(self.text[sample]) for sample in batch.samples]
        for sample, staleness in zip(batch.samples, batch.staleness, strict=True):
            assert sample not in self.trained, "trained twice"
            assert sample not in self.running + self.unrewarded
            assert staleness == self.scheduler.version - min(self.text[sample]) <= self.rules.max_staleness
            self.trained.append(sample)
        if self.rules.unit == "group":
            assert len(batch.samples) == sum(self.sizes[uid] for uid in {uid for uid, _ in batch.samples})
        self.training = True
        if self.rules.max_staleness == 0:
            assert self.scheduler.dispatch() == [], "started under a policy it may not be trained in"

    def check_all(self):
        wanted = {(uid, number) for uid, size in self.sizes.items() for number in range(size)}
        done = set(self.trained) | {sample for sample in wanted if sample[0] in self.dropped}
        # a prompt whose samples are trained one by one is replaced as a whole
        more = self.uneven or (self.dropped and self.rules.unit == "trajectory")
        assert done == wanted or (more and done < wanted)


class Separate(World):
    """Separate engines: running attempts go on under new weights, or are interrupted by them. Reports take time."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.cut = []
        self.ahead = 0  # samples that were started while the actor trained

    def fill(self):
        before = len(self.running)
        super().fill()
        assert not set(self.cut) & set(self.running)
        self.ahead += (len(self.running) - before) * self.training

    def event(self):
        if self.cut and self.random.random() < 0.3:
            sample = self.cut.pop(self.random.randrange(len(self.cut)))
            if not self.scheduler.interrupt(*sample, len(self.text[sample]), min(self.text[sample], default=None)):
                self.text[sample].clear()
        elif self.running or self.unrewarded or self.training or not self.cut:
            super().event()

    def publish(self):
        if self.weights == self.scheduler.version:
            self.weights += 1
            self.replicas = [self.weights] * len(self.replicas)
            share = 0.1 if self.rules.continues else 0.8  # the others fail, or are busy elsewhere
            cut = [sample for sample in self.running if self.random.random() < share]
            self.cut += cut
            self.running = [sample for sample in self.running if sample not in cut]
            if self.random.random() < 0.5:
                return  # the scheduler receives the policy after the interruptions
        super().publish()

    def end(self, sample):
        super().end(sample)
        if sample in self.cut:
            self.cut.remove(sample)

    def forget(self, uid):
        super().forget(uid)
        self.cut = [sample for sample in self.cut if sample[0] != uid]


class Stopping:
    """Engines that stop while the policy is trained, around a scheduler; ``text`` holds the version of every token.
    Running samples wait, where they may continue under the next policy.

    ``mishaps``: share of rewards that fail. ``losses``: share of events at which an attempt is lost with its tokens, of
    aborts that an attempt misses, and of rewards that take longer than the engines wait.
    """

    def __init__(self, rules, seed, mishaps=0.0, losses=0.0, uneven=False):
        self.rules, self.mishaps, self.losses, self.uneven = rules, mishaps, losses, uneven
        self.scheduler = Scheduler(rules)
        self.random = random.Random(seed)
        self.text, self.length, self.trained, self.batches, self.dropped = {}, {}, [], [], set()
        self.running, self.unrewarded, self.loads, self.version = [], [], 0, 0
        self.attempts = set()
        self.kept = {}  # tokens of an earlier attempt that this one began with
        self.limit = self.random.choice([None, 1, 2, 7])
        self.min_starts = self.random.randint(1, self.limit or 1)

    def step(self, batches_left=None):
        scheduler = self.scheduler
        for sample in scheduler.begin(self.version, batches_left):
            self.text[sample] = []
        self.unrewarded = [sample for sample in self.unrewarded if self.state(sample) == "generated"]
        self.running = [sample for sample in self.running if self.state(sample) == "running"]
        self.fill()
        rewarded = False
        while True:
            while not scheduler.has_batch(rewarded):
                assert self.running or self.unrewarded, "nothing is on its way, nothing enough: the scheduler is stuck"
                self.advance()
                self.fill()
            for sample in list(self.running):  # the abort: some finish before it reaches them
                if sample in self.running and self.random.random() >= self.losses:  # or are busy elsewhere
                    self.advance(sample, stop=self.random.random() < 0.8)
            while self.unrewarded and self.random.random() >= self.losses:
                self.reward()
            self.check_settled()
            if not self.rules.continues:
                for sample in self.running:
                    scheduler.abandon(*sample)
                    assert self.state(sample) in ("pending", None)
                    self.text[sample] = self.text[sample][: self.kept[sample]]
                self.running = []
            if scheduler.ready():
                break
            rewarded = True
            self.fill()  # a reward failed, or is long in coming: on with it
        batch = scheduler.collect()
        self.check(batch)
        self.version += 1
        return batch

    def check_settled(self):
        """Check that engines wait for rewards exactly as long as these may change the batch."""
        scheduler = self.scheduler
        assert scheduler.has_settled(STOP_WAIT_S)
        settled = scheduler.has_settled(0.0)
        if self.running and not self.rules.continues:
            assert not settled
            return
        late = list(self.unrewarded)
        if not late:
            assert settled
            return
        rewarded = copy.deepcopy(scheduler)
        for sample in late:
            rewarded.finish(*sample)
        batch = rewarded.collect().samples if rewarded.ready() else []
        if settled:
            assert batch == (copy.deepcopy(scheduler).collect().samples if scheduler.ready() else [])
        elif scheduler.ready():
            assert set(late) & set(batch), "waits for the reward of a sample that is not of the batch"
        else:
            assert batch, "waits for rewards that do not fill the batch"

    def fill(self):
        while count := self.scheduler.loadable():
            consumed = not len(self.scheduler.ledger) or self.rules.refill == "always"
            assert consumed or count <= len(self.dropped), "loaded before all were consumed"
            for _ in range(count):
                size = self.random.randint(1, 2 * SAMPLES) if self.uneven else SAMPLES
                self.scheduler.load(f"p{self.loads}", size)
                if self.random.random() < 0.9:
                    self.scheduler.expect(f"p{self.loads}", self.random.randint(1, LONGEST))
                self.loads += 1
        started = self.scheduler.dispatch(self.limit, self.min_starts)
        left = any(startable(self.rules, self.scheduler.ledger, training=False))
        assert not started or len(started) >= self.min_starts or not left, "a message for less than a min_starts"
        for sample in started:
            if not self.text.get(sample):
                self.text[sample] = []
                self.length[sample] = self.random.randint(1, LONGEST)
            self.kept[sample] = len(self.text[sample])
            assert sample not in self.running
            attempt = (*sample, self.scheduler.ledger.prompt(sample[0]).samples[sample[1]].attempt)
            assert attempt not in self.attempts, "two attempts with one name"
            self.attempts.add(attempt)
            self.running.append(sample)
        assert self.limit is None or len(self.running) <= self.limit

    def reward(self):
        uid, number = sample = self.random.choice(self.unrewarded)
        self.unrewarded.remove(sample)
        if self.random.random() < self.mishaps:
            self.dropped.add(uid)
            self.scheduler.drop(uid)
            self.forget(uid)
        else:
            self.scheduler.finish(uid, number)

    forget = World.forget

    def advance(self, sample=None, stop=None):
        if sample is None and self.unrewarded and (not self.running or self.random.random() < 0.3):
            self.reward()
            return
        if self.random.random() < self.losses:
            self.lose(sample or self.random.choice(self.running + self.unrewarded))
            return
        sample = sample or self.random.choice(self.running)
        uid, number = sample
        text = self.text[sample]
        more = self.length[sample] - len(text)
        made = self.random.randint(0, more) if stop or (stop is None and self.random.random() < 0.7) else more
        text += [self.version] * made
        if len(text) == self.length[sample]:
            self.running.remove(sample)
            self.scheduler.generate(uid, number, len(text), min(text))
            self.unrewarded.append(sample)
        elif stop and not self.rules.continues:
            self.running.remove(sample)
            if not self.scheduler.interrupt(uid, number, len(text), min(text, default=None)):
                text.clear()

    def state(self, sample):
        uid, number = sample
        if uid not in self.scheduler.ledger:
            return None
        return self.scheduler.ledger.prompt(uid).samples[number].state

    def lose(self, sample):
        """Its worker dies; what it had reported is kept, and what it generated since is lost."""
        generated = sample in self.unrewarded
        (self.unrewarded if generated else self.running).remove(sample)
        self.scheduler.abandon(*sample)
        assert self.state(sample) in ("pending", None)
        if not generated:
            self.text[sample] = self.text[sample][: self.kept[sample]]

    def check(self, batch):
        assert batch.samples
        assert self.uneven or len(batch.samples) <= max(self.rules.batch_samples, SAMPLES)
        assert batch.lengths == sorted(batch.lengths) == [len(self.text[s]) for s in batch.samples]
        oldest = self.version - self.rules.max_staleness
        for sample, staleness in zip(batch.samples, batch.staleness, strict=True):
            assert sample not in self.trained, "trained twice"
            assert min(self.text[sample]) >= oldest
            assert staleness == self.version - min(self.text[sample])
            self.trained.append(sample)
        if self.rules.unit == "group" and not self.uneven:
            assert len(batch.samples) == SAMPLES * len({uid for uid, _ in batch.samples})
        self.batches.append(batch)
