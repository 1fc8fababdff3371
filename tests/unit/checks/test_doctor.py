"""The doctor's check of the history folder."""

import os

from verl_rhyme.checks import doctor
from verl_rhyme.checks.preflight import machine


def test_a_missing_history_folder_passes(tmp_path):
    assert [check.status for check in doctor.history_folder(tmp_path / "not" / "yet")] == ["ok"]


def test_a_symbolic_link_as_the_users_folder_fails(tmp_path):
    base = tmp_path / f"verl_rhyme-{os.getuid()}"
    base.symlink_to(tmp_path)
    assert [(check.name, check.status) for check in doctor.history_folder(base)] == [("history folder", "fail")]


def test_a_network_file_system_warns(tmp_path, monkeypatch):
    mounts = tmp_path / "mounts"
    mounts.write_text(
        f"/dev/vda / ext4 rw 0 0\nhome:/a {tmp_path}/my\\040home nfs4 rw 0 0\n"
        f"tmpfs {tmp_path}/my\\040home/local tmpfs rw 0 0\nlustre {tmp_path}/my lustre rw 0 0\n"
    )
    kinds = {"my home/new": "nfs4", "my home": "nfs4", "my home/local/new": None, "my": "lustre", "my house": None}
    assert {name: machine.network_file_system(tmp_path / name, mounts) for name in kinds} == kinds
    assert machine.network_file_system(tmp_path, tmp_path / "none") is None
    monkeypatch.setattr(doctor, "network_file_system", lambda folder: "nfs4")
    assert [check.status for check in doctor.history_folder(tmp_path)] == ["warn", "ok"]
