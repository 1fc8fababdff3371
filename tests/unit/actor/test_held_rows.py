"""Rows held by a worker: a later stage gets all its fields, and fetches none twice."""

import pytest
import torch
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import ActorRolloutRefWorker

from verl_rhyme.actor import actor
from verl_rhyme.actor.actor import streamed
from verl_rhyme.actor.held_rows import JOIN, KEEP, HeldRows

LENGTHS = (3, 5)


def nested(dtype=torch.int64, start=0):
    rows = [torch.arange(start, start + n, dtype=dtype) for n in LENGTHS]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def sent(word=None, part=1, rows=2, **fields):
    """Return the data of a stage, with values shared by all rows."""
    data = tu.get_tensordict({"uid": ["a"] * rows, **fields})
    tu.assign_non_tensor_data(data, "calculate_entropy", word == KEEP)
    if word is not None:
        tu.assign_non_tensor_data(data, word, {"part": part, "fields": ["uid", *fields]} if word == KEEP else part)
    return data


PIXELS = {"pixel_values": torch.ones(4)}
FIRST = {"input_ids": nested(), "response_mask": nested(), "multi_modal_inputs": [{}, PIXELS]}
BYTES = 2 * (8 * 8 + 3 * 8) + 4 * 4  # two fields of 8 tokens with offsets, and an image


def test_stage_joins_held_rows_with_new_fields():
    held = HeldRows()
    assert JOIN not in held.join(sent(KEEP, **FIRST)).keys()  # noqa: SIM118
    mask = nested(start=7)
    got = held.join(sent(JOIN, response_mask=mask, advantages=nested(torch.float32)))
    assert set(got.keys()) == {"uid", *FIRST, "advantages", "calculate_entropy"}
    assert got["input_ids"].values().tolist() == FIRST["input_ids"].values().tolist()
    assert got["response_mask"].values().tolist() == mask.values().tolist(), "what was written anew is not overwritten"
    assert tu.get(got, "multi_modal_inputs")[1]["pixel_values"].sum() == 4
    assert not tu.get(got, "calculate_entropy"), "what is said beside the rows is the stage's own"
    new = 2 * (3 * 8) + 8 * 8 + 8 * 4
    assert held.take_counts() == (BYTES + new, BYTES - (8 * 8 + 3 * 8))
    assert held.take_counts() == (0, 0)


def test_data_without_a_part_are_unchanged():
    held = HeldRows()
    data = sent(**FIRST)
    assert held.join(data) is data
    assert held.take_counts() == (0, 0)


@pytest.mark.parametrize(("kept", "asked", "rows"), [(None, 1, 2), (1, 2, 2), (1, 1, 3)])
def test_rows_of_another_part_are_an_error(kept, asked, rows):
    held = HeldRows()
    if kept is not None:
        held.join(sent(KEEP, kept, **FIRST))
    with pytest.raises(RuntimeError, match=f"part {asked}"):
        held.join(sent(JOIN, asked, rows=rows))


def test_actor_and_reference_share_the_rows(monkeypatch):
    """verl makes two workers in one process when the engines are separate."""
    monkeypatch.setattr(actor, "ROWS", HeldRows())
    got = []

    class Theirs(ActorRolloutRefWorker):
        def compute_log_prob(self, data):
            got.append(("actor", set(data.keys())))

        def compute_ref_log_prob(self, data):
            got.append(("ref", set(data.keys())))

        def update_actor(self, data):
            got.append(("update", set(data.keys())))

    ours, reference = (object.__new__(streamed(Theirs)) for _ in range(2))
    ours.compute_log_prob(sent(KEEP, **FIRST))
    reference.compute_ref_log_prob(sent(JOIN))
    ours.update_actor(sent(JOIN, advantages=nested()))
    everything = {"uid", *FIRST, "calculate_entropy"}
    assert got == [("actor", everything), ("ref", everything), ("update", everything | {"advantages"})]
    fetched, reused = ours.fetched_bytes()
    assert reused == 2 * BYTES
    assert fetched == BYTES + 8 * 8 + 3 * 8
    with pytest.raises(RuntimeError):
        ours.compute_log_prob(sent(JOIN))  # fetched_bytes() dropped the rows
