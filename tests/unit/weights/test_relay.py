"""The weight relay without verl and Ray: the files of a node, and transfers between nodes."""

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import uuid
from types import SimpleNamespace

import pytest
import torch
from ray.exceptions import RayActorError
from relay_world import Dead, Near, Replica, known, let_go, publish, same, weights, write

from verl_rhyme.history import ownership
from verl_rhyme.weights import folder as folders
from verl_rhyme.weights import relay as relays
from verl_rhyme.weights.engine import RelayCheckpointEngine
from verl_rhyme.weights.folder import Folder, UnsentError, WeightsError, claim
from verl_rhyme.weights.relay import Relay
from verl_rhyme.weights.transfer import identity

OWNER = """
import sys, time
from pathlib import Path
from verl_rhyme.weights.folder import claim
folder = claim(Path(sys.argv[1]))
(folder.path / "file").write_bytes(b"weights")
print(folder.path, flush=True)
time.sleep(600)
"""


class TestFolder:
    def test_written_versions_are_read_back(self, tmp_path):
        folder = claim(tmp_path)
        for version in (3, 12):
            write(folder, version)
        assert folder.versions() == [3, 12]
        assert len(folder.parts(3)) > 1
        assert same(folder, 3)
        assert same(folder, 12)

    def test_tensors_of_all_dtypes_and_shapes_are_read_back(self, tmp_path):
        """Also if the actor reuses the memory of a tensor, and if a tensor is larger than a part."""
        folder, memory = claim(tmp_path), torch.empty(400, dtype=torch.uint8)
        writer, wanted = folder.writer(1, 100, 64), {}
        types = (torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn, torch.int64, torch.bool)
        for n in range(60):
            kind, size = types[n % len(types)], (0, 1, 3, 7, 11, 40)[n % 5]
            tensor = memory[: size * kind.itemsize].copy_(torch.randint(2, (size * kind.itemsize,))).view(kind)
            tensor = tensor.reshape(()) if size == 1 else tensor
            wanted[f"layer.{n}"] = tensor.clone()
            writer.add(f"layer.{n}", tensor)
        writer.close()
        read = dict(folder.read(1))
        assert read.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
            assert bytes(read[name].reshape(-1).view(torch.uint8)) == bytes(tensor.reshape(-1).view(torch.uint8))
        parts = folder.parts(1)
        assert not any(folder.wrong(1, number, part) for number, part in enumerate(parts))
        assert len(parts) > 5

    def test_the_folder_is_private(self, tmp_path):
        folder = claim(tmp_path)
        write(folder, 1)
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700

    def test_an_unclosed_version_is_missing(self, tmp_path):
        folder = claim(tmp_path)
        writer = folder.writer(1, part_bytes=1)
        writer.add("a", torch.ones(3))
        assert folder.versions() == []
        with pytest.raises(WeightsError, match="no weights of version 1"):
            next(folder.read(1))

    def test_a_truncated_part_raises(self, tmp_path):
        folder = claim(tmp_path)
        write(folder, 1)
        last = sorted(folder.path.glob("1/*.safetensors"))[-1]
        last.write_bytes(last.read_bytes()[:-1])
        with pytest.raises(WeightsError, match="is incomplete"):
            list(folder.read(1))

    def test_damaged_and_missing_chunks_are_found(self, tmp_path):
        folder = claim(tmp_path)
        write(folder, 1)
        part = folder.parts(1)[0]
        assert len(part.digests) > 2
        assert folder.wrong(1, 0, part) == []
        file = folder._file(1, 0)
        data = bytearray(file.read_bytes())
        data[part.range(1)[0]] ^= 1
        file.write_bytes(data[:-1])
        assert folder.wrong(1, 0, part) == [1, len(part.digests) - 1]
        file.unlink()
        assert folder.wrong(1, 0, part) == list(range(len(part.digests)))

    def test_a_dead_owners_version_is_complete_only_after_verification(self, tmp_path):
        left = claim(tmp_path)
        for version in (1, 2):
            write(left, version)
        wanted = identity(left.parts(1))
        assert claim(tmp_path, str(left.path)).path != left.path, "a live owner's folder is taken over"
        let_go(left)
        folder = claim(tmp_path, str(left.path))
        assert folder.path == left.path
        assert folder.versions() == []
        assert not folder.revive(1, identity([])), "another version is revived"
        assert folder.revive(1, wanted)
        assert same(folder, 1)
        file = folder._file(2, 1)
        file.write_bytes(file.read_bytes()[:-1] + b"?")
        assert not folder.revive(2, "any identity")
        assert folder.versions() == [1]
        assert folder.unfinished() == [2]

    def test_an_error_for_lack_of_room_has_a_remedy(self, tmp_path):
        folder = claim(tmp_path)
        writer = folder.writer(1)
        (folder.path / "1").write_bytes(b"")  # no folder can be made here
        writer.add("a", torch.ones(3))
        with pytest.raises(WeightsError, match=r"two versions of the model.*--shm-size.*relay\.folder"):
            writer.close()

    @pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
    def test_a_read_only_root_raises(self, tmp_path):
        tmp_path.chmod(0o500)
        with pytest.raises(WeightsError, match="Permission denied"):
            claim(tmp_path)

    def test_only_folders_of_dead_owners_are_removed(self, tmp_path):
        process = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        try:
            theirs = process.stdout.readline().strip()
            claim(tmp_path)
            assert os.path.exists(theirs), "a live owner's weights are gone"
            process.send_signal(signal.SIGKILL)
            process.wait()
            claim(tmp_path)
            assert not os.path.exists(theirs)
        finally:
            process.kill()
            process.communicate()

    def test_two_processes_that_start_at_once_do_not_disturb_each_other(self, tmp_path, monkeypatch):
        """One process inspects the other's lock file just before the other locks it."""
        name = uuid.UUID(int=1)
        monkeypatch.setattr("uuid.uuid4", lambda: name)
        file = tmp_path / f"verl_rhyme_weights_{name.hex}.lock"
        inspecting = ownership.lock(file, create=True)
        threading.Timer(0.1, os.close, [inspecting]).start()
        folder = claim(tmp_path)
        write(folder, 1)
        assert same(folder, 1)

    @pytest.mark.parametrize("stem", ["", "0" * 31, "*", "g" * 32])
    def test_only_names_made_by_claim_are_removed(self, tmp_path, stem):
        """Any user may make files in /dev/shm."""
        live = claim(tmp_path)
        write(live, 1)
        (tmp_path / f"verl_rhyme_weights_{stem}.lock").touch(0o666)
        other = tmp_path / f"verl_rhyme_weights_{stem}"
        other.mkdir()
        claim(tmp_path)
        assert same(live, 1)
        assert other.exists()

    @pytest.mark.parametrize(
        "signed", [{"host": "elsewhere", "boot": "another"}, None], ids=["another host", "unsigned"]
    )
    def test_folders_of_other_hosts_stay(self, tmp_path, signed):
        """On some network file systems locks do not reach other hosts, so that a live owner's lock can be taken."""
        theirs = claim(tmp_path)
        write(theirs, 1)
        lock = theirs.path.with_suffix(".lock")
        lock.write_text("" if signed is None else json.dumps({**json.loads(lock.read_text()), **signed}))
        let_go(theirs)
        claim(tmp_path)
        assert same(theirs, 1)

    def test_links_are_not_followed(self, tmp_path):
        (tmp_path / "root").mkdir()
        target = tmp_path / "global_step_10"
        target.mkdir()
        left = claim(tmp_path / "root")
        let_go(left)
        left.path.rmdir()
        left.path.symlink_to(target)
        (tmp_path / "aim").write_bytes(left.path.with_suffix(".lock").read_bytes())
        linked = tmp_path / "root" / f"verl_rhyme_weights_{'a' * 32}"
        linked.mkdir()
        linked.with_suffix(".lock").symlink_to(tmp_path / "aim")
        claim(tmp_path / "root")
        assert target.is_dir()
        assert linked.is_dir(), "a folder with a linked lock is removed"

    @pytest.mark.skipif(os.getuid() != 0, reason="only root may give a file away")
    @pytest.mark.parametrize("what", ["lock", "folder"])
    def test_folders_of_other_users_stay(self, tmp_path, what):
        theirs = claim(tmp_path)
        write(theirs, 1)
        let_go(theirs)
        os.chown(theirs.path if what == "folder" else theirs.path.with_suffix(".lock"), 12345, -1)
        claim(tmp_path)
        assert same(theirs, 1)


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    monkeypatch.setattr(relays, "keep_audible", lambda: None)
    return [Relay(str(tmp_path / str(n))) for n in range(5)]


