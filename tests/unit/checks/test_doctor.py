"""The doctor's check of the history folder."""

import os

from verl_rhyme.checks import doctor


def test_a_missing_history_folder_passes(tmp_path):
    assert [check.status for check in doctor.history_folder(tmp_path / "not" / "yet")] == ["ok"]


def test_a_symbolic_link_as_the_users_folder_fails(tmp_path):
    base = tmp_path / f"verl_rhyme-{os.getuid()}"
    base.symlink_to(tmp_path)
    assert [(check.name, check.status) for check in doctor.history_folder(base)] == [("history folder", "fail")]
