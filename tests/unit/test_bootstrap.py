"""Set-up of both environments: the real scripts in a fresh folder. A stand-in replaces ``uv``, which loads 11 GB."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # each runs the script

ROOT = Path(__file__).parents[2]
SCRIPT = 'set -euo pipefail\nsource "{root}/requirements/bootstrap.sh"\necho "made $VIRTUAL_ENV"\n'


class Checkout:
    """Fresh clone with small lock files; its ``uv`` logs each call and then runs the ``answer``."""

    def __init__(self, folder: Path) -> None:
        self.root, self.bin, self.calls_file = folder / "clone", folder / "bin", folder / "calls"
        shutil.copytree(ROOT / "requirements", self.root / "requirements")
        shutil.copy(ROOT / "pyproject.toml", self.root)
        self.bin.mkdir()
        self.answer("exit 0")
        pip = '"$4"/lib/python{}.{}/site-packages/pip'.format(*sys.version_info)
        self.program(  # without pip, which takes seconds to install
            "python3.11",
            f'[ "$2" = venv ] || exec {sys.executable} "$@"\n{sys.executable} -m venv --without-pip --clear "$4"\n'
            f"mkdir -p {pip}\ntouch {pip}/__main__.py\n",
        )

    def program(self, name: str, text: str) -> None:
        (self.bin / name).write_text(f"#!/bin/bash\n{text}\n")
        (self.bin / name).chmod(0o755)

    def answer(self, command: str) -> None:
        self.program("uv", f'echo "$@" >> {self.calls_file}\n{command}')

    def run(self, extra: str) -> tuple[int, str, str]:
        environment = {"HOME": os.environ["HOME"], "PATH": f"{self.bin}:/usr/bin:/bin", "RHYME_BUILD": "0"}
        environment |= {"RHYME_EXTRA": extra} if extra else {}
        command = ["bash", "-c", SCRIPT.format(root=self.root)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
        return done.returncode, done.stdout, done.stderr

    def calls(self) -> list[str]:
        found = self.calls_file.read_text().splitlines() if self.calls_file.exists() else []
        self.calls_file.unlink(missing_ok=True)
        return found


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.mark.parametrize("extra", ["cpu", "gpu"])
def test_a_lock_installs_once_and_again_when_it_changed(checkout: Checkout, extra: str) -> None:
    made = f"made {checkout.root}/.venv-{extra}\n"
    assert checkout.run(extra)[:2] == (0, made), "standard output belongs to the caller"
    lock, own = checkout.calls()
    assert f"{extra}.lock" in lock
    assert "--require-hashes" in lock
    assert ("vllm-cpu-alias" in own) == (extra == "cpu")
    assert own.endswith(f"-e {checkout.root}")
    assert checkout.run(extra) == (0, made, "")
    assert checkout.calls() == []
    with (checkout.root / f"requirements/{extra}.lock").open("a") as file:
        file.write("# changed\n")
    assert checkout.run(extra)[0] == 0
    assert "--reinstall" not in checkout.calls()[0]


def test_the_lock_is_that_of_the_machine(checkout: Checkout) -> None:
    for status, extra in ((9, "cpu"), (0, "gpu")):
        checkout.program("nvidia-smi", f"echo GPU 0; exit {status}")
        assert checkout.run("")[1] == f"made {checkout.root}/.venv-{extra}\n"
    assert "RHYME_EXTRA must be cpu or gpu, not 'tpu'" in checkout.run("tpu")[2]


@pytest.mark.parametrize("fault", ["kill -9 $PPID; sleep 5", "exit 1"])
def test_an_interrupted_or_failed_set_up_is_completed(checkout: Checkout, fault: str) -> None:
    checkout.answer(fault)
    code, out, _ = checkout.run("gpu")
    assert code != 0
    assert out == ""
    checkout.calls()
    checkout.answer("exit 0")
    code, out, err = checkout.run("gpu")
    assert (code, out) == (0, f"made {checkout.root}/.venv-gpu\n")
    assert ".venv-gpu is incomplete; completing it" in err
    assert "--reinstall" in checkout.calls()[0], "a partly written package looks installed"


def test_a_copied_checkout_does_not_run_the_code_of_the_first(checkout: Checkout) -> None:
    checkout.run("cpu")
    checkout.calls()
    first, checkout.root = checkout.root, checkout.root.with_name("copy")
    shutil.copytree(first, checkout.root, symlinks=True)
    assert f"was made for {first}" in checkout.run("cpu")[2]
    assert checkout.calls()[-1].endswith(f"-e {checkout.root}")