async def test_a_version_reaches_all_nodes_by_a_tree(nodes):
    near = [Near(node) for node in nodes]
    await publish(nodes[0], 7)
    for place, node in enumerate(nodes[1:]):
        await node.fetch(7, known(7), [(near[place // 2], False)])
    replicas = [Replica(node) for node in nodes]
    await asyncio.gather(*(node.deliver(replica.target, 7) for node, replica in zip(nodes, replicas, strict=True)))
    parts = len(nodes[0]._folder.parts(7))
    assert [node.sent for node in near] == [2 * parts, 2 * parts, 0, 0, 0]
    for replica in replicas:
        assert replica.loaded.keys() == weights(7).keys()
        assert all(torch.equal(tensor, replica.loaded[name]) for name, tensor in weights(7).items())
        assert replica.calls[:3] == ["abort_all_requests", "release_kv_cache", "update_weights"]
        assert replica.calls[3:] == ["resume_kv_cache", "resume_engine_generation", "open_submission_gate"]


async def test_an_early_delivery_waits_for_the_version(nodes):
    near = Near(nodes[0])
    await nodes[1].fetch(1, known(1), [(near, False)])
    replica = Replica(nodes[1])
    delivery = asyncio.create_task(nodes[1].deliver(replica.target, 1))
    await asyncio.sleep(0.05)
    assert not replica.calls, "the replica stopped before the version arrived"
    await publish(nodes[0], 1)
    await asyncio.wait_for(delivery, 10)
    assert replica.loaded


async def test_a_damaged_part_is_fetched_again_and_never_loaded(nodes):
    broken = {"times": 2}

    def once(chunk, data):
        if chunk.part == 1 and broken["times"]:
            broken["times"] -= 1
            data[-1] ^= 1
        return data

    await publish(nodes[0], 1)
    await nodes[1].fetch(1, known(1), [(Near(nodes[0], once), False)])
    replica = Replica(nodes[1])
    await nodes[1].deliver(replica.target, 1)
    assert broken["times"] == 0
    assert same(nodes[1]._folder, 1)
    broken["times"] = 99
    await nodes[2].fetch(1, known(1), [(Near(nodes[0], once), False)])
    untouched = Replica(nodes[2])
    with pytest.raises(WeightsError, match="damaged"):
        await nodes[2].deliver(untouched.target, 1)
    assert not untouched.calls
    broken["times"] = 0
    await nodes[2].fetch(1, known(1), [(Near(nodes[0], once), False)])
    await nodes[2].deliver(untouched.target, 1)
    assert untouched.loaded


async def test_if_a_source_is_dead_the_next_one_is_tried(nodes):
    await publish(nodes[0], 1)
    await nodes[1].fetch(1, known(1), [(Dead(), False), (Near(nodes[0]), False)])
    replica = Replica(nodes[1])
    await nodes[1].deliver(replica.target, 1)
    assert replica.loaded
    await nodes[2].fetch(1, known(1), [(Dead(), False)])
    with pytest.raises(UnsentError, match="could not be fetched"):  # the trainer then starts another relay
        await nodes[2].deliver(Replica(nodes[2]).target, 1)


async def test_a_version_removed_before_it_arrived_is_not_waited_for(nodes):
    """A slow node: the actor's node has removed the version to make room for newer ones."""
    gate = asyncio.Event()

    class Slow(Near):
        def __getattr__(self, name):
            call = super().__getattr__(name).remote

            async def late(*arguments):
                await gate.wait()
                return await call(*arguments)

            return SimpleNamespace(remote=late)

    near, slow = Near(nodes[0]), Slow(nodes[0])
    await publish(nodes[0], 1)
    await nodes[1].fetch(1, known(1), [(slow, False)])
    replica = Replica(nodes[1])
    first = asyncio.create_task(nodes[1].deliver(replica.target, 1))
    await asyncio.sleep(0.02)
    for version in (2, 3):
        await publish(nodes[0], version)
    second = asyncio.create_task(nodes[1].deliver(replica.target, 3))
    gate.set()
    await nodes[1].fetch(3, known(3), [(near, False)])
    await asyncio.wait_for(asyncio.gather(first, second), 10)
    assert torch.equal(replica.loaded["layer.1"], weights(3)["layer.1"])
    assert replica.calls.count("update_weights") == 1
    with pytest.raises(WeightsError, match="removed to make room"):
        await nodes[0].parts(1)


async def test_two_versions_are_kept_and_those_being_loaded(nodes):
    [node] = nodes[:1]
    await publish(node, 1)
    gate = asyncio.Event()
    slow = Replica(node)
    slow.worker.update_weights = SimpleNamespace(remote=lambda global_steps: gate.wait())
    delivery = asyncio.create_task(node.deliver(slow.target, 1))
    await asyncio.sleep(0)
    for version in (2, 3):
        await publish(node, version)
    assert node._folder.versions() == [1, 2, 3]
    gate.set()
    await delivery
    await publish(node, 4)
    assert node._folder.versions() == [3, 4]


def busy(relay):
    """Return a replica whose server has requests until the event is set."""
    done = asyncio.Event()
    return Replica(relay, idle=done.wait), done


async def test_a_patient_delivery_waits_for_running_requests_and_loads_the_newest_version(nodes):
    [node] = nodes[:1]
    replica, done = busy(node)
    await publish(node, 1)
    first = asyncio.create_task(node.deliver(replica.target, 1, True))
    await asyncio.sleep(0.02)
    await publish(node, 2)
    second = asyncio.create_task(node.deliver(replica.target, 2, True))
    await asyncio.sleep(0.02)
    assert not replica.calls, "running requests were aborted"
    done.set()
    await asyncio.gather(first, second)
    assert replica.calls.count("update_weights") == 1
    assert torch.equal(replica.loaded["layer.1"], weights(2)["layer.1"])


async def test_an_impatient_delivery_hurries_a_patient_one(nodes):
    [node] = nodes[:1]
    replica, done = busy(node)
    await publish(node, 1)
    patient = asyncio.create_task(node.deliver(replica.target, 1, True))
    await asyncio.sleep(0.02)
    await asyncio.wait_for(asyncio.gather(node.deliver(replica.target, 1), patient), 10)
    assert replica.calls.count("update_weights") == 1
    await publish(node, 2)  # the hurry is over
    again = asyncio.create_task(node.deliver(replica.target, 2, True))
    await asyncio.sleep(0.02)
    assert not again.done()
    done.set()
    await again


async def test_a_hurry_outlives_a_delivery_in_flight(nodes):
    """An impatient delivery does not wait behind a patient one in the queue."""
    [node] = nodes[:1]
    replica, _ = busy(node)
    gate = asyncio.Event()
    load = replica.worker.update_weights

    async def slowly(global_steps):
        await gate.wait()
        await load.remote(global_steps=global_steps)

    replica.worker.update_weights = SimpleNamespace(remote=slowly)
    await publish(node, 1)
    first = asyncio.create_task(node.deliver(replica.target, 1))
    await asyncio.sleep(0.02)
    await publish(node, 2)
    patient = asyncio.create_task(node.deliver(replica.target, 2, True))
    await asyncio.sleep(0.02)
    hurried = asyncio.create_task(node.deliver(replica.target, 2))
    await asyncio.sleep(0.02)
    gate.set()
    await asyncio.wait_for(asyncio.gather(first, patient, hurried), 10)
    assert torch.equal(replica.loaded["layer.1"], weights(2)["layer.1"])


async def test_a_slow_node_holds_no_more_versions_than_others(nodes):
    near, gate = Near(nodes[0]), asyncio.Event()
    await publish(nodes[0], 1)
    await nodes[1].fetch(1, known(1), [(near, False)])
    await nodes[1].deliver(Replica(nodes[1]).target, 1)
    chunk = nodes[0].chunk

    async def slow(version, *arguments):
        if version == 2:
            await gate.wait()
        return await chunk(version, *arguments)

    nodes[0].chunk = slow
    most = 0
    for version in (2, 3):
        await publish(nodes[0], version)
        await nodes[1].fetch(version, known(version), [(near, False)])
        await asyncio.sleep(0.05)
        most = max(most, len([path for path in nodes[1]._folder.path.iterdir() if path.is_dir()]))
    gate.set()
    replica = Replica(nodes[1])
    await nodes[1].deliver(replica.target, 3)
    assert most <= 2
    assert nodes[1]._folder.versions() == [2, 3]


async def test_close_removes_the_folder(nodes):
    await publish(nodes[0], 1)
    await nodes[0].close()
    assert not nodes[0]._folder.path.exists()


async def test_a_version_that_is_written_again_replaces_the_old_one(nodes):
    near = Near(nodes[0])
    await publish(nodes[0], 1)
    await nodes[1].fetch(1, known(1), [(near, False)])
    await nodes[1].deliver(Replica(nodes[1]).target, 1)
    for node in nodes[:2]:
        await node.expect(1)
    assert nodes[1]._folder.versions() == []
    with pytest.raises(WeightsError, match="weights of version 1 were not sent"):
        await nodes[1].deliver(Replica(nodes[1]).target, 1)


async def test_a_dying_replica_raises_and_does_not_block_others(nodes):
    await publish(nodes[0], 1)
    dying = Replica(nodes[0], fails=True)
    with pytest.raises(RuntimeError, match="the engine died"):
        await nodes[0].deliver(dying.target, 1)
    assert dying.server.ended, "a replica with half of a version lives on"
    other = Replica(nodes[0])
    await nodes[0].deliver(other.target, 1)
    assert other.loaded
    assert not nodes[0]._loading[1]


def test_parts_are_as_large_as_buckets_at_most():
    assert RelayCheckpointEngine(1000)._part_bytes == 1000
    assert RelayCheckpointEngine(1 << 40)._part_bytes == folders.PART_BYTES
    assert Folder("x").path.name == "x"


async def test_a_new_relay_reuses_the_versions_of_a_dead_one(nodes):
    """One version is complete, one is half fetched: neither is sent again, and neither is loaded unverified."""
    await publish(nodes[0], 1)
    await nodes[1].fetch(1, known(1), [(Near(nodes[0]), False)])
    await nodes[1].deliver(Replica(nodes[1]).target, 1)
    await publish(nodes[0], 2)
    answered = []

    def half(chunk, data):
        answered.append(chunk)
        if len(answered) > 2:
            raise RayActorError
        return data

    await nodes[1].fetch(2, known(2), [(Near(nodes[0], half), False)])
    with pytest.raises(WeightsError, match="could not be fetched"):
        await nodes[1].deliver(Replica(nodes[1]).target, 2)
    path = await nodes[1].folder()
    let_go(nodes[1]._folder)
    heir = Relay(None, path)
    assert await heir.folder() == path
    assert heir._folder.versions() == [], "an unverified version is listed"
    replica = Replica(heir)
    with pytest.raises(WeightsError, match="weights of version 1 were not sent"):
        await heir.deliver(replica.target, 1)
    near = Near(nodes[0])
    await heir.fetch(1, known(1), [(near, False)])
    await heir.deliver(replica.target, 1)
    assert near.sent == 0, "an intact version is fetched again"
    await heir.fetch(2, known(2), [(near, False)])
    await heir.deliver(replica.target, 2)
    assert same(heir._folder, 2)


async def test_an_old_version_is_never_loaded_as_a_new_one_of_the_same_number(nodes):
    """A node that was unreachable when a version was written again has the old one, complete."""
    await publish(nodes[0], 1)
    await nodes[1].fetch(1, known(1), [(Near(nodes[0]), False)])
    await nodes[1].deliver(Replica(nodes[1]).target, 1)
    writer = nodes[0]._folder.writer(1, 3000)
    for name, tensor in weights(5).items():
        writer.add(name, tensor)
    writer.close()
    assert await nodes[0].written(1) == known(5)
    # the first source of node 2 has the old version
    for node, sources in ((nodes[2], [nodes[1], nodes[0]]), (nodes[1], [nodes[0]])):
        await node.fetch(1, known(5), [(Near(source), False) for source in sources])
        replica = Replica(node)
        await node.deliver(replica.target, 1)
        assert torch.equal(replica.loaded["layer.1"], weights(5)["layer.1"])


async def test_bytes_from_another_site_are_few_and_counted(nodes):
    near = Near(nodes[0])
    for version in (1, 2):
        await publish(nodes[0], version)
        await nodes[1].fetch(version, known(version), [(near, True)])
        await nodes[2].fetch(version, known(version), [(Near(nodes[1]), False)])
        for node in nodes[1:3]:
            await node.deliver(Replica(node).target, version)
        sent = sum(part.bytes for part in nodes[0]._folder.parts(version))
        far, within = await nodes[1].tally(), await nodes[2].tally()
        assert 0 < far["far_bytes"] < sent
        assert within["far_bytes"] == 0
        assert within["bytes"] >= sent
        assert far["damaged"] == far["lost"] == 0
    assert await nodes[1].tally() == {}


async def test_a_site_slower_than_training_steps_gets_new_versions(nodes):
    gate, requests = asyncio.Event(), []
    await publish(nodes[0], 1)
    chunk = nodes[0].chunk

    async def slow(version, chunk_, base, pack, far):
        answer = await chunk(version, chunk_, base, pack, far)
        requests.append((version, base and base.version))
        if version == 1:
            await gate.wait()
        return answer

    nodes[0].chunk = slow
    near, most = Near(nodes[0]), 0
    await nodes[1].fetch(1, known(1), [(near, True)])
    await asyncio.sleep(0.2)
    for version in (2, 3, 4, 5):
        await nodes[1].expect(version)
        await publish(nodes[0], version)
        await nodes[1].fetch(version, known(version), [(near, True)])
        most = max(most, len(nodes[0]._folder.versions()))
    gate.set()
    replica = Replica(nodes[1])
    await asyncio.wait_for(nodes[1].deliver(replica.target, 5), 20)
    assert torch.equal(replica.loaded["layer.1"], weights(5)["layer.1"])
    assert most == 3
    assert (5, None) not in requests, "version 5 was sent in full"
    await publish(nodes[0], 6)
    nodes[0]._far_requests = dict.fromkeys(nodes[0]._far_requests, -1e9)  # much later
    await publish(nodes[0], 7)
    assert nodes[0]._folder.versions() == [6, 7]
