"""A coordinator whose process is killed comes back under its handle, and the run goes on where it stood (real Ray and
TransferQueue)."""

import contextlib

import pytest
import ray
import torch
import transfer_queue as tq
from ray.exceptions import RayActorError
from tensordict import TensorDict
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from verl_rhyme.agent_loop.session import PROMPTS, SESSIONS
from verl_rhyme.agent_loop.stored_attempts import REPORT, TRAIN
from verl_rhyme.processes.messages import Handed, NotOpen, Setting
from verl_rhyme.scheduling.attempts import Attempt, Ended
from verl_rhyme.scheduling.rules import Rules
from verl_rhyme.trainer.driver import Driver


@ray.remote(num_cpus=0)
class Worker:
    """Every sample is done as soon as it is started."""

    def __init__(self):
        tq.init()

    async def attach(self, coordinator):
        self.coordinator = coordinator
        return {}

    async def attempts(self):
        return []

    async def abandon(self, sessions):
        pass

    async def begin(self, starts, step):
        names = [start.name for start in starts]
        report = {"tokens": 3, "first_version": step - 1, "records": []}
        rows = list_of_dict_to_tensordict([{"index": torch.zeros(1), "extra_fields": {REPORT: report}}] * len(names))
        left = TensorDict({"records": torch.zeros(len(names), 0)}, batch_size=len(names))
        tags = [{"status": "generated", "tokens": 3, "first_version": step - 1}] * len(names)
        await tq.async_kv_batch_put(keys=names, partition_id=SESSIONS, fields=left, tags=tags)
        done = [{"status": "success"}] * len(names)
        await tq.async_kv_batch_put(keys=[f"{n}_0" for n in names], partition_id=TRAIN, fields=rows, tags=done)
        told = [Ended(name, "generated", 3, step - 1) for name in names] + [Ended(name, "finished") for name in names]
        with contextlib.suppress(RayActorError):
            await self.coordinator.ended.remote(told)


class Engines:
    through_training = False

    def stops(self, rules):
        return True

    def stop(self):
        pass

    resume = stop


@pytest.mark.slow
def test_a_killed_coordinator_comes_back_and_nothing_is_trained_twice():
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)  # the queue takes some
    try:
        tq.init()
        uids = (f"p{number}" for number in range(100))

        def load(count):
            new = [next(uids) for _ in range(count)]
            data = TensorDict({"index": torch.zeros(count)}, batch_size=count)
            tq.kv_batch_put(keys=new, partition_id=PROMPTS, fields=data, tags=[{}] * count)
            return [Handed(uid, 2) for uid in new]

        rules = Rules(2, 4, max_staleness=0, in_flight=2, refill="when_empty")
        setting = Setting(rules, filters=None, limit=16, lot=1, slots=8, lost_after=30.0)
        driver = Driver(setting, load, lambda: [Worker.remote()])
        driver.open([Worker.remote()], None, version=0)
        driver.publish(0, 4)
        trained = []
        for step in range(1, 5):
            if step in (2, 3):
                ray.kill(driver._actor, no_restart=False)
            reply = driver.next_batch(Engines())
            trained += [Attempt.named(key.rpartition("_")[0]).sample for key in reply.keys]
            driver.pause()
            if step == 3:
                ray.kill(driver._actor, no_restart=False)
                told = None
                while told is None:
                    try:
                        ray.get(driver._actor.state.remote())
                    except NotOpen as error:
                        told = error
                    except RayActorError:
                        pass
                assert "started anew" in str(told)
            driver.publish(step, 4 - step)
            tq.kv_clear(keys=reply.keys, partition_id=TRAIN)
        assert driver.reopened >= 3
        assert len(trained) == len(set(trained)) == 16
        assert len({uid for uid, _ in trained}) == 8
        driver.close()
    finally:
        ray.shutdown()
