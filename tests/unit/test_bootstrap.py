"""Set-up of both environments: the real scripts in a fresh folder. A stand-in replaces ``uv``, which loads 11 GB."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ONLY_SLOW

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
        python = self.bin / "python3.11"
        # without pip, which takes seconds to install
        python.write_text(
            f'#!/bin/sh\n[ "$2" = venv ] || exec {sys.executable} "$@"\n'
            f'{sys.executable} -m venv --without-pip --clear "$4"\n'
            'mkdir -p "$4"/lib/python{0}.{1}/site-packages/pip\n'
            "echo 'print(1)' > \"$4\"/lib/python{0}.{1}/site-packages/pip/__main__.py\n".format(*sys.version_info)
        )
        python.chmod(0o755)

    def answer(self, command: str) -> None:
        uv = self.bin / "uv"
        uv.write_text(f'#!/bin/bash\necho "$@" >> {self.calls_file}\n{command}\n')
        uv.chmod(0o755)

    def start(self, extra: str | None, **variables: str) -> subprocess.Popen[str]:
        environment = {"HOME": os.environ["HOME"], "PATH": f"{self.bin}:/usr/bin:/bin", "RHYME_BUILD": "0", **variables}
        if extra is not None:
            environment["RHYME_EXTRA"] = extra
        return subprocess.Popen(
            ["bash", "-c", SCRIPT.format(root=self.root)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def run(self, extra: str | None, **variables: str) -> tuple[int, str, str]:
        process = self.start(extra, **variables)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def calls(self) -> list[str]:
        found = self.calls_file.read_text().splitlines() if self.calls_file.exists() else []
        self.calls_file.unlink(missing_ok=True)
        return found

    def program(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.mark.parametrize("extra", ["cpu", "gpu"])
def test_both_locks_install(checkout: Checkout, extra: str) -> None:
    code, out, err = checkout.run(extra)
    assert code == 0, err
    assert out == f"made {checkout.root}/.venv-{extra}\n", "standard output belongs to the caller"
    lock, own = checkout.calls()
    assert f"{extra}.lock" in lock
    assert "--require-hashes" in lock
    assert ("vllm-cpu-alias" in own) == (extra == "cpu")
    assert own.endswith(f"-e {checkout.root}")


def test_a_second_start_does_nothing(checkout: Checkout) -> None:
    checkout.run("cpu")
    checkout.calls()
    assert checkout.run("cpu") == (0, f"made {checkout.root}/.venv-cpu\n", "")
    assert checkout.calls() == []


def test_the_default_is_the_gpu_lock_if_nvidia_smi_works(checkout: Checkout) -> None:
    checkout.program("nvidia-smi", "#!/bin/sh\necho GPU 0\n")
    assert checkout.run(None)[1] == f"made {checkout.root}/.venv-gpu\n"
    checkout.program("nvidia-smi", "#!/bin/sh\nexit 9\n")
    assert checkout.run(None)[1] == f"made {checkout.root}/.venv-cpu\n"


def test_the_tests_use_the_cpu_lock_on_a_machine_with_gpus(checkout: Checkout) -> None:
    shutil.copytree(ROOT / "tests", checkout.root / "tests", ignore=lambda folder, names: set(names) - {"run.sh"})
    checkout.program("nvidia-smi", "#!/bin/sh\necho GPU 0\n")
    environment = {"HOME": os.environ["HOME"], "PATH": f"{checkout.bin}:/usr/bin:/bin"}
    command = ["bash", str(checkout.root / "tests/run.sh"), "--version"]
    subprocess.run(command, env=environment, capture_output=True, timeout=60)
    assert (checkout.root / ".venv-cpu").is_dir()
    assert not (checkout.root / ".venv-gpu").exists()
    subprocess.run(command, env={**environment, "RHYME_EXTRA": "gpu"}, capture_output=True, timeout=60)
    assert (checkout.root / ".venv-gpu").is_dir()


def test_an_interrupted_set_up_is_completed(checkout: Checkout) -> None:
    checkout.answer("kill -9 $PPID; sleep 5")
    code, out, _ = checkout.run("gpu")
    assert code != 0
    assert out == ""
    checkout.calls()
    checkout.answer("exit 0")
    code, out, err = checkout.run("gpu")
    assert (code, out) == (0, f"made {checkout.root}/.venv-gpu\n")
    assert ".venv-gpu is incomplete; completing it" in err
    assert "--reinstall" in checkout.calls()[0], "a partly written package looks installed"
    checkout.run("gpu")
    assert checkout.calls() == []


def test_a_failed_install_is_reported_and_repeated(checkout: Checkout) -> None:
    checkout.answer("exit 1")
    code, out, err = checkout.run("cpu")
    assert code == 1
    assert out == ""
    assert "could not install" in err
    checkout.answer("exit 0")
    assert checkout.run("cpu")[0] == 0


def test_a_changed_lock_is_installed_over_the_old_one(checkout: Checkout) -> None:
    checkout.run("gpu")
    checkout.calls()
    with (checkout.root / "requirements/gpu.lock").open("a") as lock:
        lock.write("# changed\n")
    assert checkout.run("gpu")[0] == 0
    first, _ = checkout.calls()
    assert "--reinstall" not in first


def test_an_environment_without_its_python_is_recreated(checkout: Checkout) -> None:
    checkout.run("cpu")
    python = checkout.root / ".venv-cpu/bin/python"
    python.unlink()
    python.symlink_to("/nowhere/python3")
    assert checkout.run("cpu")[0] == 0
    assert subprocess.run([python, "-c", ""]).returncode == 0


def test_a_copied_checkout_does_not_run_the_code_of_the_first(checkout: Checkout) -> None:
    checkout.run("cpu")
    checkout.calls()
    first = checkout.root
    checkout.root = first.with_name("link")
    checkout.root.symlink_to(first)
    assert checkout.run("cpu")[0] == 0
    assert checkout.calls() == [], "a link to the same folder"
    checkout.root = first.with_name("copy")
    shutil.copytree(first, checkout.root, symlinks=True)
    code, _, err = checkout.run("cpu")
    assert code == 0
    assert f"was made for {first}" in err
    lock, own = checkout.calls()
    assert "--reinstall" in lock
    assert own.endswith(f"-e {checkout.root}")
    checkout.run("cpu")
    assert checkout.calls() == []


def test_two_set_ups_at_once_install_once(checkout: Checkout) -> None:
    checkout.answer("sleep 1")
    first = checkout.start("cpu")
    deadline = time.monotonic() + 30
    while not checkout.calls_file.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    second = checkout.start("cpu")
    results = [process.communicate(timeout=60) for process in (first, second)]
    assert [out for out, _ in results] == [f"made {checkout.root}/.venv-cpu\n"] * 2
    assert "another process is making .venv-cpu; waiting for it" in results[1][1]
    assert len(checkout.calls()) == 2, "one call for the lock, one for verl-rhyme"


def test_an_unknown_lock_is_refused(checkout: Checkout) -> None:
    code, _, err = checkout.run("tpu")
    assert code != 0
    assert "RHYME_EXTRA must be cpu or gpu, not 'tpu'" in err


class TestBuild:
    """Builds of the GPU set-up; nvcc, compiler and packages are missing, so no build succeeds."""

    def test_missing_tools_are_reported_and_the_set_up_succeeds(self, checkout: Checkout) -> None:
        code, out, err = checkout.run("gpu", RHYME_BUILD="transformer-engine")
        assert (code, out) == (0, f"made {checkout.root}/.venv-gpu\n")
        assert "no nvcc in .venv-gpu" in err
        assert "recipes/README.md" in err

    def script(self, checkout: Checkout, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(checkout.root / "requirements/build.sh"), *arguments],
            env={"HOME": os.environ["HOME"], "PATH": f"{checkout.bin}:/usr/bin:/bin", **variables},
            capture_output=True,
            text=True,
            timeout=60,
        )

    @pytest.fixture
    def nvcc(self, checkout: Checkout) -> Path:
        """Environment in which a build can start; a stand-in replaces pip and fails by default."""
        checkout.program("c++", "#!/bin/sh\nexit 0\n")
        checkout.run("gpu")
        checkout.calls()
        site = next((checkout.root / ".venv-gpu/lib").glob("python*")) / "site-packages"
        (site / "nvidia/cu13/bin").mkdir(parents=True)
        (site / "nvidia/cu13/bin/nvcc").touch(mode=0o755)
        (site / "pip/__main__.py").write_text("import sys; sys.exit('no compiler today')\n")
        return site

    def test_a_failed_build_is_reported_and_not_repeated_at_every_start(self, checkout: Checkout, nvcc: Path) -> None:
        results = self.script(checkout, "--unless-tried", "flash-attn", CUDA_ARCHS="89")
        assert results.returncode == 1
        assert "building flash-attn for 89" in results.stdout
        assert "no compiler today" in results.stderr
        again = self.script(checkout, "--unless-tried", "flash-attn")
        assert again.returncode == 0
        assert "to try again: bash requirements/build.sh flash-attn" in again.stderr
        assert "no compiler today" in self.script(checkout, "flash-attn").stderr

    def test_a_second_build_resumes_and_installs_with_hashes(self, checkout: Checkout, nvcc: Path) -> None:
        (nvcc / "pip/__main__.py").write_text(
            "import io, pathlib, sys, tarfile\n"
            "verb, arguments = sys.argv[1], sys.argv[2:]\n"
            f"open({str(checkout.calls_file)!r}, 'a').write(f'pip {{verb}} {{arguments}}\\n')\n"
            "if verb == 'download':\n"
            "    lock = open(arguments[arguments.index('-r') + 1]).read()\n"
            "    assert lock.startswith('transformer-engine-torch==') and lock.count('==') == 1, lock\n"
            "    with tarfile.open(arguments[-1] + '/source.tar.gz', 'w:gz') as file:\n"
            "        file.addfile(tarfile.TarInfo('x/setup.py'), io.BytesIO())\n"
            "elif verb == 'wheel':\n"
            "    source = pathlib.Path(arguments[-3])\n"
            "    assert (source / 'setup.py').exists()\n"
            "    if not (source / 'compiled').exists():\n"
            "        (source / 'compiled').touch()\n"
            "        sys.exit('killed half-way')\n"
            "    wheel = pathlib.Path(arguments[-1])\n"
            "    wheel.mkdir()\n"
            "    (wheel / 'a.whl').touch()\n"
        )
        assert "killed half-way" in self.script(checkout, "transformer-engine").stderr
        assert [call.split()[:2] for call in checkout.calls()] == [["pip", "download"], ["pip", "wheel"]]
        refused = self.script(checkout, "transformer-engine")
        assert "No module named 'torch'" in refused.stderr, "a package that cannot be imported does not count as built"
        assert refused.returncode == 1
        wheel, hashed, own = checkout.calls()
        assert wheel.startswith("pip wheel")
        assert "--require-hashes" in hashed
        assert own.endswith("/wheel/a.whl")
        (nvcc / "torch.py").touch()
        (nvcc / "transformer_engine").mkdir()
        (nvcc / "transformer_engine/pytorch.py").touch()
        done = self.script(checkout, "transformer-engine")
        assert done.returncode == 0, done.stderr
        assert len(checkout.calls()) == 2, "the wheel exists and is only installed"
        assert self.script(checkout, "transformer-engine").stdout == ""
        assert checkout.calls() == []

    def test_an_unknown_package_is_refused(self, checkout: Checkout) -> None:
        results = self.script(checkout, "apex")
        assert results.returncode == 1
        assert "cannot build 'apex'" in results.stderr


@ONLY_SLOW  # installs 12 GB
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("extra", "version"), [("cpu", "0.24.0+cpu"), ("gpu", "0.24.0")])
def test_a_fresh_clone_with_the_real_packages(tmp_path: Path, extra: str, version: str) -> None:
    subprocess.run(["git", "clone", "-q", ROOT, tmp_path / "clone"], check=True)
    code = (
        "import importlib.metadata, torch, verl, verl_rhyme, vllm\n"
        "print(importlib.metadata.version('vllm'), verl_rhyme.__file__)"
    )
    made = subprocess.run(
        ["bash", "-c", f'{SCRIPT.format(root=tmp_path / "clone")}cd /\npython -c "{code}" 2>/dev/null'],
        env={
            **{key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")},
            "RHYME_EXTRA": extra,
            "RHYME_BUILD": "0",
            "VERL_PLATFORM": "cpu",
        },
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    folder = tmp_path / "clone"
    assert made.stdout.splitlines()[-2:] == [
        f"made {folder}/.venv-{extra}",
        f"{version} {folder}/verl_rhyme/__init__.py",
    ]
    if extra == "gpu":
        contract = subprocess.run(
            ["bash", folder / "tests/run.sh", "tests/contract", "-q", "-n", "2"],
            env={**os.environ, "RHYME_EXTRA": "gpu", "RHYME_SLOW": "", "PYTHONPATH": ""},
            capture_output=True,
            text=True,
        )
        assert contract.returncode == 0, contract.stdout[-4000:]
