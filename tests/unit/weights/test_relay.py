"""The weight relay without verl and Ray: versions between nodes, and their loads by replicas."""

import asyncio
from types import SimpleNamespace

import pytest
from relay_world import Dead, Near, Replica, deliver, fetch, hold_chunks, let_go, loads, publish, same, weights, write

from verl_rhyme.weights.folder import Folder, UnsentError, WeightsError
from verl_rhyme.weights.relay import Relay

# ---- between nodes ----


async def test_a_version_reaches_all_nodes_by_a_tree(nodes):
    near = [Near(node) for node in nodes]
    await publish(nodes[0], 7)
    for place, node in enumerate(nodes[1:]):
        await fetch(node, 7, near[place // 2])
    replicas = await asyncio.gather(*(deliver(node, 7) for node in nodes))
    parts = len(nodes[0]._folder.parts(7))
    assert [node.sent for node in near] == [2 * parts, 2 * parts, 0, 0, 0]
    assert all(same(node._folder, 7) for node in nodes)
    for replica in replicas:
        assert replica.loaded.keys() == weights(7).keys()
        assert loads(replica, 7)
        assert replica.calls[:3] == ["abort_all_requests", "release_kv_cache", "update_weights"]
        assert replica.calls[3:] == ["resume_kv_cache", "resume_engine_generation", "open_submission_gate"]


async def test_if_a_source_is_dead_the_next_one_is_tried(nodes):
    await publish(nodes[0], 1)
    await fetch(nodes[1], 1, Dead(), Near(nodes[0]))
    assert loads(await deliver(nodes[1], 1), 1)
    await fetch(nodes[2], 1, Dead())
    with pytest.raises(UnsentError, match="could not be fetched"):  # the trainer then starts another relay
        await deliver(nodes[2], 1)


async def test_a_transfer_can_be_retried_after_any_error(nodes, monkeypatch):
    def full(version, *_):
        raise OSError(5, "Input/output error")

    await publish(nodes[0], 1)
    monkeypatch.setattr(nodes[1]._folder, "write", full)
    await fetch(nodes[1], 1, Near(nodes[0]))
    with pytest.raises(OSError, match="Input/output error"):
        await deliver(nodes[1], 1)
    with pytest.raises(WeightsError, match="removed to make room"):  # other nodes then try their next source
        await asyncio.wait_for(nodes[1].parts(1), 5)
    monkeypatch.undo()
    await fetch(nodes[1], 1, Near(nodes[0]))
    assert (await deliver(nodes[1], 1)).loaded


async def test_close_cancels_fetches_in_flight_and_removes_the_folder(nodes):
    await publish(nodes[0], 1)
    gate = hold_chunks(nodes[0], 1)
    await fetch(nodes[1], 1, Near(nodes[0]))
    await asyncio.sleep(0.1)
    await nodes[1].close()
    gate.set()
    await asyncio.sleep(0.1)
    assert not nodes[1]._folder.path.exists()


async def test_a_new_relay_reuses_the_complete_versions_of_a_dead_one(nodes):
    for version in (1, 2):
        await publish(nodes[0], version)
        write(nodes[1]._folder, version)
    (nodes[1]._folder.path / "2" / "manifest.json").unlink()
    path = await nodes[1].folder()
    let_go(nodes[1]._folder)
    heir = Relay(None, path)
    assert await heir.folder() == path
    assert (await heir.has(1), await heir.has(2)) == (True, False)
    assert loads(await deliver(heir, 1), 1)
    with pytest.raises(UnsentError, match="weights of version 2 were not sent"):
        await deliver(heir, 2)
    await fetch(heir, 2, Near(nodes[0]))
    assert loads(await deliver(heir, 2), 2)
    await fetch(nodes[2], 1, Near(heir))  # which has never fetched it
    assert loads(await deliver(nodes[2], 1), 1)


# ---- another site ----


async def test_bytes_from_another_site_are_few_and_counted(nodes):
    for version in (1, 2):
        await publish(nodes[0], version)
        await fetch(nodes[1], version, Near(nodes[0]), remote=True)
        await fetch(nodes[2], version, Near(nodes[1]))
        for node in nodes[1:3]:
            await deliver(node, version)
        sent = sum(part.bytes for part in nodes[0]._folder.parts(version))
        remote, within = await nodes[1].take_tally(), await nodes[2].take_tally()
        assert 0 < remote["remote_bytes"] < sent
        assert within["remote_bytes"] == 0
        assert within["bytes"] >= sent
        assert remote["damaged"] == remote["lost"] == 0
    assert not await nodes[1].take_tally()


@pytest.mark.parametrize("pack", [True, False])
async def test_a_site_slower_than_training_steps_gets_new_versions(nodes, pack):
    await publish(nodes[0], 1)
    gate, requests, most, chunk = hold_chunks(nodes[0], 1), [], 0, nodes[0].chunk

    async def noted(version, chunk_, base, *arguments):
        requests.append((version, base and base.version))
        return await chunk(version, chunk_, base, *arguments)

    nodes[0].chunk, nodes[1]._pack, near = noted, pack, Near(nodes[0])
    await fetch(nodes[1], 1, near, remote=True)
    await asyncio.sleep(0.2)
    for version in (2, 3, 4, 5):
        await publish(nodes[0], version)
        await fetch(nodes[1], version, near, remote=True)
        most = max(most, len(nodes[0]._folder.versions()))
    gate.set()
    assert loads(await deliver(nodes[1], 5), 5)
    assert most == 3
    assert ((5, None) in requests) is not pack, "version 5 was sent in full"
    await publish(nodes[0], 6)
    nodes[0]._remote_requests = dict.fromkeys(nodes[0]._remote_requests, -1e9)  # much later
    await publish(nodes[0], 7)
    assert nodes[0]._folder.versions() == [6, 7]


# ---- room for versions ----


async def test_two_versions_are_kept_and_those_being_loaded(nodes):
    [node] = nodes[:1]
    await publish(node, 1)
    gate = asyncio.Event()
    slow = Replica(node)
    slow.update_weights = SimpleNamespace(remote=lambda global_steps: gate.wait())
    delivery = asyncio.create_task(node.deliver(slow.target, 1))
    await asyncio.sleep(0)
    for version in (2, 3):
        await publish(node, version)
    assert node._folder.versions() == [1, 2, 3]
    gate.set()
    await delivery
    await publish(node, 4)
    assert node._folder.versions() == [3, 4]


async def test_a_version_that_another_process_reads_is_kept(nodes):
    """For a replica of several nodes: only the relay of its first node knows of the delivery."""
    [node] = nodes[:1]
    await publish(node, 1)
    reading = Folder(node._folder.path).read(1)
    next(reading)
    for version in (2, 3):
        await publish(node, version)
    assert node._folder.versions() == [1, 2, 3]
    assert len(list(reading)) == len(weights(1)) - 1
    await publish(node, 4)
    assert node._folder.versions() == [3, 4]


async def test_a_slow_node_holds_no_more_versions_than_others(nodes):
    await publish(nodes[0], 1)
    await fetch(nodes[1], 1, Near(nodes[0]))
    await deliver(nodes[1], 1)
    gate, most = hold_chunks(nodes[0], 2), 0
    for version in (2, 3):
        await publish(nodes[0], version)
        await fetch(nodes[1], version, Near(nodes[0]))
        await asyncio.sleep(0.05)
        most = max(most, len([path for path in nodes[1]._folder.path.iterdir() if path.is_dir()]))
    gate.set()
    await deliver(nodes[1], 3)
    assert most <= 2
    assert nodes[1]._folder.versions() == [2, 3]


async def test_a_version_removed_before_it_arrived_is_not_waited_for(nodes):
    """A slow node: the actor's node has removed the version to make room for newer ones."""
    gate, parts = asyncio.Event(), nodes[0].parts

    async def late(version):
        await gate.wait()
        return await parts(version)

    await publish(nodes[0], 1)
    nodes[0].parts = late
    await fetch(nodes[1], 1, Near(nodes[0]))
    replica = Replica(nodes[1])
    first = asyncio.create_task(nodes[1].deliver(replica.target, 1))
    await asyncio.sleep(0.02)
    assert not replica.calls, "the replica stopped before the version arrived"
    for version in (2, 3):
        await publish(nodes[0], version)
    second = asyncio.create_task(nodes[1].deliver(replica.target, 3))
    gate.set()
    await fetch(nodes[1], 3, Near(nodes[0]))
    await asyncio.wait_for(asyncio.gather(first, second), 10)
    assert loads(replica, 3)
    assert replica.calls.count("update_weights") == 1
    with pytest.raises(WeightsError, match="removed to make room"):
        await nodes[0].parts(1)


# ---- deliveries ----


async def test_a_dying_replica_raises_and_does_not_block_others(nodes):
    await publish(nodes[0], 1)
    dying = Replica(nodes[0], fails=True)
    with pytest.raises(RuntimeError, match="the engine died"):
        await nodes[0].deliver(dying.target, 1)
    assert dying.ended, "a replica with half of a version lives on"
    assert (await deliver(nodes[0], 1)).loaded
    assert not nodes[0]._loading[1]


@pytest.fixture
def busy(nodes):
    """A node, a replica of it whose server has requests until the event is set, and a start of its deliveries."""
    done, node = asyncio.Event(), nodes[0]
    replica = Replica(node, idle=done.wait)

    async def start(version, patient):
        if not await node.has(version):
            await publish(node, version)
        delivery = asyncio.create_task(node.deliver(replica.target, version, patient))
        await asyncio.sleep(0.02)
        return delivery

    return replica, done, start


async def test_a_patient_delivery_waits_for_running_requests_and_loads_the_newest_version(busy):
    replica, done, start = busy
    deliveries = [await start(version, patient=True) for version in (1, 2)]
    assert not replica.calls, "running requests were aborted"
    done.set()
    await asyncio.gather(*deliveries)
    assert replica.calls.count("update_weights") == 1
    assert loads(replica, 2)


async def test_an_impatient_delivery_hurries_a_patient_one(busy):
    replica, done, start = busy
    deliveries = [await start(1, patient) for patient in (True, False)]
    await asyncio.wait_for(asyncio.gather(*deliveries), 10)
    assert replica.calls.count("update_weights") == 1
    again = await start(2, patient=True)  # the hurry is over
    assert not again.done()
    done.set()
    await again


async def test_a_hurry_outlives_a_delivery_in_flight(busy):
    """An impatient delivery does not wait behind a patient one in the queue."""
    replica, _, start = busy
    gate, load = asyncio.Event(), replica.update_weights

    async def slowly(global_steps):
        await gate.wait()
        await load.remote(global_steps=global_steps)

    replica.update_weights = SimpleNamespace(remote=slowly)
    deliveries = [await start(*each) for each in ((1, False), (2, True), (2, False))]
    gate.set()
    await asyncio.wait_for(asyncio.gather(*deliveries), 10)
    assert loads(replica, 2)
