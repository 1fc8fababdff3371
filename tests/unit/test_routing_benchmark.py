"""Router and coordinator among simulated replicas: all samples are answered once, and the figures are what they say."""

import asyncio

import numpy as np
import pytest

from benchmarks.meetings import meetings
from benchmarks.real_sizes import routing
from benchmarks.real_sizes.routing_world import World, tokens_by
from benchmarks.real_sizes.virtual import Actor, Clock
from verl_rhyme.planning.profile import profile

BATCH, STEPS, REPLICAS, SAMPLES = 8, 2, 16, 16


@pytest.fixture(scope="module", params=["least_loaded", "longest_first"])
def world(request):
    lengths = np.random.default_rng(0).integers(1, 2000, (2, BATCH * STEPS, SAMPLES))
    world = World(request.param, {}, REPLICAS, profile(routing.PROFILE)[0], lengths, BATCH)
    world.run(2 * STEPS)
    return world


def test_every_sample_is_generated_once_with_its_tokens(world):
    made: dict[str, float] = {}
    for step in world.steps:
        assert len(set(step.groups)) == BATCH
        for uid, tokens in zip(step.groups, step.tokens, strict=True):
            made[uid] = made.get(uid, 0.0) + tokens
    assert len(made) == 2 * STEPS * BATCH
    for uid, tokens in made.items():
        epoch, prompt = world.prompt(uid)
        assert tokens == pytest.approx(world.lengths[epoch, prompt].sum())


def test_nothing_is_left_at_router_and_engines(world):
    assert world.router.object.get_total_inflight() == 0
    assert not any(world.router.object.get_status()["servers"].values())
    assert not any(replica.object.engine.names() for replica in world.replicas.values())


def test_figures_are_of_what_ran(world):
    told = routing.routed(world, world.steps)
    where = routing.histories(world, world.steps[:STEPS], world.steps[STEPS:])
    if world.policy == "least_loaded":  # as many samples as replicas: each of a group's to another
        assert told["siblings_met"] < 0.2
        assert where["prompts_a_node"] == 1
        assert where["home"] == 1
        assert routing.fetched(world, world.steps)["copies_a_prompt"] == where["nodes"] - 1, "all answer some of each"
    assert told["requests_to_mean"] >= 1
    assert told["tokens_to_mean"] >= 1
    assert where["history_gib"] <= where["history_gib_of_all"]
    made = sum(tokens_by(step, REPLICAS).sum() for step in world.steps)
    assert made == pytest.approx(world.lengths.sum())


def test_costs_count_messages_and_slices(world):
    told = routing.costs(world, 2 * STEPS)
    requests = sum(len(step.groups) for step in world.steps)
    samples = 2 * STEPS * BATCH * SAMPLES
    assert world.router.messages["acquire_server"] == world.router.messages["release_server"] == requests >= samples
    assert told["messages_a_sample"]["router"] >= 2
    assert told["decision_us"] > 0
    assert told["coordinator_step_ms"] >= max(told["coordinator_still_ms"].values()) / (2 * STEPS)


def test_of_its_slices_an_actor_is_told_its_own_tasks_and_no_others():
    class Counter:
        async def work(self):
            await asyncio.sleep(3600)
            return await asyncio.ensure_future(self.more())

        async def more(self):
            return 7

        def plain(self):
            return 8

    async def ask(actor):
        return await actor.work.remote(), await actor.plain.remote()

    clock = Clock()
    actor = Actor(Counter)
    assert clock.run_until_complete(ask(actor)) == (7, 8)
    assert clock.time() >= 3600
    assert {name.rpartition(".")[2]: len(slices) for name, slices in actor.slices.items()} == {
        "work": 3,
        "more": 1,
        "plain": 1,
    }
    clock.close()


def test_who_waits_for_nothing_is_told():
    clock = Clock()
    with pytest.raises(RuntimeError, match="everybody waits"):
        clock.run_until_complete(asyncio.wait_for(clock.create_future(), None))
    clock.close()
    assert meetings(["a"], [0], np.zeros(1), np.ones(1)).met == 0
