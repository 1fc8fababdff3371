"""What the doctor says of what killed runs have left."""

import json
import os

import numpy as np
import pytest

from verl_rhyme.checks import doctor
from verl_rhyme.history.record import Trajectory
from verl_rhyme.history.store import HistoryStore

MIB = 1 << 20


def killed(folder, **owner):
    """A folder as a killed writer leaves it."""
    with HistoryStore(folder, "vocabulary", 8 * MIB, 1, run="old") as store:
        store.append([Trajectory(b"k" * 16, np.zeros(250_000, np.int32), 1.0, 0, 0, 0)], 1)
        text = (folder / "owner.json").read_text()
    (folder / "owner.json").write_text(json.dumps({**json.loads(text), **owner}))
    return folder


def left_over(base):
    return [check for check in doctor._history_disk(base) if check.name == "history left over"]


def test_another_machines_folder_is_named_with_its_size_and_what_to_do(tmp_path):
    folder = killed(tmp_path / "node", host="elsewhere", boot="another")
    [found] = left_over(tmp_path)
    assert found.status == "warn"
    assert f"{folder}: 0.9 MiB" in found.detail
    assert "elsewhere" in found.detail
    assert f"rm -r {folder}" in found.remedy


def test_another_runs_folder_is_named_where_all_runs_folders_lie(tmp_path):
    folder = killed(tmp_path / "run" / "node")
    assert [f"{folder}: " in found.detail for found in left_over(tmp_path)] == [True]


@pytest.mark.parametrize("owner", [{}, {"boot": "another"}, {"host": "elsewhere"}], ids=str)
def test_what_the_next_run_deletes_by_itself_is_not_named(tmp_path, owner):
    """A new boot, or a new container's name, beside the same of the other."""
    killed(tmp_path / "node", **owner)
    assert not left_over(tmp_path)


def test_a_live_writers_folder_is_not_named(tmp_path):
    with HistoryStore(tmp_path / "run" / "node", "vocabulary", MIB, 1, run="live"):
        assert not left_over(tmp_path)


def test_no_history_folder_yet(tmp_path):
    assert [check.status for check in doctor._history_disk(tmp_path / "not" / "yet")] == ["ok"]


def test_this_users_killed_runs_are_named_and_go_by_themselves(tmp_path):
    base = tmp_path / f"verl_rhyme-{os.getuid()}"
    killed(base / "run" / "node")
    foreign = killed(base / "run" / "other", host="elsewhere", boot="another")
    remedies = {found.detail.split(":")[0]: found.remedy for found in left_over(base)}
    assert remedies[str(base / "run" / "node")] == doctor.NEXT_RUN_REMOVES
    assert remedies[str(foreign)].endswith(f"rm -r {foreign}")


def test_a_link_in_the_place_of_the_users_folder_fails(tmp_path):
    base = tmp_path / f"verl_rhyme-{os.getuid()}"
    base.symlink_to(tmp_path)
    assert [(check.name, check.status) for check in doctor._history_disk(base)] == [("history folder", "fail")]
