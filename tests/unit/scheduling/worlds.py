"""A make-believe engine and trainer that wait for nobody, around a scheduler."""

import random

from verl_rhyme.scheduling.scheduler import Scheduler

SAMPLES, LONGEST = 3, 40


class World:
    """Replicas and a trainer around a scheduler; ``text`` holds the version of every token a sample has.

    ``lag``: replicas take new weights when it suits them, before the scheduler hears of these or long after.
    ``losses``: share of events at which an attempt is lost with all that it made, or cut short on its replica.
    ``mishaps``: share of rewards that fail. ``uneven``: prompts have groups of their own size.
    """

    def __init__(self, rules, seed, lag=False, losses=0.0, mishaps=0.0, uneven=False):
        self.rules, self.lag, self.losses, self.mishaps, self.uneven = rules, lag, losses, mishaps, uneven
        self.scheduler, self.random = Scheduler(rules), random.Random(seed)
        self.scheduler.begin(0)
        self.text, self.length, self.kept, self.place = {}, {}, {}, {}  # of samples
        self.running, self.unrewarded, self.trained, self.dropped = [], [], [], set()
        self.sizes, self.loads, self.stale, self.weights, self.training = {}, 0, 0, 0, False
        self.made = self.wasted = 0  # tokens; the latter as counted before this step
        self.replicas = [0, 0, 0]
        self.limit = self.random.choice([None, None, 1, 7])

    def run(self, steps):
        """Until all that was loaded is trained; or so many batches."""
        for _ in range(steps):
            if self.trained and not len(self.scheduler.ledger):
                return True
            self.until_harvest()
        return False

    def until_harvest(self):
        while True:
            self.fill()
            scheduler = self.scheduler
            assert not (self.training and (scheduler.enough() or scheduler.ready())), "trained before the policy is new"
            if scheduler.enough() and scheduler.settled(self.random.choice([0.0, 30.0])):
                assert scheduler.give_up() == []
                if scheduler.ready():
                    return self.harvest()
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
        happen += [self.tell] * bool(self.running) + [self.publish] * self.training
        happen += [self.pull] * (self.lag and min(self.replicas) < self.weights)
        assert happen, "nothing is on its way, nothing enough: the scheduler is stuck"
        self.random.choice(happen)()

    def advance(self):
        sample = self.random.choice(self.running)
        text, scheduler = self.text[sample], self.scheduler
        more = self.length[sample] - len(text)
        made = self.random.choice([more, self.random.randint(0, more)])
        text += [self.replicas[self.place[sample]]] * made
        self.made += made
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

    def tell(self):
        sample = self.random.choice(self.running)
        if not self.scheduler.progress(*sample, min(self.text[sample], default=None)):
            self.end(sample)

    def reward(self):
        uid, number = sample = self.random.choice(self.unrewarded)
        self.unrewarded.remove(sample)
        if self.random.random() < self.losses:
            self.scheduler.abandon(uid, number)  # what it had told before is gone on from
        elif self.random.random() < self.mishaps:
            self.dropped.add(uid)
            self.scheduler.fail(uid)
        else:
            self.scheduler.finish(uid, number)

    def pull(self):
        number = self.random.randrange(len(self.replicas))
        self.replicas[number] = self.weights

    def publish(self):
        """New weights are there; the scheduler is told at once or later."""
        if self.weights == self.scheduler.version:
            self.weights += 1
            if self.lag:
                return
            self.replicas = [self.weights] * len(self.replicas)
        self.wasted += self.scheduler.step.wasted_tokens
        for sample in self.scheduler.begin(self.weights):
            self.end(sample)
        self.stale += self.scheduler.step.stale
        self.training = False

    def end(self, sample):
        """Its text is too stale."""
        self.text[sample].clear()
        for place in (self.running, self.unrewarded):
            if sample in place:
                place.remove(sample)

    def harvest(self):
        batch = self.scheduler.harvest()
        assert batch.samples
        assert batch.lengths == sorted(batch.lengths) == [len(self.text[sample]) for sample in batch.samples]
        for sample, staleness in zip(batch.samples, batch.staleness, strict=True):
            assert sample not in self.trained, "trained twice"
            assert sample not in self.running + self.unrewarded
            assert staleness == self.scheduler.version - min(self.text[sample]) <= self.rules.max_staleness
            self.trained.append(sample)
        if self.rules.unit == "group":
            assert len(batch.samples) == sum(self.sizes[uid] for uid in {uid for uid, _ in batch.samples})
        self.running = [sample for sample in self.running if sample[0] not in self.dropped]
        self.unrewarded = [sample for sample in self.unrewarded if sample[0] not in self.dropped]
        self.training = True
        if self.rules.max_staleness == 0 and not self.rules.draft_ahead:
            assert self.scheduler.dispatch() == [], "started under a policy it may not be trained in"

    def check_all(self):
        wanted = {(uid, number) for uid, size in self.sizes.items() for number in range(size)}
        assert set(self.trained) | {sample for sample in wanted if sample[0] in self.dropped} == wanted


class Separate(World):
    """Engines apart from the actor: its new weights cut short what runs, and the reports of that take their time.

    Some attempts are busy elsewhere then (a tool) and go on under the new weights.
    """

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
            cut = [sample for sample in self.running if self.random.random() < 0.8]
            self.cut += cut
            self.running = [sample for sample in self.running if sample not in cut]
            if self.random.random() < 0.5:
                return  # the scheduler is told of the policy later than of what it cut short
        super().publish()

    def end(self, sample):
        super().end(sample)
        if sample in self.cut:
            self.cut.remove(sample)

    def harvest(self):
        super().harvest()
        self.cut = [sample for sample in self.cut if sample[0] not in self.dropped]
