"""Rows held by a worker: a later stage gets all its fields (tests/contract/test_held_rows.py fetches them)."""

import pytest
import torch
from verl.utils import tensordict_utils as tu

from verl_rhyme.actor.held_rows import JOIN, KEEP, HeldRows


def nested(dtype=torch.int64, start=0):
    rows = [torch.arange(start, start + n, dtype=dtype) for n in (3, 5)]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def sent(word=None, part=1, rows=2, **fields):
    """Return the data of a stage, with values shared by all rows."""
    data = tu.get_tensordict({"uid": ["a"] * rows, **fields})
    tu.assign_non_tensor_data(data, "calculate_entropy", word == KEEP)
    if word is not None:
        tu.assign_non_tensor_data(data, word, {"part": part, "fields": ["uid", *fields]} if word == KEEP else part)
    return data


FIRST = {
    "input_ids": nested(),
    "response_mask": nested(),
    "multi_modal_inputs": [{}, {"pixel_values": torch.ones(4)}],
}


def test_stage_joins_held_rows_with_new_fields():
    held = HeldRows()
    assert JOIN not in held.join(sent(KEEP, **FIRST)).keys()  # noqa: SIM118
    mask = nested(start=7)
    got = held.join(sent(JOIN, response_mask=mask, advantages=nested(torch.float32)))
    assert set(got.keys()) == {"uid", *FIRST, "advantages", "calculate_entropy"}
    assert got["input_ids"].values().tolist() == FIRST["input_ids"].values().tolist()
    assert got["response_mask"].values().tolist() == mask.values().tolist(), "a rewritten field is overwritten"
    assert tu.get(got, "multi_modal_inputs")[1]["pixel_values"].sum() == 4
    assert not tu.get(got, "calculate_entropy"), "values shared by all rows are the stage's own"


def test_data_without_a_part_are_unchanged():
    data = sent(**FIRST)
    assert HeldRows().join(data) is data


@pytest.mark.parametrize(("kept", "asked", "rows"), [(None, 1, 2), (1, 2, 2), (1, 1, 3)])
def test_rows_of_another_part_are_an_error(kept, asked, rows):
    held = HeldRows()
    if kept is not None:
        held.join(sent(KEEP, kept, **FIRST))
    with pytest.raises(RuntimeError, match=f"part {asked}"):
        held.join(sent(JOIN, asked, rows=rows))
