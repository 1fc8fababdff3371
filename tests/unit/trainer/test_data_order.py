"""Prompts from verl's data loader through the rollout, saved and resumed at any step: none skipped, none repeated.

Public reports of peers that lost or repeated prompts: NeMo-RL 3248 and 3599, OpenRLHF 1320 and 1322, trl 5911.
"""

import json
import random
from collections import Counter
from types import MethodType, SimpleNamespace

import numpy as np
import pytest
from omegaconf import OmegaConf
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.trainer.ppo.utils import create_rl_sampler
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_rhyme.scheduling.attempts import AttemptReport
from verl_rhyme.scheduling.rollout import Rollout
from verl_rhyme.scheduling.rules import Rules

SAMPLES, EPOCHS = 2, 3
RULES = {
    "one batch": {"max_staleness": 0},
    "tail batching": {"max_staleness": 0, "put_off": 0.25},
    "pipeline": {"max_staleness": 3, "separate": True},
    "loads": {"max_staleness": 0, "in_flight": 4, "refill": "when_empty"},
    "as loaded": {"max_staleness": 2, "separate": True, "take": "loaded"},
}


class Run:
    """A trainer without a policy, and engines that finish samples in any order."""

    def __init__(self, rules, rows, updates, saved=None):
        self.rules, self.rows, self.updates = rules, rows, updates
        self.random, self.prompts, self.trained, self.step = random.Random(0), {}, [], 0
        data = OmegaConf.create({"shuffle": True, "seed": 1, "sampler": None})
        dataset = [{"raw_prompt": f"{row}"} for row in range(rows)]
        loader = StatefulDataLoader(
            dataset=dataset, batch_size=1, drop_last=True, collate_fn=columns, sampler=create_rl_sampler(data, dataset)
        )
        self.trainer = SimpleNamespace(train_dataloader=loader, train_dataloader_it=None)
        self.fetch = MethodType(PPOTrainer._fetch_one_gen_batch, self.trainer)
        if saved is None:
            self.rollout = Rollout(rules)
            self.rollout.publish(0, updates)
            return
        self.rollout = Rollout(rules, generation=saved["generation"] + 1)
        loader.load_state_dict(saved["data"])
        self.step, self.prompts, self.trained = saved["step"], saved["prompts"], saved["trained"]
        state = json.loads(saved["rollout"])
        assert self.rollout.restore(state, self.step, updates - self.step, {}, set(self.prompts)) == []

    def saved(self):
        state = self.rollout.state_dict()
        return {
            "data": self.trainer.train_dataloader.state_dict(),
            "rollout": json.dumps(state),
            "generation": state["generation"],
            "step": self.step,
            "prompts": self.prompts,
            "trained": self.trained,
        }

    def update(self):
        rollout, scheduler = self.rollout, self.rollout.scheduler
        while True:
            for _ in range(rollout.missing_prompts()):
                batch = self.fetch()
                [uid], [prompt] = batch["uid"], batch["raw_prompt"]
                self.prompts[uid] = prompt
                rollout.add_prompts([(uid, SAMPLES)])
            rollout.fill()
            if scheduler.has_batch() and scheduler.has_settled(30.0):
                rollout.abandon_running()
                if scheduler.ready():
                    break
            attempt = self.random.choice(rollout.attempts())
            sample = scheduler.ledger.prompt(attempt.uid).samples[attempt.number]
            if sample.state == "running":
                version = scheduler.version if sample.first_version is None else sample.first_version
                rollout.ended(AttemptReport(attempt, "generated", self.random.randint(1, 40), version))
            else:
                rollout.ended(AttemptReport(attempt, "finished"))
        self.trained += rollout.take().collected.samples
        self.step += 1


def columns(rows):
    return {"raw_prompt": np.array([row["raw_prompt"] for row in rows], dtype=object)}


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize(("rows", "batch"), [(12, 4), (13, 4), (4, 4)])
@pytest.mark.parametrize("name", RULES)
def test_every_prompt_is_trained_in_every_epoch(name, rows, batch, every):
    """Also if a checkpoint ends an epoch, batches do not divide the data, or batches in flight span epochs."""
    rules = Rules(batch, batch * SAMPLES, **RULES[name])
    updates = rows // batch * EPOCHS
    run = Run(rules, rows, updates)
    while run.step < updates:
        run.update()
        if run.step % every == 0 and run.step < updates:
            run = Run(rules, rows, updates, run.saved())
        else:
            run.rollout.publish(run.step, updates - run.step)
    assert len(set(run.trained)) == len(run.trained) == updates * batch * SAMPLES
    times = Counter(run.prompts[uid] for uid, _ in run.trained)
    fewest = updates * batch // rows
    assert len(times) == rows
    assert set(times.values()) <= {fewest * SAMPLES, -(-updates * batch // rows) * SAMPLES}
    assert len(run.prompts) == updates * batch, "some loaded prompts are not trained"
    assert len(run.rollout.scheduler.ledger) == 0
